"""The tables of results that people read."""

import textwrap
from collections.abc import Sequence

from rich.table import Table

from cli import console
from imagefleet.job.message import image_stem
from imagefleet.records.counts import Counts
from imagefleet.records.record import Record

#: The most characters of a prompt or a reason: about a line.
_SHOWN_CHARACTERS = 72


def counts_table(counts: Counts) -> Table:
    """The campaign in numbers, without what is zero or not known."""
    rows = {
        "jobs sent": counts.sent,
        "jobs queued or running": counts.pending,
        "jobs completed": counts.completed,
        "images": counts.images,
        "jobs failed": counts.failed,
        "jobs cancelled": counts.cancelled,
        "jobs dropped": counts.dropped,
        "jobs discarded": counts.discarded,
    }
    return console.totals(
        {name: n for name, n in rows.items() if n or name == "images"}
    )


def table(records: Sequence[Record]) -> Table:
    """A row for each image, or for each job that ended without one."""
    rows = map(_cells, records)
    if records[0].outcome == "completed":
        figures = ["seed", "size", "steps", "seconds"]
        texts = ["worker", "prompt"]
        if any(record.scores for record in records):
            texts.append("scores")
        return console.table(["image"], figures, texts, rows=rows)
    return console.table(
        ["job", "outcome", "error"], ["attempts"], ["reason"], rows=rows
    )


def _cells(record: Record) -> list[str]:
    if record.outcome != "completed":
        return [
            record.id,
            record.outcome,
            record.error or "",
            str(record.attempts),
            _short(record.reason),
        ]
    name = image_stem(record.id, record.index, record.stage)
    size = f"{record.width}x{record.height}" if record.width and record.height else ""
    seconds = "" if record.seconds is None else f"{record.seconds:.1f}"
    seed, steps = (
        "" if each is None else str(each) for each in (record.seed, record.steps)
    )
    cells = [name, seed, size, steps, seconds, record.worker, _short(record.prompt)]
    if record.scores:
        scores = (f"{name} {score:g}" for name, score in record.scores.items())
        cells.append(", ".join(scores))
    return cells


def _short(text: str | None) -> str:
    return textwrap.shorten((text or "")[:1000], _SHOWN_CHARACTERS, placeholder=" ...")
