"""Parquet as Hugging Face's `datasets` reads images: a column `image` of bytes and path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.export import webdataset
from fleet.export.formats import OF_IMG2DATASET, Sample, ShardFiles
from fleet.results.parquet import arrow, cells
from imagefleet.records import columns

if TYPE_CHECKING:
    import pyarrow as pa


def schema() -> pa.Schema:
    """The columns, with the features by which `datasets` decodes the images."""
    pa = arrow()
    image = pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    told = [field for field in webdataset.schema() if field.name not in OF_IMG2DATASET]
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
        self._file = arrow().parquet.ParquetWriter(self._path, schema(), compression="zstd")

    def add(self, samples: Sequence[Sample]) -> None:
        rows = [
            {
                **cells(sample.row(self._address)),
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
