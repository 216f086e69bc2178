"""A sample of an export, and the three formats of shards: webdataset, Parquet and image folders."""

from __future__ import annotations

import abc
import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.results import files
from fleet.results.download import Fault
from fleet.results.forms import arrow, parquet_cells, parquet_schema
from imagefleet import errors
from imagefleet.job import prompt
from imagefleet.records import columns
from imagefleet.records.record import Record

if TYPE_CHECKING:
    import pyarrow as pa

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


#: Suffixes in a tar beside that of the image.
_TEXTS = {"txt", "json"}


def _of_rows() -> pa.Schema:
    """The columns of a shard's Parquet file: img2dataset's, and those of results."""
    pa, of_results = arrow(), parquet_schema()
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
        self._rows = arrow().parquet.ParquetWriter(rows, _of_rows(), compression="zstd")
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
        told = [*map(parquet_cells, rows)]
        self._rows.write_table(arrow().Table.from_pylist(told, _of_rows()))

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


def _of_images() -> pa.Schema:
    """The columns, with the features by which `datasets` decodes the images."""
    pa = arrow()
    image = pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    told = [field for field in _of_rows() if field.name not in OF_IMG2DATASET]
    features = {"image": {"_type": "Image"}} | {field.name: _feature(field.type) for field in told}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([image, *told], metadata=metadata)


def _feature(kind: pa.DataType) -> Any:
    pa = arrow()
    if pa.types.is_list(kind):
        return [_feature(kind.value_type)]
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    names = {pa.float64(): "float64", pa.timestamp("us", "UTC"): "timestamp[us, tz=UTC]"}
    return {"dtype": names.get(kind, str(kind)), "_type": "Value"}


class Parquet(ShardFiles):
    """A file; each call of `add` is a row group, so that readers need not load all images."""

    def __init__(self, folder: Path, number: int, shards: int) -> None:
        super().__init__(folder, number, shards)
        self.entries = [f"data/train-{number:05}-of-{shards:05}.parquet"]
        self._path = folder / self.entries[0]

    def open(self, address: columns.Address) -> None:
        self._path.parent.mkdir(exist_ok=True)
        self._address = address
        # The images are compressed already.
        self._file = arrow().parquet.ParquetWriter(self._path, _of_images(), compression="zstd")

    def add(self, samples: Sequence[Sample]) -> None:
        rows = [
            {
                **parquet_cells(sample.row(self._address)),
                "image": {"bytes": sample.data, "path": sample.name},
            }
            for sample in samples
            if sample.data is not None
        ]
        if rows:
            self._file.write_table(arrow().Table.from_pylist(rows, self._file.schema))

    def close(self) -> None:
        self._file.close()

    def digests(self) -> Iterator[str]:
        with arrow().parquet.ParquetFile(self._path) as file:
            for group in range(file.num_row_groups):
                for image in file.read_row_group(group, ["image"])["image"]:
                    yield hashlib.sha256(image["bytes"].as_buffer()).hexdigest()


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
