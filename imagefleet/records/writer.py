"""Appends records to shards of one's own, so that processes never write to the same blob."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from imagefleet import concurrency, errors, retry
from imagefleet.records import shard
from imagefleet.records.record import Record
from imagefleet.records.shard import NOTHING, Kind, Totals
from imagefleet.storage.protocol import BlobStore

#: Azure appends 50,000 times to one blob; smaller shards are read side by side.
_MAX_APPENDS = 40_000
_MAX_BYTES = 64 * 2**20

#: Shards that one process keeps open, of as many campaigns.
_MAX_OPEN = 1_000

#: Shards with a random name each that are tried, should somebody else write to one.
_TRIES = 3

#: The retries of writing: only one process writes to a shard, so a lost reply is asked for again.
RETRIES = retry.RetryPolicy(tries=8, first_wait_seconds=0.5, longest_wait_seconds=30)


@dataclass(slots=True)
class _Shard:
    """The open shard of one campaign and kind."""

    folder: str
    writer: str
    kind: Kind
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    name: str = ""
    position: int = 0
    appends: int = 0
    totals: Totals = NOTHING

    def begin(self) -> None:
        """The next append creates a new blob."""
        now = datetime.now(UTC)
        start = f"{self.folder}{now:%Y%m%dT%H%M%SZ}-{self.writer}-{secrets.token_hex(4)}"
        self.name = f"{start}.{self.kind}.jsonl.gz"
        self.position = self.appends = 0
        self.totals = NOTHING


class RecordLog:
    """Adds records to the campaigns' shards; each call is durable when it returns."""

    def __init__(
        self, blobs: BlobStore, writer: str, retry_policy: retry.RetryPolicy = RETRIES
    ) -> None:
        """*writer*, a worker's name say, becomes part of the shards' names."""
        self._blobs = blobs
        self._writer = re.sub(r"[^A-Za-z0-9._-]", "_", writer)[:100] or "_"
        self._retry_policy = retry_policy
        self._shards: OrderedDict[tuple[str, Kind], _Shard] = OrderedDict()
        self._load = secrets.token_hex(8)

    async def add(self, records: Iterable[Record], *, again: bool = False) -> None:
        """Adds records, those of images as `images` or *again*: somebody had taken their names.

        Raises:
            TransientError: the storage does not answer; some records may be stored.
            SetupError: access is refused.
        """
        grouped: dict[tuple[str, Kind], list[Record]] = {}
        for record in records:
            kind: Kind = "jobs"
            if record.outcome == "completed":
                kind = "again" if again else "images"
            elif record.outcome == "replaced":
                kind = "replaced"
            grouped.setdefault((record.campaign, kind), []).append(record)
        await concurrency.gather(
            *(
                self._append(
                    *key,
                    [record.line() for record in group],
                    jobs=sum(record.completes_job for record in group),
                )
                for key, group in grouped.items()
            )
        )

    async def check(self, campaign: str, kind: Kind = "jobs") -> None:
        """Raises SetupError if records may not be written; adds none."""
        await self._append(campaign, kind, [], jobs=0)

    async def sent(self, campaign: str, jobs: int, load: str | None = None) -> None:
        """Notes how many jobs of a campaign have been sent so far.

        *load* names what sends them across restarts; by default this object.
        """
        line = json.dumps({"load": load or self._load, "jobs": jobs}).encode() + b"\n"
        await self._append(campaign, "sent", [line], jobs=0)

    async def _append(self, campaign: str, kind: Kind, lines: list[bytes], *, jobs: int) -> None:
        open_shard = self._shard(campaign, kind)
        async with open_shard.lock:
            *parts, last = _parts(lines)
            for part in parts:
                await self._append_part(open_shard, part, 0)
            await self._append_part(open_shard, last, jobs)

    def _shard(self, campaign: str, kind: Kind) -> _Shard:
        key = campaign, kind
        if key not in self._shards:
            self._shards[key] = _Shard(shard.folder(campaign), self._writer, kind)
            if len(self._shards) > _MAX_OPEN:
                self._shards.popitem(last=False)
        self._shards.move_to_end(key)
        return self._shards[key]

    async def _append_part(self, to: _Shard, lines: list[bytes], jobs: int) -> None:
        if not to.name or to.appends >= _MAX_APPENDS or to.position >= _MAX_BYTES:
            to.begin()
        for _ in range(_TRIES):
            totals = Totals(to.totals.records + len(lines), to.totals.jobs + jobs)
            data = shard.encode(lines, totals)
            try:
                is_appended = await self._append_once(to, data)
            except BaseException:
                to.name = ""  # nobody knows how long it is
                raise
            if is_appended:
                to.position += len(data)
                to.appends += 1
                to.totals = totals
                return
            to.begin()
        raise errors.TransientError(f"somebody else writes to the records in {to.folder}")

    async def _append_once(self, to: _Shard, data: bytes) -> bool:
        is_in_doubt = False

        async def append() -> bool:
            nonlocal is_in_doubt
            try:
                return await self._blobs.append(to.name, data, to.position) or is_in_doubt
            except errors.TransientError as error:
                is_in_doubt = is_in_doubt or error.outcome_is_unknown
                raise

        return await self._retry_policy.call(append)


def _parts(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines for one member each; at least one, which may be empty."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        if part and size + len(line) > shard.MAX_MEMBER_BYTES:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield part
