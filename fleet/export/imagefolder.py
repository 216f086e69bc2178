"""Folders of images with a `metadata.jsonl` each, as `datasets` reads an `imagefolder`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet.export import formats
from fleet.export.sample import Sample
from imagefleet import errors
from imagefleet.records import columns

METADATA = "metadata.jsonl"

_LEFT_OUT = {"key", "status", "error_message", "original_width", "original_height"}

#: Texts: `datasets` takes the types of all columns from the first lines that it reads.
_NEVER_NULL = {"prompt", "negative_prompt", "model", "sampler", "worker", "gpu"}


class Imagefolder:
    """The format."""

    def writer(self, folder: Path, number: int, address: columns.Address) -> FolderWriter:
        return FolderWriter(folder / f"{number:05}", address)

    def entries(self, number: int) -> list[str]:
        return [f"{number:05}"]

    def digests(self, folder: Path, number: int) -> Iterator[str]:
        with (folder / f"{number:05}" / METADATA).open(encoding="utf-8") as lines:
            for line in lines:
                yield formats.sha256_of(folder / f"{number:05}" / json.loads(line)["file_name"])


class FolderWriter:
    """A folder with images under their own names."""

    def __init__(self, folder: Path, address: columns.Address) -> None:
        folder.mkdir()
        self._folder = folder
        self._address = address
        self._lines = (folder / METADATA).open("w", encoding="utf-8")

    def add(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.data is None:
                continue
            self._write(sample.name, sample.data)
            line = json.dumps(self._row(sample), ensure_ascii=False)
            self._lines.write(line + "\n")

    def close(self) -> None:
        self._lines.close()

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
        loras = " ".join(f"{each['name']}:{each['weight']:g}" for each in row["loras"])
        told = {name: value for name, value in row.items() if name not in _LEFT_OUT}
        return (
            {"file_name": sample.name}
            | told
            | {name: row[name] or "" for name in _NEVER_NULL}
            | {
                "loras": loras,
                "metadata": columns.json_text(row["metadata"]) if row["metadata"] else "",
                # Not ISO 8601, of which Arrow makes one type or another.
                "at": f"{row['at']:%Y-%m-%d %H:%M:%S} UTC",
            }
        )
