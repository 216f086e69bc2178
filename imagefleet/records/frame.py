"""Results as a data frame of pandas, a row for each image and for each job without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from imagefleet import errors
from imagefleet.records.record import Record

if TYPE_CHECKING:
    import pandas as pd

#: In the order of their columns; each is a field of the record under the same name.
FIELDS = (
    *("outcome", "campaign", "id", "index", "prompt", "negative_prompt", "seed", "model", "loras"),
    *("sampler", "steps", "cfg_scale", "clip_skip", "width", "height"),
    *("worker", "gpu", "seconds", "attempts", "at", "size_bytes", "blob"),
)

#: Of data frames, and of `imagefleet results` in every form.
COLUMNS = (*FIELDS, "address", "error", "reason", "metadata")

_TYPES = {
    **dict.fromkeys(COLUMNS, "string"),
    **dict.fromkeys(("index", "seed", "steps", "clip_skip", "width", "height"), "Int64"),
    **dict.fromkeys(("attempts", "size_bytes"), "Int64"),
    **dict.fromkeys(("cfg_scale", "seconds"), "float64"),
    **dict.fromkeys(("loras", "metadata"), "object"),
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
        raise errors.SetupError(
            "a data frame needs pandas: pip install 'imagefleet[pandas]'"
        ) from None
    return pd


class FrameBuilder:
    """Collects records by column."""

    def __init__(self, address: Callable[[str], str]) -> None:
        """*address* is a blob's URL, by its name.

        Raises:
            SetupError: pandas is not installed.
        """
        self._pandas = library()
        self._address = address
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, record: Record) -> None:
        row = {name: getattr(record, name) for name in COLUMNS if name != "address"}
        row["address"] = None if record.blob is None else self._address(record.blob)
        row["loras"] = [each._asdict() for each in record.loras]
        for name, column in self._columns.items():
            column.append(row[name])

    def frame(self) -> pd.DataFrame:
        series = {
            name: self._pandas.Series(column, dtype=_TYPES[name])
            for name, column in self._columns.items()
        }
        return self._pandas.DataFrame(series)
