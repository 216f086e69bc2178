"""Events: the end of a job or a campaign, each with an id that stays the same."""

import hashlib
import json
import time
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, JsonValue, TypeAdapter

from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.job.message import image_stem
from imagefleet.job.sizes import MAX_METADATA_BYTES, metadata_json
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.counts import Counts
from imagefleet.records.follower import Follower
from imagefleet.records.record import ENDS, Record
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict

#: The most images that an event names: with all of a large job it would be too large.
MAX_IMAGES = 64

#: The specification recommends events of less than 20 KB.
_MAX_REASON_CHARACTERS = 500

#: Records, and bytes of a shard, that are read at once: each record may be an event that waits.
_RECORDS_AT_ONCE = 2_000
_PART_BYTES = 256 * 2**10

#: A filler notes what it has sent a little later, and may be slower than the workers.
SETTLE_SECONDS = 15.0

#: Seconds without news and with an empty queue that end a campaign, where it is not known how many
#: jobs were sent, or not all of them have an end.
QUIET_SECONDS = 300.0

#: The most seconds between two counts of a campaign from which nothing comes.
_LONGEST_PAUSE_SECONDS = 300.0


class Event(BaseModel, extra="forbid"):
    """An event and the state of its delivery; receivers recognise a repetition by its *id*."""

    id: str
    type: str
    #: The time at which it happened, not at which it is sent.
    timestamp: datetime
    data: dict[str, JsonValue]
    #: The time from which it waits, in Unix seconds, as the next one.
    since: float = Field(default_factory=time.time)
    due_at: float = 0.0
    attempts: int = 0

    @property
    def subject(self) -> str:
        parts = map(self.data.get, ("campaign", "id"))
        return "/".join(str(part) for part in parts if part is not None)

    def body(self) -> bytes:
        """The JSON that is sent, the same in each attempt."""
        return self.model_dump_json(include={"type", "timestamp", "data"}).encode()


def job_ended(fleet: str, record: Record) -> Event | None:
    """The event of a record; None if the record ends no job."""
    # A record may be made up, and no job has more.
    is_real = len(metadata_json(record.metadata)) <= MAX_METADATA_BYTES
    data: JSONDict = {
        "campaign": record.campaign,
        "id": record.id,
        "worker": record.worker,
        "metadata": record.metadata if is_real else {},
    }
    source = record.source or ""
    if record.outcome == "completed" and record.completes_job:
        # A job that is drawn again by another message, after a crash say, is complete once.
        source = ""
        blobs = [record.blob or ""]
        if record.images > 1:  # their names differ by their numbers
            stems = (image_stem(record.key, index) for index in range(record.images))
            suffix = blobs[0].rpartition(".")[2]
            blobs = [f"{stem}.{suffix}" for stem in stems]
        data["images"] = [*blobs[:MAX_IMAGES]]
        data["seed"] = record.first_seed
        if record.pack is not None:
            data["pack"] = {
                "blob": record.pack,
                "offset": record.offset,
                "size_bytes": record.size_bytes,
            }
        if len(blobs) > MAX_IMAGES:
            data["image_count"] = len(blobs)
    elif record.is_end:
        data["attempts"] = record.attempts
        if record.outcome != "cancelled":
            data["reason"] = (record.reason or "")[:_MAX_REASON_CHARACTERS]
        if record.outcome == "failed":
            data["error"] = record.error
    else:
        return None
    kind = f"job.{record.outcome}"
    return Event(
        id=_event_id(fleet, kind, record.key, source),
        type=kind,
        timestamp=record.at,
        data=data,
    )


def campaign_completed(
    fleet: str, campaign: str, counts: Counts, now: datetime
) -> Event:
    """The end of a campaign; one that goes on and ends again has another id."""
    kind = "campaign.completed"
    told = TypeAdapter(Counts).dump_python(counts, mode="json", exclude={"unknown"})
    data: JSONDict = {"campaign": campaign, **told, "pending": counts.pending}
    figures = [each for name, each in data.items() if not name.endswith("_at")]
    return Event(
        id=_event_id(fleet, kind, json.dumps(figures)),
        type=kind,
        timestamp=counts.last_at or now,
        data=data,
    )


