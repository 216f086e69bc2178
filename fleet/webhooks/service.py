"""Follows the records, and sends what they tell: the end of campaigns and, if asked, of jobs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fleet import console
from fleet.webhooks import events
from fleet.webhooks.deliveries import Deliveries
from fleet.webhooks.events import Event, State, job_ended
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.records.stored import Damaged
from imagefleet.storage.open import Storage

log = logging.getLogger(__name__)

#: Seconds between two looks for new records, which cost a listing of the shards each.
POLL_SECONDS = 10.0

#: Seconds between two saves of the state: a service that is killed repeats what it sent since.
SAVE_SECONDS = 5.0

#: Seconds for the requests in flight when the service is stopped.
DRAIN_SECONDS = 10.0

#: The longest pause of the loop.
_STEP_SECONDS = 1.0

#: A filler notes what it has sent a little later, and may be slower than the workers.
SETTLE_SECONDS = 15.0

#: Seconds without news and with an empty queue that end a campaign, where it is not known how many
#: jobs were sent, or not all of them have an end.
QUIET_SECONDS = 300.0

#: The most seconds between two counts of a campaign from which nothing comes.
_LONGEST_PAUSE_SECONDS = 300.0

#: A pause is at least this many times as long as the count before it.
_PAUSE_PER_COUNT = 20

#: Campaigns whose last end is remembered.
_MAX_ENDED = 10_000


class CampaignEnds:
    """Counts the open campaigns of *state* once nothing new comes from them."""

    def __init__(self, storage: Storage, fleet: str, state: State) -> None:
        self._storage = storage
        self._fleet = fleet
        self._state = state
        self._due_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}

    def seen(self, campaigns: Iterable[str]) -> None:
        """New records have come from them."""
        for campaign in campaigns:
            self._state.open_campaigns.add(campaign)
            self._pauses[campaign] = SETTLE_SECONDS
            self._due_at[campaign] = time.monotonic() + SETTLE_SECONDS

    async def found(self, *, is_patient: bool) -> AsyncIterator[Event]:
        """The campaigns that have ended since; *is_patient*: others are not counted each time.

        The end of one is noted when the next is asked for: it is sent then, or waits.
        """
        for campaign in sorted(self._state.open_campaigns):
            began_at = time.monotonic()
            if is_patient and began_at < self._due_at.get(campaign, 0.0):
                continue
            counts = await reader.counts(self._storage, campaign)
            if await self._has_ended(counts):
                event = events.campaign_completed(self._fleet, campaign, counts)
                if self._state.ended.get(campaign) != event.id:
                    yield event
                self._note(campaign, event)
                continue
            now = time.monotonic()
            pause = self._pauses.get(campaign, SETTLE_SECONDS)
            self._due_at[campaign] = now + max(pause, _PAUSE_PER_COUNT * (now - began_at))
            self._pauses[campaign] = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _note(self, campaign: str, event: Event) -> None:
        self._state.open_campaigns.discard(campaign)
        self._due_at.pop(campaign, None)
        self._pauses.pop(campaign, None)
        ended = self._state.ended
        ended.pop(campaign, None)
        ended[campaign] = event.id
        while len(ended) > _MAX_ENDED:
            del ended[next(iter(ended))]

    async def _has_ended(self, counts: reader.Counts) -> bool:
        if counts.last_at is None:
            return False
        quiet_seconds = (datetime.now(UTC) - counts.last_at).total_seconds()
        if counts.pending == 0:
            return quiet_seconds >= SETTLE_SECONDS
        if quiet_seconds < QUIET_SECONDS:
            return False
        return (await self._storage.queue.depth()).messages == 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The events to send, and the name of the fleet, which is part of their ids."""

    fleet: str
    campaign: str | None = None
    each_job: bool = False
    since: datetime | None = None

    def includes(self, moment: datetime) -> bool:
        return self.since is None or moment >= self.since


