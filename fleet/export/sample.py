"""One image of an export, and what is said about it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from fleet.results import images
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


@dataclass(frozen=True, slots=True)
class Sample:
    """An image with its record; *data* is None where it cannot be exported."""

    key: str
    """The key that img2dataset makes: the digits of the shard, then those of the sample."""
    record: Record
    data: bytes | None
    sha256: str | None
    fault: images.Fault | None = None

    @property
    def blob(self) -> str:
        return self.record.blob or ""

    @property
    def name(self) -> str:
        """The image's file name."""
        return self.blob.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return self.name.rpartition(".")[2].lower()

    @property
    def caption(self) -> str:
        """The prompt without the LoRAs that it names."""
        return prompt.read_words(self.record.prompt or "")[0]

    def row(self, address: columns.Address) -> dict[str, Any]:
        """img2dataset's columns, and those of a result."""
        result = columns.row(self.record, address)
        width, height = self.record.width, self.record.height
        return {
            "url": result["address"],
            "caption": self.caption,
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


def of(key: str, record: Record, image: images.Image) -> Sample:
    """The sample of an image; one that is not as recorded is left out."""
    data = None if image.fault else image.data
    sha256 = None if data is None else hashlib.sha256(data).hexdigest()
    return Sample(key, record, data, sha256, image.fault)
