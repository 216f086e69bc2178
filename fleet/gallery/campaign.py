"""A campaign as the page shows it: its records, read while somebody looks, and its filters."""

import asyncio
import sqlite3
import time
from asyncio import Lock, Task
from dataclasses import dataclass, field

import numpy as np
from cachetools import LRUCache

from fleet.gallery.index import Filter, Index
from imagefleet.errors import FleetError
from imagefleet.records import ledger, reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.follower import Follower
from imagefleet.storage.open import Storage

#: Filters whose rows are kept: each takes 4 bytes a row.
_VIEWS = 8

#: Records, and bytes of a shard, that are read at once: few, so that a page is answered in between.
_RECORDS_AT_ONCE = 2_000
_PART_BYTES = 2**20

#: An answer waits so long for new records.
_ANSWER_SECONDS = 2.0

#: Older records are read so long for each answer.
_READ_SECONDS = 0.5

#: Selecting a filter's rows anew takes this share of the time at most.
_SELECT_SHARE = 0.2


#: Seconds between two polls: each is billed on Azure, a listing and a read for each part of a shard
#: that is new.
LOCAL_POLL_SECONDS = 0.9
REMOTE_POLL_SECONDS = 5.0

#: The sent jobs are counted once in so many polls.
_POLLS_PER_COUNT = 12


@dataclass
class View:
    """The rows of a filter, oldest first. New ones only come at the end, or *generation* grows."""

    seqs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    generation: int = 0
    version: int = -1
    is_complete: bool = False
    select_at: float = 0.0
    lock: Lock = field(default_factory=Lock)


class Campaign:
    """The index of one campaign, kept up to date by `refresh`."""

    def __init__(self, storage: Storage, name: str, poll_seconds: float) -> None:
        self.index = Index()
        #: Jobs, as far as a filler has noted it.
        self.sent: int | None = None
        #: The reason its records cannot be read at the moment; empty if they can.
        self.problem = ""
        #: True once all records that existed at the start have been read.
        self.is_complete = False
        self.damaged = Damaged()
        self._storage = storage
        self._name = name
        self._poll_seconds = poll_seconds
        self._follower = Follower(
            storage,
            name,
            None,
            self.damaged,
            most=_RECORDS_AT_ONCE,
            part_bytes=_PART_BYTES,
        )
        self._ends: dict[str, int] | None = None
        self._version = 0
        self._polling: Task[None] | None = None
        self._poll_at = self._count_at = 0.0
        self._views: LRUCache[Filter, View] = LRUCache(_VIEWS)

    @property
    def read_share(self) -> float:
        """The share read of the bytes that the shards had when the campaign was opened."""
        ends = self._ends or {}
        position = self._follower.position
        read = sum(min(end, position.get(name, 0)) for name, end in ends.items())
        return read / (sum(ends.values()) or 1)

    async def refresh(self) -> None:
        """Reads new records if it is time; a page that asks need not wait for all of them."""
        if self._polling is None or self._polling.done():
            if time.monotonic() < self._poll_at:
                return
            self._polling = asyncio.create_task(self._poll())
        await asyncio.wait([self._polling], timeout=_ANSWER_SECONDS)

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        await asyncio.to_thread(self.index.close)

    async def _poll(self) -> None:
        """Adds new records; notes an error as the `problem`."""
        try:
            until = time.monotonic() + _READ_SECONDS
            if self._ends is None:
                ends = self._ends = await reader.end(self._storage, self._name)
                # A look at each image of a million would take an hour.
                self._follower.checks.trusts_images = sum(ends.values()) > _PART_BYTES
            await self._read()
            while not self.is_complete and time.monotonic() < until:
                await self._read()
            if time.monotonic() >= self._count_at:
                self.sent = await ledger.Ledger(self._storage, self._name).count()
                self._count_at = (
                    time.monotonic() + _POLLS_PER_COUNT * self._poll_seconds
                )
            self.problem = ""
        except FleetError as error:
            self.problem = error.message
        except sqlite3.Error as error:
            self.problem = f"The index of the gallery cannot be written: {error}"
        is_behind = not (self.is_complete or self.problem)
        self._poll_at = time.monotonic() + (0.0 if is_behind else self._poll_seconds)

    async def _read(self) -> None:
        before = dict(self._follower.position)
        records = await self._follower.poll()
        try:
            await asyncio.to_thread(self.index.add, records, at_end=self.is_complete)
        except BaseException:
            self._follower.position = before
            raise
        is_complete = self.is_complete or len(records) < _RECORDS_AT_ONCE
        self._follower.checks.trusts_images &= not is_complete
        self._version += bool(records) or is_complete != self.is_complete
        self.is_complete = is_complete

    async def view(self, chosen: Filter, *, is_new: bool = True) -> View:
        """The rows of a filter: with all that has been read by now, or as a page knows them."""
        view = self._views.setdefault(chosen, View())
        async with view.lock:
            if view.version < 0 or (is_new and view.version != self._version):
                await self._select(chosen, view)
        return view

    async def _select(self, chosen: Filter, view: View) -> None:
        began_at = time.monotonic()
        version = self._version
        is_complete = self.is_complete
        if began_at < view.select_at and is_complete == view.is_complete:
            return
        seqs = await asyncio.to_thread(self.index.select, chosen)
        view.generation += not np.array_equal(seqs[: len(view.seqs)], view.seqs)
        view.seqs = seqs
        view.version = version
        view.is_complete = is_complete
        ended_at = time.monotonic()
        view.select_at = ended_at + (ended_at - began_at) / _SELECT_SHARE
