"""What the page gets of rows and records: texts of others, without what controls a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleet import console
from fleet.gallery.index import Row
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.records.record import Record
from imagefleet.redaction import printable

#: The most characters of a prompt or a reason on a tile; the record has the rest.
_TILE_CHARACTERS = 240


def tiles(rows: Iterable[Row]) -> list[list[Any]]:
    """The tile of each row: its number, its job, its prompt and why it failed."""
    return [
        [
            row.seq,
            printable(row.job),
            printable(row.prompt[:_TILE_CHARACTERS]),
            row.reason and printable(row.reason[:_TILE_CHARACTERS]),
        ]
        for row in rows
    ]


def record(found: Record) -> dict[str, Any]:
    """All of a record that its view has."""
    dumped = found.model_dump(mode="json", exclude_none=True)
    shown: dict[str, Any] = _printable(dumped)
    shown["text"] = console.json_text(job(found)).rstrip()
    return shown


def job(found: Record) -> dict[str, Any]:
    """A job that draws the same image again, as `imagefleet load` reads it.

    Without the id: an image of that name is stored already.
    """
    fields = {
        "campaign": None if found.campaign == DEFAULT_CAMPAIGN else found.campaign,
        "prompt": found.prompt,
        "negative_prompt": found.negative_prompt or None,
        "model": found.model,
        "sampler_name": found.sampler,
        "steps": found.steps,
        "cfg_scale": found.cfg_scale,
        "clip_skip": None if found.clip_skip == 1 else found.clip_skip,
        "width": found.width,
        "height": found.height,
        "seed": found.seed,
        "metadata": found.metadata or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return value
