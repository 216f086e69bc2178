"""Which models have a worker: each notes those that it serves, in spans of ten minutes.

An empty blob `-serving/MODEL/SPAN` is the note of any number of workers.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from imagefleet.storage import protocol

FOLDER = "-serving/"

SPAN = timedelta(minutes=10)

#: Older notes are deleted by workers whose credentials allow it.
_KEPT = timedelta(hours=1)


async def note(blobs: protocol.BlobStore, model: str, now: datetime | None = None) -> None:
    """A worker serves the model, from now on for up to ten minutes."""
    now = now or datetime.now(UTC)
    await blobs.create(_name(model, now), b"", "text/plain", {})
    await blobs.delete(_name(model, now - _KEPT))


async def is_served(blobs: protocol.BlobStore, model: str, now: datetime | None = None) -> bool:
    """Whether a worker has noted it in this span, or in the one before."""
    now = now or datetime.now(UTC)
    return await blobs.exists(_name(model, now)) or await blobs.exists(_name(model, now - SPAN))


def _name(model: str, moment: datetime) -> str:
    span = int(moment.timestamp() // SPAN.total_seconds())
    start = datetime.fromtimestamp(span * SPAN.total_seconds(), UTC)
    return f"{FOLDER}{model}/{start:%Y%m%dT%H%M}"
