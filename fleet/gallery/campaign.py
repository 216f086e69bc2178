"""A campaign as the page shows it: its records, followed while somebody looks, and its filters."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from fleet.gallery.index import Filter, Index
from imagefleet import errors
from imagefleet.records import reader, shard
from imagefleet.records.record import Record
from imagefleet.storage.protocol import Storage

#: Filters whose rows are kept: each takes 4 bytes a row.
_VIEWS = 8

#: After the last request of a page, its campaign is followed for so long.
_WATCHED_SECONDS = 15.0

#: So many records at once are a backlog: the next are read without a pause.
_BACKLOG = 2_000

#: A filter of failed jobs is evaluated anew when one changes; this share of the time at most.
_REBUILD_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a campaign's new records are read, and its jobs counted."""

    poll_seconds: float
    count_seconds: float


@dataclass(slots=True)
class View:
    """The rows of a filter, oldest first. New ones only come at the end, or *generation* grows."""

    filter: Filter
    seqs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    generation: int = 0
    last: int = 0
    version: int = -1
    birth: str = ""
    is_complete: bool = False
    rebuild_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Campaign:
    """The index of one campaign, kept up to date by `poll`."""

    def __init__(self, storage: Storage, name: str, index: Index, pace: Pace) -> None:
        self.name = name
        self.index = index
        self.sent: int | None = None
        """Jobs, as far as a filler has noted it."""
        self.problem = ""
        """Why its records cannot be read at the moment."""
        self.is_complete = False
        """All records that there were have been read once."""
        self.damaged = 0
        """Records and shards that cannot be read."""
        self.version = 0
        self._storage = storage
        self._follower: reader.Follower | None = None
        self._pace = pace
        self._due_at = float("-inf")
        self._counted_at = float("-inf")
        self._asked_at = float("-inf")
        self._views: OrderedDict[Filter, View] = OrderedDict()

    def ask(self) -> None:
        """Somebody looks."""
        self._asked_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether to poll: somebody looks, and it is time."""
        now = time.monotonic()
        return now >= self._due_at and now - self._asked_at < _WATCHED_SECONDS

    async def poll(self) -> None:
        """Adds new records; notes an error as the `problem`."""
        self._due_at = time.monotonic() + self._pace.poll_seconds
        try:
            records = await self._new_records()
            await self._count()
        except errors.FleetError as error:
            self.problem = error.message
            return
        self.problem = ""
        if len(records) >= _BACKLOG:
            self._due_at = 0.0
        is_complete = self.is_complete or len(records) < _BACKLOG
        if records or is_complete != self.is_complete:
            self.version += 1
        self.is_complete = is_complete

    async def _new_records(self) -> list[Record]:
        if self._follower is None:
            self._follower = await self._started()
        records = await self._follower.poll()
        if records:
            await asyncio.to_thread(self.index.add, records, self._follower.position)
        return records

    async def _started(self) -> reader.Follower:
        position = await asyncio.to_thread(self.index.position)
        if position:
            folder = shard.folder(self.name)
            stored = {name async for name in self._storage.blobs.names(folder)}
            if not position.keys() <= stored:  # of a storage that was deleted since
                await asyncio.to_thread(self.index.clear)
                position = {}
        return reader.Follower(self._storage, self.name, position, self._note_damaged)

    def _note_damaged(self, _shard: str, _reason: str) -> None:
        self.damaged += 1

    async def _count(self) -> None:
        if time.monotonic() - self._counted_at >= self._pace.count_seconds:
            self.sent = (await reader.counts(self._storage, self.name)).sent
            self._counted_at = time.monotonic()

    async def view(self, chosen: Filter) -> View:
        """The rows of a filter, with all that has been read by now."""
        view = self._views.setdefault(chosen, View(chosen))
        self._views.move_to_end(chosen)
        if len(self._views) > _VIEWS:
            self._views.popitem(last=False)
        async with view.lock:
            if view.version != self.version:
                await self._refresh(view)
        return view

    async def _refresh(self, view: View) -> None:
        version, is_complete = self.version, self.is_complete
        birth = await asyncio.to_thread(self.index.birth)
        last = await asyncio.to_thread(self.index.last)
        # A job that has failed may be replayed; and what came in parts is put in order once.
        has_changed = (
            view.filter.tab != "images" or birth != view.birth or is_complete != view.is_complete
        )
        if has_changed and view.version >= 0 and time.monotonic() < view.rebuild_at:
            return
        began_at = time.monotonic()
        after = 0 if has_changed else view.last
        new = await asyncio.to_thread(self.index.select, view.filter, after, last)
        if has_changed:
            is_longer = birth == view.birth and np.array_equal(new[: len(view.seqs)], view.seqs)
            view.generation += not is_longer
            view.seqs = new
            ended_at = time.monotonic()
            view.rebuild_at = ended_at + (ended_at - began_at) / _REBUILD_SHARE
        elif len(new):
            view.seqs = np.concatenate([view.seqs, new])
        view.last, view.version = last, version
        view.birth, view.is_complete = birth, is_complete
