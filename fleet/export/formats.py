"""A sample of an export, and what its three formats have in common."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fleet.results.images import Fault
from imagefleet.job import prompt
from imagefleet.records import columns
from imagefleet.records.record import Record

#: The two values of img2dataset's column of statuses.
SUCCESS, FAILED = "success", "failed_to_download"

_FAULTS = {
    "missing": "the image is missing",
    "changed": "the image is not as it was recorded",
}

#: What the columns of an export have from a result.
FIELDS = (
    *("id", "campaign", "index", "prompt", "negative_prompt", "seed", "model", "loras", "sampler"),
    *("steps", "cfg_scale", "clip_skip", "worker", "gpu", "seconds", "at", "metadata"),
)

#: Columns that say nothing where what failed is left out.
OF_IMG2DATASET = {"key", "status", "error_message", "original_width", "original_height"}


@dataclass
class Sample:
    """An image with its record; *data* is None where it cannot be exported."""

    key: str
    """The key that img2dataset makes: the digits of the shard, then those of the sample."""
    record: Record
    data: bytes | None
    fault: Fault | None = None

    @cached_property
    def sha256(self) -> str | None:
        return None if self.data is None else hashlib.sha256(self.data).hexdigest()

    @property
    def name(self) -> str:
        """The image's file name."""
        return (self.record.blob or "").rpartition("/")[2]

    def row(self, address: columns.Address) -> dict[str, Any]:
        """img2dataset's columns, and those of a result."""
        result = columns.row(self.record, address)
        width, height = self.record.width, self.record.height
        return {
            "url": result["address"],
            # The prompt without the LoRAs that it names.
            "caption": prompt.read_words(self.record.prompt or "")[0],
            "key": self.key,
            "status": FAILED if self.fault else SUCCESS,
            "error_message": _FAULTS[self.fault] if self.fault else None,
            "width": width,
            "height": height,
            "original_width": width,
            "original_height": height,
            "sha256": self.sha256,
            **{name: result[name] for name in FIELDS},
        }


class ShardFiles(abc.ABC):
    """The files of a shard in one of the formats, in a folder of their own."""

    entries: Sequence[str]
    """Files and folders below the export's; the last one completes the shard."""

    def __init__(self, folder: Path, number: int, shards: int) -> None:
        self.folder = folder
        self.stem = f"{number:05}"
        self.shards = shards

    @abc.abstractmethod
    def open(self, address: columns.Address) -> None:
        """Begins to write."""

    @abc.abstractmethod
    def add(self, samples: Sequence[Sample]) -> None:
        """Writes samples, in the order of the plan."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finishes the files."""

    @abc.abstractmethod
    def digests(self) -> Iterator[str]:
        """The SHA-256 of each image in the files, in their order."""
