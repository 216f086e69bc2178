"""A sample of an export, and the three formats of shards: webdataset, Parquet and image folders."""

import abc
import contextlib
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cli import files
from imagefleet import errors, sweep
from imagefleet.records import columns
from imagefleet.records.pictures import Fault
from imagefleet.records.record import Record

#: The two values of img2dataset's column of statuses.
SUCCESS, FAILED = "success", "failed_to_download"

_FAULTS = {
    "missing": "the image is missing",
    "misfit": "the image is not as it was recorded, or damaged",
}

#: What the columns of an export have from a result.
FIELDS = (
    *(
        "id",
        "campaign",
        "index",
        "prompt",
        "negative_prompt",
        "seed",
        "model",
        "loras",
        "sampler",
    ),
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
    fault: Fault | None
    misfits: int
    """Its image's records that are of no picture that is stored."""

    @cached_property
    def sha256(self) -> str | None:
        return None if self.data is None else hashlib.sha256(self.data).hexdigest()

    @property
    def name(self) -> str:
        return (self.record.blob or "").rpartition("/")[2]

    def row(self, address: columns.Address) -> dict[str, Any]:
        """img2dataset's columns, and those of a result."""
        result = columns.row(self.record, address)
        width, height = self.record.width, self.record.height
        return {
            "url": result["address"],
            "caption": sweep.caption_of(self.record),
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


Rows = Sequence[tuple[Sample, dict[str, Any]]]


class ShardFiles(abc.ABC):
    """The files of a shard in one of the formats, in a folder of their own, and what is in them."""

    listed: Sequence[Path]
    """Those of the manifest; the last one completes the shard."""

    def __init__(
        self, folder: Path, number: int, shards: int, address: columns.Address
    ) -> None:
        self.folder = folder
        self.name = f"{number:05}"
        self.shards = shards
        self.digests: list[str] = []
        self.bytes = 0
        self.faulty: dict[Fault, list[str]] = {"missing": [], "misfit": []}
        self.misfits = 0
        self._address = address
        self._stack = contextlib.ExitStack()

    def add(self, samples: Sequence[Sample]) -> None:
        """Writes samples, in the order of the plan."""
        for sample in samples:
            self.misfits += sample.misfits
            if sample.fault is not None:
                self.faulty[sample.fault].append(sample.record.blob or "")
            elif sample.sha256 is not None:
                self.digests.append(sample.sha256)
                self.bytes += len(sample.data or b"")
        if samples:
            self._write([(sample, sample.row(self._address)) for sample in samples])

    @abc.abstractmethod
    def _write(self, rows: Rows) -> None: ...

    def close(self) -> None:
        self._stack.close()

    @abc.abstractmethod
    def read_digests(self) -> Iterator[str]:
        """The SHA-256 of each image in the files, in their order."""


#: Suffixes in a tar beside that of the image.
_TEXTS = {"txt", "json"}


def arrow() -> Any:
    """The library, with its Parquet module; raises SetupError if it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise errors.SetupError(
            "Parquet needs pyarrow: pip install '.[parquet]'"
        ) from None
    return pa


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row for Parquet, whose columns have one type."""
    return row | {
        "metadata": columns.json_text(row["metadata"]) if row["metadata"] else None
    }


def _of_rows() -> Any:
    """The schema of a shard's Parquet file: img2dataset's columns, and those of results.

    Text and numbers are null where a record lacks them.
    """
    pa = arrow()
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    types = {
        **dict.fromkeys(
            (*columns.INTEGERS, "original_width", "original_height"), whole
        ),
        **dict.fromkeys(columns.REALS, real),
        "loras": pa.list_(pa.struct([("name", text), ("weight", real)])),
        "at": pa.timestamp("us", "UTC"),
    }
    names = (
        *("url", "caption", "key", "status", "error_message", "width", "height"),
        *("original_width", "original_height", "sha256", *FIELDS),
    )
    return pa.schema([(name, types.get(name, text)) for name in names])


class Webdataset(ShardFiles):
    """A tar with KEY.png, KEY.txt and KEY.json for each image, and what is said of them."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        # img2dataset, too, takes a shard for done once its statistics are there.
        ends = (".tar", ".parquet", "_stats.json")
        self.listed = tar, rows, _ = [self.folder / f"{self.name}{end}" for end in ends]
        self._tar = self._stack.enter_context(
            tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - the stack does
        )
        self._rows = self._stack.enter_context(
            arrow().parquet.ParquetWriter(rows, _of_rows(), compression="zstd")
        )
        self._times: list[datetime] = []

    def _write(self, rows: Rows) -> None:
        times = [*self._times, *(sample.record.at for sample, _ in rows)]
        self._times = [min(times), max(times)]
        for sample, row in rows:
            if sample.data is not None:
                text = json.dumps(row, indent=4, default=datetime.isoformat)
                self._add(sample, sample.name.rpartition(".")[2].lower(), sample.data)
                self._add(sample, "txt", row["caption"].encode())
                self._add(sample, "json", text.encode())
        told = [_cells(row) for _, row in rows]
        self._rows.write_table(arrow().Table.from_pylist(told, _of_rows()))

    def _add(self, sample: Sample, suffix: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{sample.key}.{suffix}")
        member.size = len(data)
        member.mtime = max(0, int(sample.record.at.timestamp()))
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))

    def close(self) -> None:
        super().close()
        successes = len(self.digests)
        failures = {
            _FAULTS[fault]: len(names) for fault, names in self.faulty.items() if names
        }
        # img2dataset has the times of its run here. These are of the images, so that the same
        # campaign gives the same shards.
        first, last = [at.timestamp() for at in self._times] or [0.0, 0.0]
        stats = {
            "count": successes + sum(failures.values()),
            "successes": successes,
            "failed_to_download": sum(failures.values()),
            "failed_to_resize": 0,
            "duration": last - first,
            "start_time": first,
            "end_time": last,
            "status_dict": ({SUCCESS: successes} if successes else {}) | failures,
        }
        self.listed[2].write_text(json.dumps(stats, indent=4), encoding="utf-8")

    def read_digests(self) -> Iterator[str]:
        with tarfile.open(self.listed[0], "r|") as tar:
            for member in tar:
                is_image = member.name.rpartition(".")[2] not in _TEXTS
                if is_image and (file := tar.extractfile(member)):
                    yield hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _of_images() -> Any:
    """The schema, with the feature by which `datasets` decodes the images."""
    pa = arrow()
    image = pa.field(
        "image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    told = [field for field in _of_rows() if field.name not in OF_IMG2DATASET]
    # Those of the others follow from their types.
    features = {"image": {"_type": "Image"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([image, *told], metadata=metadata)


class Parquet(ShardFiles):
    """A file; each call of `add` is a row group, so that readers need not load all images."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        file = self.folder / f"data/train-{self.name}-of-{self.shards:05}.parquet"
        self.listed = [file]
        file.parent.mkdir()
        # The images are compressed already.
        self._file = self._stack.enter_context(
            arrow().parquet.ParquetWriter(file, _of_images(), compression="zstd")
        )

    def _write(self, rows: Rows) -> None:
        images = [
            {**_cells(row), "image": {"bytes": sample.data, "path": sample.name}}
            for sample, row in rows
            if sample.data is not None
        ]
        if images:
            self._file.write_table(arrow().Table.from_pylist(images, self._file.schema))

    def read_digests(self) -> Iterator[str]:
        with arrow().parquet.ParquetFile(self.listed[0]) as file:
            for group in range(file.num_row_groups):
                for image in file.read_row_group(group, ["image"])["image"]:
                    yield hashlib.sha256(image["bytes"].as_buffer()).hexdigest()


METADATA = "metadata.jsonl"

#: Texts: `datasets` takes the types of all columns from the first lines that it reads.
_NEVER_NULL = {"prompt", "negative_prompt", "model", "sampler", "worker", "gpu"}


class Imagefolder(ShardFiles):
    """A folder with images under their own names; the manifest has its metadata alone."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._folder = self.folder / self.name
        self._folder.mkdir()
        self.listed = [self._folder / METADATA]
        self._lines = self._stack.enter_context(
            self.listed[0].open("w", encoding="utf-8")
        )

    def _write(self, rows: Rows) -> None:
        for sample, row in rows:
            if sample.data is not None:
                self._add(sample.name, sample.data)
                line = {"file_name": sample.name, **_as_metadata(row)}
                self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _add(self, name: str, data: bytes) -> None:
        try:
            with (self._folder / name).open("xb") as file:
                file.write(data)
        except FileExistsError:
            raise errors.SetupError(
                f"{name} has the name of another image but for capitals, which {self._folder}"
                " ignores: choose another --format, or another disk"
            ) from None

    def read_digests(self) -> Iterator[str]:
        with self.listed[0].open(encoding="utf-8") as lines:
            for line in lines:
                yield files.sha256(self._folder / json.loads(line)["file_name"])


def _as_metadata(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: value for name, value in row.items() if name not in OF_IMG2DATASET},
        **{name: row[name] or "" for name in _NEVER_NULL},
        "loras": " ".join(
            f"{lora['name']}:{lora['weight']:g}" for lora in row["loras"]
        ),
        "metadata": columns.json_text(row["metadata"]) if row["metadata"] else "",
        # Not ISO 8601, of which Arrow makes one type or another.
        "at": f"{row['at']:%Y-%m-%d %H:%M:%S} UTC",
    }
