"""Shards as img2dataset writes them: `00000.tar`, `00000.parquet`, `00000_stats.json`."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.export.formats import FIELDS, SUCCESS, Sample, ShardFiles
from fleet.results import parquet
from fleet.results.parquet import arrow
from imagefleet.records import columns

if TYPE_CHECKING:
    import pyarrow as pa

#: Suffixes in a tar beside that of the image.
_TEXTS = {"txt", "json"}


def schema() -> pa.Schema:
    """The columns of a shard's Parquet file: img2dataset's, and those of results."""
    pa, of_results = arrow(), parquet.schema()
    sizes = ("width", "height", "original_width", "original_height")
    return pa.schema(
        [
            *((name, pa.string()) for name in ("url", "caption", "key", "status", "error_message")),
            *((name, pa.int64()) for name in sizes),
            ("sha256", pa.string()),
            *(of_results.field(name) for name in FIELDS),
        ]
    )


class Webdataset(ShardFiles):
    """A tar with KEY.png, KEY.txt and KEY.json for each image, and what is said of them."""

    def __init__(self, folder: Path, number: int, shards: int) -> None:
        super().__init__(folder, number, shards)
        # img2dataset, too, takes a shard for done once its statistics are there.
        self.entries = [f"{self.stem}{end}" for end in (".tar", ".parquet", "_stats.json")]
        self._paths = [folder / entry for entry in self.entries]

    def open(self, address: columns.Address) -> None:
        tar, rows, _ = self._paths
        self._address = address
        self._tar = tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._rows = arrow().parquet.ParquetWriter(rows, schema(), compression="zstd")
        self._statuses = Counter[str]()
        self._times: list[datetime] = []

    def add(self, samples: Sequence[Sample]) -> None:
        rows = [sample.row(self._address) for sample in samples]
        times = [*self._times, *(sample.record.at for sample in samples)]
        self._times = [min(times), max(times)]
        for sample, row in zip(samples, rows, strict=True):
            self._statuses[str(row["error_message"] or SUCCESS)] += 1
            if sample.data is not None:
                text = json.dumps(row, indent=4, default=datetime.isoformat)
                self._write(sample, sample.name.rpartition(".")[2].lower(), sample.data)
                self._write(sample, "txt", row["caption"].encode())
                self._write(sample, "json", text.encode())
        told = [*map(parquet.cells, rows)]
        self._rows.write_table(arrow().Table.from_pylist(told, schema()))

    def close(self) -> None:
        self._tar.close()
        self._rows.close()
        count, successes = self._statuses.total(), self._statuses[SUCCESS]
        # img2dataset has the times of its run here. These are of the images, so that the same
        # campaign gives the same shards.
        first, last = [at.timestamp() for at in self._times] or [0.0, 0.0]
        stats = {
            "count": count,
            "successes": successes,
            "failed_to_download": count - successes,
            "failed_to_resize": 0,
            "duration": last - first,
            "start_time": first,
            "end_time": last,
            "status_dict": dict(sorted(self._statuses.items())),
        }
        self._paths[2].write_text(json.dumps(stats, indent=4), encoding="utf-8")

    def digests(self) -> Iterator[str]:
        with tarfile.open(self._paths[0], "r|") as tar:
            for member in tar:
                is_image = member.name.rpartition(".")[2] not in _TEXTS
                if is_image and (file := tar.extractfile(member)):
                    yield hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]

    def _write(self, sample: Sample, suffix: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{sample.key}.{suffix}")
        member.size = len(data)
        member.mtime = max(0, int(sample.record.at.timestamp()))
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))
