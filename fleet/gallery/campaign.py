"""A campaign as the page shows it: its records, followed while somebody looks, and its filters."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from fleet.gallery.index import Filter, Index
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.records.damaged import Damaged
from imagefleet.storage.protocol import Storage

#: Filters whose rows are kept: each takes 4 bytes a row.
_VIEWS = 8

#: Seconds for which a campaign is followed after the last request of its page.
_WATCHED_SECONDS = 15.0

#: The newest records, which whoever opens a campaign sees before the others are read.
_NEWEST = 300

#: The first answer waits so long for them.
_FIRST_SECONDS = 2.0

#: Rows are put in order anew when older ones came, or a failed job was settled; this share of the
#: time at most.
_REBUILD_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a campaign's new records are read, and its jobs counted."""

    poll_seconds: float
    count_seconds: float
    records_at_once: int = 2_000
    """Records read at once: few, so that a page is answered in between."""
    part_bytes: int = 256 * 2**10
    """Bytes of a shard that are read at once."""


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
        """Whether all records that there were have been read once."""
        self.read_share = 0.0
        """The share read of the bytes that the shards had when the campaign was opened."""
        self.damaged = Damaged()
        """Records and shards that cannot be read."""
        self.version = 0
        self._storage = storage
        self._follower: reader.Follower | None = None
        self._ends: dict[str, int] = {}
        self._has_begun = asyncio.Event()
        self._pace = pace
        self._due_at = float("-inf")
        self._counted_at = float("-inf")
        self._asked_at = float("-inf")
        self._views: OrderedDict[Filter, View] = OrderedDict()

    def ask(self) -> None:
        """Somebody looks."""
        self._asked_at = time.monotonic()

    @property
    def is_behind(self) -> bool:
        """Whether there are older records to read."""
        return self._follower is not None and not (self.is_complete or self.problem)

    @property
    def is_due(self) -> bool:
        """Whether to poll: somebody looks, and it is time."""
        now = time.monotonic()
        return now >= self._due_at and now - self._asked_at < _WATCHED_SECONDS

    async def begun(self) -> None:
        """Waits a while for the first rows, or for what is wrong with them."""
        if self.version or await asyncio.to_thread(self.index.last):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SECONDS):
                await self._has_begun.wait()

    async def poll(self) -> None:
        """Adds new records; notes an error as the `problem`."""
        self._due_at = time.monotonic() + self._pace.poll_seconds
        try:
            is_ahead = False
            if self._follower is None:
                self._follower, is_ahead = await self._started()
            if not is_ahead:
                await self._read(self._follower)
            await self._count()
        except errors.FleetError as error:
            self.problem = error.message
        except sqlite3.Error as error:
            self.problem = f"The index in the cache cannot be written: {error}"
            self._follower = None  # the index knows what it has
        else:
            self.problem = ""
        self._has_begun.set()

    async def _started(self) -> tuple[reader.Follower, bool]:
        """A follower that goes on where the index ends.

        Where that is far behind, the newest records are added first; returns whether they were.
        """
        position = await asyncio.to_thread(self.index.position)
        self._ends = await reader.end(self._storage, self.name)
        if not position.keys() <= self._ends.keys():  # of a storage that was deleted since
            await asyncio.to_thread(self.index.clear)
            position = {}
        is_behind = sum(self._ends.values()) - sum(position.values()) > self._pace.part_bytes
        if is_behind:
            newest = await reader.newest(self._storage, self.name, _NEWEST)
            await asyncio.to_thread(self.index.add, newest, position)
            self.version += 1
            self._due_at = 0.0
        follower = reader.Follower(
            *(self._storage, self.name, position, self.damaged),
            most=self._pace.records_at_once,
            part_bytes=self._pace.part_bytes,
        )
        return follower, is_behind

    async def _read(self, follower: reader.Follower) -> None:
        records = await follower.poll()
        if records:
            await asyncio.to_thread(self.index.add, records, follower.position)
        is_complete = self.is_complete or len(records) < self._pace.records_at_once
        if not is_complete:
            self._due_at = 0.0
            read = sum(min(end, follower.position.get(name, 0)) for name, end in self._ends.items())
            self.read_share = read / (sum(self._ends.values()) or 1)
        if records or is_complete != self.is_complete:
            self.version += 1
        self.is_complete = is_complete

    async def _count(self) -> None:
        if time.monotonic() - self._counted_at >= self._pace.count_seconds:
            self.sent = await reader.sent(self._storage, self.name)
            self._counted_at = time.monotonic()

    async def view(self, chosen: Filter, *, is_new: bool = True) -> View:
        """The rows of a filter: with all that has been read by now, or as a page knows them."""
        view = self._views.setdefault(chosen, View(chosen))
        self._views.move_to_end(chosen)
        if len(self._views) > _VIEWS:
            self._views.popitem(last=False)
        async with view.lock:
            if view.version < 0 or (is_new and view.version != self.version):
                await self._refresh(view)
        return view

    async def _refresh(self, view: View) -> None:
        version, is_complete = self.version, self.is_complete
        birth = await asyncio.to_thread(self.index.birth)
        last = await asyncio.to_thread(self.index.last)
        # A job that has failed may be replayed; and older records come after the newest.
        has_changed = view.filter.tab != "images" or birth != view.birth or not view.is_complete
        is_early = view.version >= 0 and time.monotonic() < view.rebuild_at
        if has_changed and is_early and is_complete == view.is_complete:
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
