"""The three formats of an export by their names."""

from __future__ import annotations

from fleet.export import imagefolder, parquet, webdataset
from fleet.export.formats import ShardFormat
from fleet.export.plan import Format


def of(name: Format, shards: int) -> ShardFormat:
    """The format of that name, for an export of so many shards."""
    if name == "webdataset":
        return webdataset.Webdataset()
    return imagefolder.Imagefolder() if name == "imagefolder" else parquet.Parquet(shards)
