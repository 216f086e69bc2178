"""What the three formats have in common: a shard is written, read back, and moved into place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from fleet.export.sample import Sample
from imagefleet.records import columns


class ShardWriter(Protocol):
    """Writes one shard into a folder of its own."""

    def add(self, samples: Sequence[Sample]) -> None:
        """Writes samples, in the order of the plan."""

    def close(self) -> None:
        """Finishes the files."""


class ShardFormat(Protocol):
    """One of the formats."""

    def writer(self, folder: Path, number: int, address: columns.Address) -> ShardWriter: ...

    def digests(self, folder: Path, number: int) -> Iterator[str]:
        """The SHA-256 of each image in the files of a shard, in their order."""

    def entries(self, number: int) -> list[str]:
        """A shard's files and folders, below the export's; the last one completes it."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(number: int, place: int, shard_size: int) -> str:
    """The key of a sample as img2dataset makes it: digits of the shard, then of the sample."""
    return f"{number:05}{place:0{max(4, len(str(shard_size - 1)))}}"
