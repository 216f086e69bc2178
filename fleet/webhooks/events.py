"""Events: the end of a job or a campaign, each with an id that stays the same."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, JsonValue

from imagefleet.job.metadata import MAX_METADATA_BYTES
from imagefleet.records.reader import Counts
from imagefleet.records.record import Record

#: Jobs of several images of which some are stored: a job is drawn within minutes, and a fleet
#: draws thousands at once.
MAX_BEGUN = 5_000

#: The most images that an event names: with all of a large job it would be too large.
MAX_IMAGES = 64

#: The specification recommends events of less than 20 KB.
_MAX_REASON_CHARACTERS = 500


class Event(BaseModel):
    """What is sent. The receiver tells a repetition by *id*."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    type: str
    timestamp: datetime
    """The time at which it happened, not at which it is sent."""
    data: dict[str, JsonValue]

    def body(self) -> bytes:
        """The JSON that is sent, the same in each attempt."""
        fields = {"type": self.type, "timestamp": _text(self.timestamp), "data": self.data}
        return json.dumps(fields, separators=(",", ":")).encode()


class JobEvents:
    """Turns records into events of jobs.

    A job of several images is complete with the last of them, in whatever order they come; *begun*
    has the images so far, by the job's key.
    """

    def __init__(self, fleet: str, begun: dict[str, dict[int, str]]) -> None:
        self.begun = OrderedDict(begun)
        self._fleet = fleet

    def of(self, record: Record) -> Event | None:
        """The event of a record; None if the record ends no job."""
        if record.outcome == "completed":
            return self._completed(record)
        if record.outcome in {"failed", "cancelled"}:
            self.begun.pop(record.key, None)
            data = _of_job(record) | {"attempts": record.attempts}
            if record.outcome == "failed":
                reason = (record.reason or "")[:_MAX_REASON_CHARACTERS]
                data |= {"error": record.error, "reason": reason}
            return self._event(f"job.{record.outcome}", record, record.source or "", data)
        return None

    def _completed(self, record: Record) -> Event | None:
        if record.stage < record.stages:
            return None  # the job goes on
        blobs = {record.index: record.blob or ""}
        if record.completes:
            self.begun.pop(record.key, None)
            blobs = _all_images(record)
        elif record.completes is False:
            return None  # another record says when they are all stored
        elif record.images > 1:  # of an older worker
            blobs = self.begun.setdefault(record.key, {}) | blobs
            self.begun[record.key] = blobs
            if len(blobs) < record.images:
                if len(self.begun) > MAX_BEGUN:
                    self.begun.popitem(last=False)
                return None
            del self.begun[record.key]
        images: list[JsonValue] = [blobs[index] for index in sorted(blobs)[:MAX_IMAGES]]
        seed = None if record.seed is None else (record.seed - record.index) % 2**32
        data = _of_job(record) | {"images": images, "seed": seed}
        if len(images) < len(blobs):
            data["image_count"] = len(blobs)
        # Without the message: a job that is drawn again, after a crash say, is complete once.
        return self._event("job.completed", record, "", data)

    def _event(self, kind: str, record: Record, source: str, data: dict[str, JsonValue]) -> Event:
        event_id = _event_id(self._fleet, kind, record.key, source)
        return Event(id=event_id, type=kind, timestamp=record.at, data=data)


def campaign_completed(fleet: str, campaign: str, counts: Counts) -> Event:
    """The end of a campaign; one that goes on and ends again has another id."""
    figures: dict[str, JsonValue] = {
        "sent": counts.sent,
        "images": counts.images,
        "completed": counts.completed,
        "failed": counts.failed,
        "cancelled": counts.cancelled,
        "pending": counts.pending,
    }
    kind = "campaign.completed"
    data: dict[str, JsonValue] = {
        "campaign": campaign,
        **figures,
        "first_at": _text(counts.first_at) if counts.first_at else None,
        "last_at": _text(counts.last_at) if counts.last_at else None,
    }
    return Event(
        id=_event_id(fleet, kind, campaign, json.dumps(figures)),
        type=kind,
        timestamp=counts.last_at or datetime.now(UTC),
        data=data,
    )


def _all_images(last: Record) -> dict[int, str]:
    """The names of a job's images, by that of one: they differ by their numbers."""
    stem, _, suffix = (last.blob or "").rpartition(".")
    start = stem.removesuffix(f"-{last.index}")
    return {index: f"{start}-{index}.{suffix}" for index in range(last.images)}


def _of_job(record: Record) -> dict[str, JsonValue]:
    # A record may be made up, and no job has more.
    is_real = len(json.dumps(record.metadata)) <= MAX_METADATA_BYTES
    return {
        "campaign": record.campaign,
        "id": record.id,
        "worker": record.worker,
        "metadata": record.metadata if is_real else {},
    }


def _event_id(*parts: str) -> str:
    """Makes an id without a full stop, which separates an id from the rest of what is signed."""
    return f"msg_{hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()}"


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
