"""A sample of an export, and the two formats of shards: webdataset and Parquet."""

import abc
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

from imagefleet import errors, sweep
from imagefleet.records import columns
from imagefleet.records.record import Record

#: Columns of an export that are fields of a result under the same name.
FIELDS = (
    "id",
    "campaign",
    "index",
    "prompt",
    "negative_prompt",
    "seed",
    "model",
    "loras",
    "sampler",
    "steps",
    "cfg_scale",
    "clip_skip",
    "width",
    "height",
    "worker",
    "gpu",
    "seconds",
    "at",
    "metadata",
)

Row = dict[str, Any]


@dataclass
class Sample:
    """A verified image with its record."""

    key: str
    """The key that img2dataset makes: the digits of the shard, then those of the sample."""
    record: Record
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def name(self) -> str:
        return (self.record.blob or "").rpartition("/")[2]

    def row(self, address: columns.Address) -> Row:
        result = columns.row(self.record, address)
        return {
            "url": result["address"],
            "caption": sweep.caption_of(self.record),
            "key": self.key,
            "sha256": self.sha256,
            **{name: result[name] for name in FIELDS},
        }


class ShardFile(abc.ABC):
    """The file of one shard, while it is written and read back."""

    def __init__(self, path: Path, address: columns.Address) -> None:
        self.path = path
        self._address = address

    @abc.abstractmethod
    def write(self, samples: Sequence[Sample]) -> None:
        """Appends samples, in the order of the plan."""

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def read_digests(self) -> Iterator[str]:
        """The SHA-256 of each image in the file, in their order."""


#: Suffixes in a tar beside that of the image.
_TEXTS = {"txt", "json"}


class Webdataset(ShardFile):
    """A tar with KEY.png, KEY.txt and KEY.json for each image."""

    def __init__(self, path: Path, address: columns.Address) -> None:
        super().__init__(path, address)
        self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see close

    def write(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            row = sample.row(self._address)
            text = json.dumps(row, indent=4, default=datetime.isoformat)
            self._add(sample, sample.name.rpartition(".")[2].lower(), sample.data)
            self._add(sample, "txt", row["caption"].encode())
            self._add(sample, "json", text.encode())

    def _add(self, sample: Sample, suffix: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{sample.key}.{suffix}")
        member.size = len(data)
        member.mtime = max(0, int(sample.record.at.timestamp()))
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))

    def close(self) -> None:
        self._tar.close()

    def read_digests(self) -> Iterator[str]:
        with tarfile.open(self.path, "r|") as tar:
            for member in tar:
                is_image = member.name.rpartition(".")[2] not in _TEXTS
                if is_image and (file := tar.extractfile(member)):
                    yield hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


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


def _schema() -> Any:
    """The schema of a shard's Parquet file; text and numbers are null where a record lacks them.

    Its metadata has the feature by which `datasets` decodes the images; those of the other columns
    follow from their types.
    """
    pa = arrow()
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    types = {
        **dict.fromkeys(columns.INTEGERS, whole),
        **dict.fromkeys(columns.REALS, real),
        "image": pa.struct([("bytes", pa.binary()), ("path", text)]),
        "loras": pa.list_(pa.struct([("name", text), ("weight", real)])),
        "at": pa.timestamp("us", "UTC"),
    }
    names = ("image", "url", "caption", "key", "sha256", *FIELDS)
    features = {"info": {"features": {"image": {"_type": "Image"}}}}
    return pa.schema(
        [(name, types.get(name, text)) for name in names],
        metadata={"huggingface": json.dumps(features)},
    )


class Parquet(ShardFile):
    """A Parquet file; each `write` is a row group, so that readers need not load all images."""

    def __init__(self, path: Path, address: columns.Address) -> None:
        super().__init__(path, address)
        # The images are compressed already.
        self._file = arrow().parquet.ParquetWriter(path, _schema(), compression="zstd")

    def write(self, samples: Sequence[Sample]) -> None:
        rows = [self._cells(sample) for sample in samples]
        if rows:
            self._file.write_table(arrow().Table.from_pylist(rows, self._file.schema))

    def _cells(self, sample: Sample) -> Row:
        row = sample.row(self._address)
        metadata = columns.json_text(row["metadata"]) if row["metadata"] else None
        image = {"bytes": sample.data, "path": sample.name}
        return {**row, "metadata": metadata, "image": image}

    def close(self) -> None:
        self._file.close()

    def read_digests(self) -> Iterator[str]:
        with arrow().parquet.ParquetFile(self.path) as file:
            for group in range(file.num_row_groups):
                for image in file.read_row_group(group, ["image"])["image"]:
                    yield hashlib.sha256(image["bytes"].as_buffer()).hexdigest()
