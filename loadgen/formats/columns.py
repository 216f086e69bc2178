"""The columns of a table as fields of jobs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from imagefleet import validation
from imagefleet.job.chain import THEN_FIELD
from imagefleet.job.message import FAILURE_FIELD, Job
from imagefleet.job.passes import fields as passes
from loadgen.formats.entry import FormatError

#: Fields whose cells are text as it stands: the prompts with their white space.
_PROMPTS = frozenset({"prompt", "negative_prompt", "hr_prompt", "hr_negative_prompt"})
_TEXTS = _PROMPTS | {
    *("campaign", "id", "model", "randn_source", "sampler_index", "sampler_name", "scheduler"),
    *("init_images", "mask", "hr_upscaler", "hr_sampler_name", "hr_scheduler"),
    *("upscaler_1", "upscaler_2"),
}

#: Fields whose cells are JSON objects; `metadata.NAME` is a column for one key of an object.
_OBJECTS = frozenset({"alwayson_scripts", "metadata", "output", "override_settings"})

_FOREIGN = {*passes.WITHOUT_EFFECT, *passes.NEUTRAL_VALUES}

_KNOWN = {*Job.model_fields, *_TEXTS, *_OBJECTS, *_FOREIGN}

#: Columns that are left out: why a job failed, and the index of a pandas frame.
_LEFT_OUT = re.compile(rf"{FAILURE_FIELD}(\..*)?|__index_level_\d+__")

_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")

Read = Callable[[Any], Any]


class Columns:
    """Makes jobs of rows.

    Raises:
        FormatError: a column is no field of a job, is there twice, or `prompt` is missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        keys = [_key(name) for name in names]
        if "prompt" not in keys and "upscaler_1" not in keys:
            shown = ", ".join(repr(key[:40]) for key in keys[:10])
            raise FormatError(
                f"there is no column 'prompt' among {shown}: the first row should have the names"
                " of the columns (if it has one prompt per line: --format txt)"
            )
        for key in keys:
            if keys.count(key) > 1 and key:
                raise FormatError(f"the column {key[:80]!r} is there twice")
            if key and not _LEFT_OUT.fullmatch(key) and not is_known(key):
                raise FormatError(
                    f"the column {key[:80]!r} is no field of a job"
                    f"{validation.suggestion(key, _KNOWN)}; remove it, or name it"
                    f" {'metadata.' + key[:80]!r} to have it stored with the image"
                )
        self._columns = [(key, *key.split(".", 1)) for key in keys]

    def job(self, cells: Iterable[Any]) -> str:
        """A row's job as JSON; empty for a row without values.

        Raises:
            ValueError: a cell is not of its field's type, or beyond the last column.
        """
        fields: dict[str, Any] = {}
        for number, cell in enumerate(cells):
            if cell is None or cell == "" or _is_nan(cell):
                continue
            key, *path = self._columns[number] if number < len(self._columns) else ("",)
            if isinstance(cell, str) and not cell.strip() and key != "prompt":
                continue
            if not key:
                raise ValueError(
                    f"cell {number + 1} has no column: a cell with a comma or a line break needs"
                    " quotes"
                )
            if _LEFT_OUT.fullmatch(key):
                continue
            if len(path) == 1:
                fields[key] = _value(key, cell)
            else:
                fields.setdefault(path[0], {})[path[1]] = cell
        return json.dumps(fields, ensure_ascii=False) if fields else ""


def is_known(key: str) -> bool:
    """Whether a column of this name is a field of a job, or a key of one."""
    field, dot, rest = key.partition(".")
    if dot:
        return field in _OBJECTS and bool(rest)
    return field in _KNOWN or passes.is_foreign(field)


def _key(name: str) -> str:
    name = name.strip()
    field, dot, rest = name.partition(".")
    return f"{field.lower()}{dot}{rest}"


def _is_nan(cell: object) -> bool:
    """A missing number of pandas is one."""
    return isinstance(cell, float) and math.isnan(cell)


def _value(field: str, cell: Any) -> Any:
    if field in _TEXTS:
        # Ids that are numbers, in Parquet.
        text = str(cell) if type(cell) is int else cell
        return text.strip() if isinstance(text, str) and field not in _PROMPTS else text
    if isinstance(cell, list) and field in _OBJECTS:
        return dict(cell)  # a map of Parquet is a list of pairs
    if not isinstance(cell, str):
        return cell
    text = cell.strip()
    if field in Job.model_fields and field not in _OBJECTS and field != THEN_FIELD:
        # The job reads numbers and booleans from text; some spreadsheets write 7,5.
        return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text
    try:
        return json.loads(text.lower() if text.lower() in {"true", "false"} else text)
    except (ValueError, RecursionError):
        if field in _OBJECTS or field == THEN_FIELD:
            raise ValueError(f"{field}: is not JSON") from None
        return text
