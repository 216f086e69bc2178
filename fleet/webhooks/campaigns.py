"""Finds out which campaigns have ended."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime

from fleet.webhooks import events
from fleet.webhooks.events import Event
from fleet.webhooks.state import State
from imagefleet.records import reader
from imagefleet.records.reader import Counts
from imagefleet.storage.open import Storage

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

    async def found(self, *, is_patient: bool) -> AsyncIterator[tuple[str, Event]]:
        """The campaigns that have ended since; *is_patient*: others are not counted each time."""
        for campaign in sorted(self._state.open_campaigns):
            began_at = time.monotonic()
            if is_patient and began_at < self._due_at.get(campaign, 0.0):
                continue
            counts = await reader.counts(self._storage, campaign)
            if await self._has_ended(counts):
                event = events.campaign_completed(self._fleet, campaign, counts)
                if self._state.ended.get(campaign) == event.id:
                    self.reported(campaign, event)
                else:
                    yield campaign, event
                continue
            now = time.monotonic()
            pause = self._pauses.get(campaign, SETTLE_SECONDS)
            self._due_at[campaign] = now + max(pause, _PAUSE_PER_COUNT * (now - began_at))
            self._pauses[campaign] = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def reported(self, campaign: str, event: Event) -> None:
        """The event is sent, or waits."""
        self._state.open_campaigns.discard(campaign)
        self._due_at.pop(campaign, None)
        self._pauses.pop(campaign, None)
        ended = self._state.ended
        ended.pop(campaign, None)
        ended[campaign] = event.id
        while len(ended) > _MAX_ENDED:
            del ended[next(iter(ended))]

    async def _has_ended(self, counts: Counts) -> bool:
        if counts.last_at is None:
            return False
        quiet_seconds = (datetime.now(UTC) - counts.last_at).total_seconds()
        if counts.pending == 0:
            return quiet_seconds >= SETTLE_SECONDS
        if quiet_seconds < QUIET_SECONDS:
            return False
        return (await self._storage.queue.depth()).messages == 0
