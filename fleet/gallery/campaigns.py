"""The campaigns of a storage, and the indices of those that somebody looks at."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from fleet.gallery.campaign import Campaign, Pace
from fleet.gallery.index import Index
from imagefleet import errors
from imagefleet.job.message import RECORDS
from imagefleet.records import reader
from imagefleet.records.shard import ShardName
from imagefleet.storage.protocol import Storage

#: Campaigns that are followed at the same time, each while a page shows it.
_MOST_OPEN = 4

#: Each poll is billed on Azure: a listing, and a read for each part of a shard that is new.
_LOCAL_PACE = Pace(poll_seconds=1.0, count_seconds=5.0)
_REMOTE_PACE = Pace(poll_seconds=5.0, count_seconds=60.0, records_at_once=8_000, part_bytes=2**20)

#: The list of campaigns is read again after this time.
_NAMES_SECONDS = 5.0

#: The most names of campaigns: more would not fit into a menu.
_MOST_NAMES = 5_000

#: Seconds between two looks whether a poll is due.
_TICK_SECONDS = 0.1

#: Older records are read when no page has asked for something so long, but one part in a second.
_HELD_SECONDS = 0.25
_LONGEST_HELD_SECONDS = 1.0

#: An index that nobody has opened for so long is deleted.
_UNUSED_SECONDS = 30 * 86_400


class Campaigns:
    """Opens campaigns, and follows those that are watched."""

    def __init__(
        self, storage: Storage, address: str, folder: Path, *, preferred: str | None, is_local: bool
    ) -> None:
        """*address* tells storages apart in the names of the indices, which are in *folder*."""
        self.problem = ""
        """Why the list of campaigns cannot be read at the moment."""
        self._storage = storage
        self._address = address
        self._folder = folder
        self._preferred = preferred
        self._pace = _LOCAL_PACE if is_local else _REMOTE_PACE
        self._names: list[str] = []
        self._named_at = float("-inf")
        self._naming = asyncio.Lock()
        self._open: OrderedDict[str, Campaign] = OrderedDict()
        self._closing: list[Campaign] = []
        self._opening = asyncio.Lock()
        self._held_until = float("-inf")

    async def names(self) -> list[str]:
        """The campaigns that have records, and the preferred one."""
        async with self._naming:
            if time.monotonic() - self._named_at >= _NAMES_SECONDS:
                try:
                    self._names = [name async for name in reader.campaigns(self._storage)]
                    self.problem = ""
                except errors.FleetError as error:
                    self.problem = error.message
                self._named_at = time.monotonic()
        preferred = {self._preferred} if self._preferred else set()
        return sorted({*self._names[:_MOST_NAMES], *preferred})

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
        newest = max(started)[1] if started else None
        if newest not in self._names:
            self._named_at = float("-inf")
        return newest

    async def get(self, name: str) -> Campaign:
        """A campaign that a page asks for, which is followed from now on; raises HTTPNotFound."""
        async with self._opening:
            if name not in self._open:
                if name not in await self.names():
                    raise web.HTTPNotFound(text="there is no such campaign\n")
                index = await asyncio.to_thread(Index, self._index_file(name))
                self._open[name] = Campaign(self._storage, name, index, self._pace)
                if len(self._open) > _MOST_OPEN:
                    self._closing.append(self._open.popitem(last=False)[1])
            self._open.move_to_end(name)
            campaign = self._open[name]
        campaign.ask()
        return campaign

    def hold(self) -> None:
        """A page is being filled."""
        self._held_until = time.monotonic() + _HELD_SECONDS

    async def follow(self) -> NoReturn:
        """Reads the records of the campaigns that are watched."""
        await asyncio.to_thread(self._remove_unused)
        with contextlib.suppress(errors.TransientError, web.HTTPNotFound):  # the page tells that
            if name := await self.newest():  # a browser is about to ask for it
                await self.get(name)
        while True:
            for campaign in [*self._open.values()]:
                if campaign.is_due:
                    if campaign.is_behind:
                        await self._wait_for_pages()
                    await campaign.poll()
            while self._closing:
                self._closing.pop().index.close()
            if not any(each.is_due and each.is_behind for each in self._open.values()):
                await asyncio.sleep(_TICK_SECONDS)

    async def _wait_for_pages(self) -> None:
        """What is on a screen comes before older records."""
        longest = time.monotonic() + _LONGEST_HELD_SECONDS
        while (seconds := min(self._held_until, longest) - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(seconds)

    def close(self) -> None:
        for campaign in (*self._open.values(), *self._closing):
            campaign.index.close()

    def _index_file(self, name: str) -> Path:
        digest = hashlib.blake2b(f"{self._address}/{name}".encode(), digest_size=12).hexdigest()
        return self._folder / f"index-{digest}.sqlite"

    def _remove_unused(self) -> None:
        for file in self._folder.glob("index-*.sqlite*"):
            with contextlib.suppress(FileNotFoundError):  # another gallery does the same
                if time.time() - file.stat().st_mtime > _UNUSED_SECONDS:
                    file.unlink()
