"""Campaigns as the page shows them: their records, read while somebody looks, and their filters."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web

from fleet.gallery.index import Filter, Index
from imagefleet import errors
from imagefleet.job.message import RECORDS
from imagefleet.records import reader
from imagefleet.records.record import ShardName
from imagefleet.records.stored import Damaged
from imagefleet.storage.open import Storage

#: Filters whose rows are kept: each takes 4 bytes a row.
_VIEWS = 8

#: The newest records, which whoever opens a campaign sees before the others are read.
_NEWEST = 300

#: An answer waits so long for new records.
_ANSWER_SECONDS = 2.0

#: Older records are read so long for each answer.
_READ_SECONDS = 0.5

#: Selecting a filter's rows anew takes this share of the time at most.
_SELECT_SHARE = 0.2

#: The most names of campaigns: more would not fit into a menu.
_MOST_NAMES = 5_000


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a campaign's new records are read, and its jobs counted."""

    poll_seconds: float
    count_seconds: float
    records_at_once: int = 2_000
    """Records read at once: few, so that a page is answered in between."""
    part_bytes: int = 256 * 2**10
    """Bytes of a shard that are read at once."""


#: Each poll is billed on Azure: a listing, and a read for each part of a shard that is new.
LOCAL_PACE = Pace(poll_seconds=0.9, count_seconds=5.0)
REMOTE_PACE = Pace(poll_seconds=5.0, count_seconds=60.0, records_at_once=8_000, part_bytes=2**20)


@dataclass(slots=True)
class View:
    """The rows of a filter, oldest first. New ones only come at the end, or *generation* grows."""

    seqs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    generation: int = 0
    version: int = -1
    is_complete: bool = False
    select_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Campaign:
    """The index of one campaign, kept up to date by `refresh`."""

    def __init__(self, storage: Storage, name: str, pace: Pace) -> None:
        self.index = Index()
        self.sent: int | None = None
        """Jobs, as far as a filler has noted it."""
        self.problem = ""
        """Why its records cannot be read at the moment."""
        self.is_complete = False
        """Whether all records that there were have been read once."""
        self.damaged = Damaged()
        self._storage = storage
        self._name = name
        self._pace = pace
        self._follower: reader.Follower | None = None
        self._ends: dict[str, int] = {}
        self._version = 0
        self._polling: asyncio.Task[None] | None = None
        self._poll_at = self._count_at = 0.0
        self._views: OrderedDict[Filter, View] = OrderedDict()

    @property
    def read_share(self) -> float:
        """The share read of the bytes that the shards had when the campaign was opened."""
        position = self._follower.position if self._follower else {}
        read = sum(min(end, position.get(name, 0)) for name, end in self._ends.items())
        return read / (sum(self._ends.values()) or 1)

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
            if self._follower is None:
                self._follower = await self._started()
            else:
                until = time.monotonic() + _READ_SECONDS
                await self._read(self._follower)
                while not self.is_complete and time.monotonic() < until:
                    await self._read(self._follower)
            if time.monotonic() >= self._count_at:
                self.sent = await reader.sent(self._storage, self._name)
                self._count_at = time.monotonic() + self._pace.count_seconds
            self.problem = ""
        except errors.FleetError as error:
            self.problem = error.message
        except sqlite3.Error as error:
            self.problem = f"The index of the gallery cannot be written: {error}"
        is_behind = not (self.is_complete or self.problem)
        self._poll_at = time.monotonic() + (0.0 if is_behind else self._pace.poll_seconds)

    async def _started(self) -> reader.Follower:
        """What reads all records. Where they are many, the newest are added before."""
        follower = reader.Follower(
            *(self._storage, self._name, None, self.damaged),
            most=self._pace.records_at_once,
            part_bytes=self._pace.part_bytes,
        )
        self._ends = await reader.end(self._storage, self._name)
        if sum(self._ends.values()) > self._pace.part_bytes:
            newest = await reader.newest(self._storage, self._name, _NEWEST)
            await asyncio.to_thread(self.index.add, newest)
            self._version += 1
        else:
            await self._read(follower)
        return follower

    async def _read(self, follower: reader.Follower) -> None:
        before = dict(follower.position)
        records = await follower.poll()
        try:
            await asyncio.to_thread(self.index.add, records, at_end=self.is_complete)
        except BaseException:
            follower.position = before
            raise
        is_complete = self.is_complete or len(records) < self._pace.records_at_once
        self._version += bool(records) or is_complete != self.is_complete
        self.is_complete = is_complete

    async def view(self, chosen: Filter, *, is_new: bool = True) -> View:
        """The rows of a filter: with all that has been read by now, or as a page knows them."""
        view = self._views.setdefault(chosen, View())
        self._views.move_to_end(chosen)
        if len(self._views) > _VIEWS:
            self._views.popitem(last=False)
        async with view.lock:
            if view.version < 0 or (is_new and view.version != self._version):
                await self._select(chosen, view)
        return view

    async def _select(self, chosen: Filter, view: View) -> None:
        began_at, version, is_complete = time.monotonic(), self._version, self.is_complete
        if began_at < view.select_at and is_complete == view.is_complete:
            return
        seqs = await asyncio.to_thread(self.index.select, chosen)
        view.generation += not np.array_equal(seqs[: len(view.seqs)], view.seqs)
        view.seqs, view.version, view.is_complete = seqs, version, is_complete
        ended_at = time.monotonic()
        view.select_at = ended_at + (ended_at - began_at) / _SELECT_SHARE


class Campaigns:
    """The campaigns of a storage, and the indices of those that somebody has opened."""

    def __init__(self, storage: Storage, pace: Pace, preferred: str | None) -> None:
        self._storage = storage
        self._pace = pace
        self._preferred = preferred
        self._open: dict[str, Campaign] = {}

    async def names(self) -> list[str]:
        """The campaigns that have records, and the preferred one."""
        names = [name async for name in reader.campaigns(self._storage)][:_MOST_NAMES]
        return sorted({*names, *([self._preferred] if self._preferred else [])})

    async def newest(self) -> str | None:
        """The preferred campaign, else the one that began last; None if there is none."""
        if self._preferred:
            return self._preferred
        # A shard's name begins with its time.
        started = [
            (name.rpartition("/")[2], found.campaign)
            async for name in self._storage.blobs.names(RECORDS)
            if (found := ShardName.read(name))
        ]
        return max(started)[1] if started else None

    async def get(self, name: str) -> Campaign:
        """A campaign that a page asks for; raises HTTPNotFound."""
        if name not in self._open and name not in await self.names():
            raise web.HTTPNotFound(text="there is no such campaign\n")
        if name not in self._open:
            self._open[name] = Campaign(self._storage, name, self._pace)
        return self._open[name]

    async def close(self) -> None:
        for campaign in self._open.values():
            await campaign.close()