class Source:
    """The events that records tell; each comes at least once, however often this is restarted."""

    def __init__(self, storage: Storage, wanted: Wanted, state: State) -> None:
        self.ends = CampaignEnds(storage, wanted.fleet, state)
        self._state = state
        self._wanted = wanted
        self._damaged = Damaged()
        self._follower = reader.Follower(storage, wanted.campaign, state.position, self._damaged)
        self._records = deque[Record]()
        self._has_read = False

    async def read(self) -> bool:
        """Reads the next new records; False if there are none."""
        before = self._damaged.count
        records = await self._follower.poll()
        if self._damaged.count > before:
            log.warning("%s", self._damaged, extra={"action": "record_damaged"})
        ends = {"completed", "failed", "cancelled"}  # the rest are an operator's notes
        included = (each for each in records if self._wanted.includes(each.at))
        self.ends.seen({each.campaign for each in included if each.outcome in ends})
        if self._wanted.each_job:
            self._records.extend(records)
        self._has_read = True
        return bool(records)

    def next_event(self) -> Event | None:
        """The next event of the records that were read."""
        while self._records:
            record = self._records.popleft()
            event = job_ended(self._wanted.fleet, record)
            if event is not None and self._wanted.includes(record.at):
                return event
        return None

    def note_position(self) -> None:
        """Notes in the state how far records are read, if all of them are turned into events.

        Each of these events is delivered, or waits in the state.
        """
        if self._has_read and not self._records:
            self._state.position = dict(self._follower.position)
            self._state.delivered.clear()


class Service:
    """Delivers what *source* tells, until it is cancelled or all that is new is sent."""

    def __init__(
        self, source: Source, deliveries: Deliveries, state: State, state_file: Path
    ) -> None:
        self._source = source
        self._deliveries = deliveries
        self._state = state
        self._state_file = state_file
        self._saved = ""
        self._poll_at = 0.0
        self._save_at = time.monotonic() + SAVE_SECONDS

    async def run(self, *, once: bool = False) -> None:
        """Runs; the state is saved at the end, however that comes.

        Raises:
            SetupError: the receiver wants no more webhooks, or the state cannot be saved.
            TransientError: *once*, and the storage or the receiver does not answer.
        """
        deliveries = self._deliveries
        deliveries.retry_now()
        try:
            while self._state.gone_at is None:
                await self._fill(once=once)
                deliveries.start_due()
                if once and deliveries.is_idle:
                    break
                await deliveries.wait(_STEP_SECONDS)
                if time.monotonic() >= self._save_at:
                    self._save()
        finally:
            await deliveries.finish(DRAIN_SECONDS)
            self._save()
        if self._state.gone_at is not None:
            raise errors.SetupError(gone(self._state))
        if once and self._state.waiting:
            raise errors.TransientError(
                f"{console.counted(len(self._state.waiting), 'webhook')} could not be delivered to"
                f" {self._state.address}: run it again"
            )

    async def _fill(self, *, once: bool) -> None:
        """Takes new events while there are some, and room for them."""
        while self._deliveries.has_room:
            if (event := self._source.next_event()) is not None:
                self._deliveries.add(event)
            elif time.monotonic() < self._poll_at:
                return
            elif not await self._read(once=once):
                self._poll_at = time.monotonic() + POLL_SECONDS

    async def _read(self, *, once: bool) -> bool:
        """Reads new records; where there are none, asks which campaigns have ended."""
        try:
            self._source.note_position()
            if await self._source.read():
                return True
            async for event in self._source.ends.found(is_patient=not once):
                self._deliveries.add(event)
        except errors.TransientError as error:
            if once:
                raise
            log.warning("trying again: %s", error, extra={"action": "storage_unavailable"})
        return False

    def _save(self) -> None:
        self._save_at = time.monotonic() + SAVE_SECONDS
        self._source.note_position()
        if (text := self._state.model_dump_json(exclude_defaults=True)) != self._saved:
            console.write_file(self._state_file, text)
            self._saved = text


def gone(state: State) -> str:
    """Why nothing is sent any more."""
    when = f" on {state.gone_at:%Y-%m-%d %H:%M} UTC" if state.gone_at else ""
    return (
        f"{state.address} answered 410 Gone{when}: it wants no more webhooks. Give another --url,"
        " or --resume to send to it again"
    )
