"""Folders of images with a `metadata.jsonl` each, as `datasets` reads an `imagefolder`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet.export.formats import OF_IMG2DATASET, Sample, ShardFiles
from fleet.results import files
from imagefleet import errors
from imagefleet.records import columns

METADATA = "metadata.jsonl"

#: Texts: `datasets` takes the types of all columns from the first lines that it reads.
_NEVER_NULL = {"prompt", "negative_prompt", "model", "sampler", "worker", "gpu"}


class Imagefolder(ShardFiles):
    """A folder with images under their own names."""

    def __init__(self, folder: Path, number: int, shards: int) -> None:
        super().__init__(folder, number, shards)
        self.entries = [self.stem]
        self._folder = folder / self.stem

    def open(self, address: columns.Address) -> None:
        self._folder.mkdir()
        self._address = address
        self._lines = (self._folder / METADATA).open("w", encoding="utf-8")

    def add(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.data is not None:
                self._write(sample.name, sample.data)
                self._lines.write(json.dumps(self._row(sample), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._lines.close()

    def digests(self) -> Iterator[str]:
        with (self._folder / METADATA).open(encoding="utf-8") as lines:
            for line in lines:
                yield files.sha256(self._folder / json.loads(line)["file_name"])

    def _write(self, name: str, data: bytes) -> None:
        try:
            with (self._folder / name).open("xb") as file:
                file.write(data)
        except FileExistsError:
            raise errors.SetupError(
                f"{name} has the name of another image but for capitals, which {self._folder}"
                " ignores: choose another --format, or another disk"
            ) from None

    def _row(self, sample: Sample) -> dict[str, Any]:
        row = sample.row(self._address)
        return {
            "file_name": sample.name,
            **{name: value for name, value in row.items() if name not in OF_IMG2DATASET},
            **{name: row[name] or "" for name in _NEVER_NULL},
            "loras": " ".join(f"{each['name']}:{each['weight']:g}" for each in row["loras"]),
            "metadata": columns.json_text(row["metadata"]) if row["metadata"] else "",
            # Not ISO 8601, of which Arrow makes one type or another.
            "at": f"{row['at']:%Y-%m-%d %H:%M:%S} UTC",
        }
