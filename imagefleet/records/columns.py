"""The columns of results, the same in data frames of pandas, JSON, CSV, Parquet and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from imagefleet import errors
from imagefleet.records.record import Record

if TYPE_CHECKING:
    import pandas as pd

#: Fields in the order of their columns; each is a field of the record under the same name.
FIELDS = (
    *("outcome", "campaign", "id", "index", "stage", "prompt", "negative_prompt", "seed"),
    *("model", "loras", "embeddings", "sampler", "steps", "cfg_scale", "clip_skip"),
    *("width", "height", "worker", "gpu", "seconds", "attempts", "at", "size_bytes", "blob"),
)

COLUMNS = (*FIELDS, "address", "error", "reason", "metadata")

#: Columns of numbers; those of text and of nested values are the others, but for the time.
INTEGERS = (
    *("index", "stage", "seed", "steps", "clip_skip", "width", "height", "attempts", "size_bytes"),
)
REALS = ("cfg_scale", "seconds")

Address = Callable[[str], str]
"""The address of a blob, by its name."""


def row(record: Record, address: Address) -> dict[str, Any]:
    """The result of a record, by column."""
    result: dict[str, Any] = {name: getattr(record, name) for name in FIELDS}
    result["loras"] = loras(record)
    result["embeddings"] = embeddings(record)
    result["address"] = address(record.blob) if record.blob is not None else None
    result["error"] = record.error
    result["reason"] = record.reason
    result["metadata"] = record.metadata
    return result


def loras(record: Record) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight} for name, weight in record.loras]


def embeddings(record: Record) -> list[dict[str, Any]]:
    return [{"name": name, "sha256": sha256} for name, sha256 in record.embeddings]


def json_text(value: object) -> str:
    """A value as JSON within a cell."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


#: The types of a data frame's columns.
_TYPES = {
    **dict.fromkeys(COLUMNS, "string"),
    **dict.fromkeys(INTEGERS, "Int64"),
    **dict.fromkeys(REALS, "float64"),
    **dict.fromkeys(("loras", "embeddings", "metadata"), "object"),
    "at": "datetime64[us, UTC]",
}


def library() -> Any:
    """The module pandas.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise errors.SetupError("a data frame needs pandas: pip install '.[pandas]'") from None
    return pd


class FrameBuilder:
    """Collects records by column."""

    def __init__(self, address: Address) -> None:
        """Raises SetupError if pandas is not installed."""
        self._pandas = library()
        self._address = address
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, record: Record) -> None:
        values = row(record, self._address)
        for name, column in self._columns.items():
            column.append(values[name])

    def frame(self) -> pd.DataFrame:
        series = {
            name: self._pandas.Series(column, dtype=_TYPES[name])
            for name, column in self._columns.items()
        }
        return self._pandas.DataFrame(series)