def _event_id(*parts: str) -> str:
    """Makes an id without a full stop, which separates an id from the rest of what is signed."""
    return (
        f"msg_{hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()}"
    )


class State(BaseModel, extra="forbid"):
    """The position in the records, and the events before it that still wait."""

    address: str
    campaign: str | None = None
    position: dict[str, int] = {}
    #: Events that are not delivered yet, by their ids.
    waiting: dict[str, Event] = {}
    #: Campaigns with records since their last end.
    open_campaigns: set[str] = set()

    @classmethod
    def read(cls, path: Path, address: str, campaign: str | None) -> Self:
        """The state in a file, or a first one; raises SetupError if it is another receiver's."""
        otherwise = (
            "is not a state of `imagefleet webhooks`: give another --state, or delete it to send"
            " everything again"
        )
        found = validation.read_file(cls, path, otherwise) or cls(
            address=address, campaign=campaign
        )
        if (found.address, found.campaign) != (address, campaign):
            of_campaign = (
                f"the campaign {found.campaign}" if found.campaign else "all campaigns"
            )
            raise SetupError(
                f"{path} is the state for {found.address} and {of_campaign}: give another --state"
            )
        return found


@dataclass(eq=False)
class Source:
    """Adds to *state* what the records tell; each event at least once, whatever is killed."""

    _storage: Storage
    state: State
    #: The name of the fleet, which is part of the events' ids.
    _fleet: str
    _: KW_ONLY
    each_job: bool = False
    since: datetime | None = None

    def __post_init__(self) -> None:
        self._damaged = Damaged()
        self._follower = Follower(
            self._storage,
            self.state.campaign,
            self.state.position,
            self._damaged,
            most=_RECORDS_AT_ONCE,
            part_bytes=_PART_BYTES,
            trusts_images=not self.each_job,
        )
        #: The time of each open campaign's next count, and the pause after it.
        self._counts: dict[str, tuple[float, float]] = {}

    async def read(self) -> bool:
        """Adds the events of the next new records; False once there are no more."""
        before = self._damaged.count
        records = await self._follower.poll()
        if self._damaged.count > before:
            log.warning(f"{self._damaged}", action="record_damaged")
        for record in records:
            is_end = record.outcome in ENDS  # or an operator's note
            if not is_end or (self.since and record.at < self.since):
                continue
            self.state.open_campaigns.add(record.campaign)
            self._counts[record.campaign] = (
                time.monotonic() + SETTLE_SECONDS,
                SETTLE_SECONDS,
            )
            if self.each_job and (event := job_ended(self._fleet, record)):
                self.state.waiting.setdefault(event.id, event)
        self.state.position = self._follower.start
        return len(records) >= _RECORDS_AT_ONCE

    async def find_ends(self, *, is_patient: bool) -> None:
        """Adds the ends of campaigns; *is_patient*: one that goes on is counted ever less often."""
        for campaign in sorted(self.state.open_campaigns):
            due_at, pause = self._counts.get(campaign, (0.0, SETTLE_SECONDS))
            if is_patient and time.monotonic() < due_at:
                continue
            counts = await reader.counts(self._storage, campaign)
            now = self._storage.blobs.clock.now()
            if await self._has_ended(counts, now):
                event = campaign_completed(self._fleet, campaign, counts, now)
                self.state.waiting.setdefault(event.id, event)
                self.state.open_campaigns.discard(campaign)
                self._counts.pop(campaign, None)
            else:
                longer = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._counts[campaign] = time.monotonic() + pause, longer

    async def _has_ended(self, counts: Counts, now: datetime) -> bool:
        if counts.last_at is None:
            return False
        quiet_seconds = (now - counts.last_at).total_seconds()
        if counts.pending == 0:
            return quiet_seconds >= SETTLE_SECONDS
        if quiet_seconds < QUIET_SECONDS:
            return False
        return (await self._storage.queue.depth()).messages == 0
