"""Events: the end of a job or a campaign, each with an id that stays the same."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from imagefleet import errors
from imagefleet.job.sizes import MAX_METADATA_BYTES
from imagefleet.records.reader import Counts
from imagefleet.records.record import Record

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


def job_ended(fleet: str, record: Record) -> Event | None:
    """The event of a record; None if the record ends no job."""
    if record.outcome == "completed" and record.completes_job:
        blobs = _all_images(record) if record.images > 1 else [record.blob or ""]
        images: list[JsonValue] = [*blobs[:MAX_IMAGES]]
        seed = None if record.seed is None else (record.seed - record.index) % 2**32
        data = _of_job(record) | {"images": images, "seed": seed}
        if len(images) < len(blobs):
            data["image_count"] = len(blobs)
        # Without the message: a job that is drawn again, after a crash say, is complete once.
        return _job_event(fleet, record, "", data)
    if record.outcome in {"failed", "cancelled"}:
        data = _of_job(record) | {"attempts": record.attempts}
        if record.outcome == "failed":
            reason = (record.reason or "")[:_MAX_REASON_CHARACTERS]
            data |= {"error": record.error, "reason": reason}
        return _job_event(fleet, record, record.source or "", data)
    return None


def _job_event(fleet: str, record: Record, source: str, data: dict[str, JsonValue]) -> Event:
    kind = f"job.{record.outcome}"
    event_id = _event_id(fleet, kind, record.key, source)
    return Event(id=event_id, type=kind, timestamp=record.at, data=data)


def campaign_completed(fleet: str, campaign: str, counts: Counts) -> Event:
    """The end of a campaign; one that goes on and ends again has another id."""
    names = ("sent", "images", "completed", "failed", "cancelled", "pending")
    figures: dict[str, JsonValue] = {name: getattr(counts, name) for name in names}
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


def _all_images(last: Record) -> list[str]:
    """The names of a job's images, by that of one: they differ by their numbers."""
    stem, _, suffix = (last.blob or "").rpartition(".")
    start = stem.removesuffix(f"-{last.index}")
    return [f"{start}-{index}.{suffix}" for index in range(last.images)]


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


class Waiting(BaseModel):
    """An event that is not delivered yet; times in Unix seconds."""

    model_config = ConfigDict(extra="forbid")

    event: Event
    since: float
    attempts: int = 0
    due_at: float


class State(BaseModel):
    """The position in the records, and the events before it that still wait.

    *delivered* are events behind the position: those of the records that are being worked on.
    """

    model_config = ConfigDict(extra="forbid")

    address: str
    campaign: str | None = None
    position: dict[str, int] = Field(default_factory=dict)
    delivered: set[str] = Field(default_factory=set)
    waiting: dict[str, Waiting] = Field(default_factory=dict)
    """By the id of the event."""
    open_campaigns: set[str] = Field(default_factory=set)
    """Campaigns with records since their last end."""
    ended: dict[str, str] = Field(default_factory=dict)
    """The id of each campaign's last end."""
    gone_at: datetime | None = None
    """The time at which the receiver answered that it wants no more webhooks."""

    @classmethod
    def read(cls, path: Path, address: str, campaign: str | None) -> Self:
        """The state in a file, or a first one; raises SetupError if it is another receiver's."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls(address=address, campaign=campaign)
        except OSError as error:
            raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None
        try:
            found = cls.model_validate_json(text)
        except ValidationError:
            raise errors.SetupError(
                f"{path} is not a state of `imagefleet webhooks`: give another --state, or delete"
                " it to send everything again"
            ) from None
        if (found.address, found.campaign) != (address, campaign):
            of_campaign = f"the campaign {found.campaign}" if found.campaign else "all campaigns"
            raise errors.SetupError(
                f"{path} is the state for {found.address} and {of_campaign}: give another --state"
            )
        return found
