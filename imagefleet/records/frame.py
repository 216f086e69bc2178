"""Results as a data frame of pandas, a row for each image and for each job without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from imagefleet import errors
from imagefleet.records import columns
from imagefleet.records.record import Record

if TYPE_CHECKING:
    import pandas as pd

_TYPES = {
    **dict.fromkeys(columns.COLUMNS, "string"),
    **dict.fromkeys(("index", "stage", "seed", "steps", "clip_skip", "width", "height"), "Int64"),
    **dict.fromkeys(("attempts", "size_bytes"), "Int64"),
    **dict.fromkeys(("cfg_scale", "seconds"), "float64"),
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

    def __init__(self, address: columns.Address) -> None:
        """Raises SetupError if pandas is not installed."""
        self._pandas = library()
        self._address = address
        self._columns: dict[str, list[Any]] = {name: [] for name in columns.COLUMNS}

    def add(self, record: Record) -> None:
        row = columns.row(record, self._address)
        for name, column in self._columns.items():
            column.append(row[name])

    def frame(self) -> pd.DataFrame:
        series = {
            name: self._pandas.Series(column, dtype=_TYPES[name])
            for name, column in self._columns.items()
        }
        return self._pandas.DataFrame(series)
