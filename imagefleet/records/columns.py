"""The columns of results, the same in data frames of pandas, JSON, CSV, Parquet and exports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from imagefleet.errors import SetupError
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict

if TYPE_CHECKING:
    import pandas as pd

#: In their order; but for the address, each is a field of the record under the same name.
COLUMNS = (
    "outcome",
    "campaign",
    "id",
    "index",
    "stage",
    "prompt",
    "negative_prompt",
    "seed",
    "model",
    "loras",
    "embeddings",
    "sampler",
    "steps",
    "cfg_scale",
    "clip_skip",
    "width",
    "height",
    "mark",
    "scores",
    "dropped",
    "worker",
    "gpu",
    "seconds",
    "attempts",
    "at",
    "size_bytes",
    "blob",
    "pack",
    "offset",
    "address",
    "error",
    "reason",
    "metadata",
)

#: Columns of numbers; those of text and of nested values are the others, but for the time.
INTEGERS = (
    "index",
    "stage",
    "seed",
    "steps",
    "clip_skip",
    "width",
    "height",
    "attempts",
    "size_bytes",
    "offset",
)
REALS = ("cfg_scale", "seconds")

#: The address of an image's blob, or of its pack.
Address = Callable[[Record], str]


def addresses(storage: Storage) -> Address:
    def address(record: Record) -> str:
        if record.pack is not None:
            return storage.packs.address(record.pack)
        return storage.blobs.address(record.blob or "")

    return address


def row(record: Record, address: Address) -> JSONDict:
    result: JSONDict = {name: getattr(record, name, None) for name in COLUMNS}
    for name in ("loras", "embeddings", "dropped"):
        result[name] = [each._asdict() for each in result[name]]
    result["address"] = address(record) if record.blob is not None else None
    return result


#: What a picture's file tells beside it: the place of a picture changes, and it has no reason.
_OF_SAMPLE = {*COLUMNS} - {
    "dropped",
    "pack",
    "offset",
    "address",
    "error",
    "reason",
}


#: A value that readers of data sets take.
Cell = str | int | float


def sample(record: Record) -> dict[str, Cell]:
    """The columns of one image as texts and numbers, of the same types whatever its record lacks.

    Readers of data sets take the types of a column from its first values.
    """
    known = record.model_dump(mode="json", include=_OF_SAMPLE)
    result: dict[str, Cell] = {}
    for name, value in known.items():
        if value is None:
            result[name] = 0 if name in (*INTEGERS, *REALS) else ""
        elif isinstance(value, Cell):
            result[name] = value
        else:
            result[name] = json_text(value)
        if name in REALS:
            result[name] = float(result[name])
    return result


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


#: The types of a data frame's columns.
_TYPES = {
    **dict.fromkeys(COLUMNS, "string"),
    **dict.fromkeys(INTEGERS, "Int64"),
    **dict.fromkeys(REALS, "float64"),
    **dict.fromkeys(("loras", "embeddings", "scores", "dropped", "metadata"), "object"),
    "at": "datetime64[us, UTC]",
}


async def frame(records: AsyncIterator[Record], address: Address) -> pd.DataFrame:
    """The results of records; raises SetupError if pandas is not installed."""
    try:
        import pandas as pd
    except ImportError:
        raise SetupError("a data frame needs pandas: pip install '.[pandas]'") from None
    rows = [tuple(row(record, address).values()) async for record in records]
    return pd.DataFrame(rows, columns=[*COLUMNS], dtype="object").astype(_TYPES)
