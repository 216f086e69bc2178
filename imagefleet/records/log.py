"""The log that records are written to: shards of gzip members, one writer for each.

The members hold JSON lines, and each is followed by an empty one with totals; `zcat` reads them.
The totals lie in the extra field of the empty member's header, so that the end of a shard tells
what is in it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Literal, NamedTuple, get_args

from cachetools import LRUCache

from imagefleet import concurrency
from imagefleet.errors import TransientError
from imagefleet.job.message import RECORDS
from imagefleet.records.record import Outcome, Record
from imagefleet.storage.protocol import BlobStore

#: `again` are images whose names were taken; most of them have a record in `images`. `settled` are
#: failures that were replayed or discarded; an empty shard `cancelled` says that a campaign was, an
#: empty one `distinct` that near-duplicates among its images do not count.
ShardKind = Literal[
    "again", "cancelled", "distinct", "images", "jobs", "replaced", "settled"
]

#: The kinds that only the operator writes. They lie among the files, where workers have no token.
OPERATORS: frozenset[ShardKind] = frozenset({"cancelled", "replaced", "settled"})

KINDS: Mapping[Outcome, ShardKind] = {
    "completed": "images",
    "failed": "jobs",
    "cancelled": "jobs",
    "dropped": "jobs",
    "replayed": "settled",
    "discarded": "settled",
    "replaced": "replaced",
}

#: The most bytes in a member's lines. Azure appends 4 MiB at once; a record has 200 KiB at most.
MAX_MEMBER_BYTES = 3 * 2**20

_NAME = re.compile(
    rf"{re.escape(RECORDS)}(?P<campaign>[^/]+)/[^/]+\.(?P<kind>{'|'.join(get_args(ShardKind))})\.jsonl\.gz"
)

#: A shard's writer, after its start and before what makes its name its own.
_WRITER = re.compile(r"/\d{8}T\d{6}Z-([^/]+)-[0-9a-f]{8}\.[^/]+$")

#: An empty gzip member whose header has one extra field, `IF`: lines, and completed jobs.
_BEFORE_TOTALS = struct.pack("<4s5xBH2sH", b"\x1f\x8b\x08\x04", 255, 20, b"IF", 16)
_TOTALS = struct.Struct("<QQ")
_AFTER_TOTALS = b"\x03\x00" + bytes(8)
TOTALS_BYTES = len(_BEFORE_TOTALS) + _TOTALS.size + len(_AFTER_TOTALS)

#: Half of most lines are digests, which no level makes smaller: the highest takes twice as long.
_LEVEL = 3

#: zlib's parameter for a gzip member.
GZIP = 31

#: Azure appends 50,000 times to one blob; smaller shards are read side by side.
_MAX_APPENDS = 40_000
_MAX_BYTES = 64 * 2**20

#: Shards that one process keeps open, of as many campaigns.
_MAX_OPEN = 1_000

#: Shards with a random name each that are tried, should somebody else write to one.
_TRIES = 3

#: The retries of writing: only one process writes to a shard, so a lost reply is asked for again.
RETRIES = concurrency.RetryPolicy(
    tries=8, first_wait_seconds=0.5, longest_wait_seconds=30
)


class Totals(NamedTuple):
    """Number of records in a shard, and of jobs that are complete with one of them."""

    records: int = 0
    jobs: int = 0


class ShardName(NamedTuple):
    """Campaign and kind of a shard, which its name has."""

    campaign: str
    kind: ShardKind

    @classmethod
    def read(cls, blob: str) -> ShardName | None:
        """The name's parts; None for a blob that is no shard."""
        match = _NAME.fullmatch(blob)
        return cls(match["campaign"], match["kind"]) if match else None  # type: ignore[arg-type]


def writer_name(worker: str) -> str:
    """A worker's name as the names of its shards have it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", worker)[:100] or "_"


def writer_of(blob: str) -> str:
    """The writer that a shard's name has; empty for another name."""
    match = _WRITER.search(blob)
    return match[1] if match else ""


def shard_folder(campaign: str) -> str:
    return f"{RECORDS}{campaign}/"


def shard_part(lines: Iterable[bytes], totals: Totals) -> bytes:
    """Bytes to append to a shard: *lines*, and the *totals* of the shard with them."""
    compressor = zlib.compressobj(_LEVEL, wbits=GZIP)
    data = compressor.compress(b"".join(lines)) + compressor.flush()
    return data + _BEFORE_TOTALS + _TOTALS.pack(*totals) + _AFTER_TOTALS


def totals_at(end: bytes) -> Totals | None:
    """The totals in a shard's last `TOTALS_BYTES`; None if it ends otherwise."""
    is_whole = end.startswith(_BEFORE_TOTALS) and end.endswith(_AFTER_TOTALS)
    if not is_whole or len(end) != TOTALS_BYTES:
        return None
    found = Totals(*_TOTALS.unpack_from(end, len(_BEFORE_TOTALS)))
    return found if found.jobs <= found.records else None


@dataclass
class _Shard:
    """The open shard of one campaign and kind."""

    folder: str
    writer: str
    kind: ShardKind
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    name: str = ""
    position: int = 0
    appends: int = 0
    totals: Totals = field(default_factory=Totals)

    def begin(self, now: datetime) -> None:
        """The next append creates a new blob."""
        start = f"{now:%Y%m%dT%H%M%SZ}-{self.writer}-{secrets.token_hex(4)}"
        self.name = f"{self.folder}{start}.{self.kind}.jsonl.gz"
        self.position = self.appends = 0
        self.totals = Totals()


class RecordLog:
    """Adds records to the campaigns' shards; each call is durable when it returns."""

    def __init__(
        self,
        blobs: BlobStore,
        writer: str,
        retry_policy: concurrency.RetryPolicy = RETRIES,
    ) -> None:
        """*blobs*: the images of a worker's records, the files for the kinds of the operator.

        *writer*, a worker's name say, becomes part of the shards' names.
        """
        self._blobs = blobs
        self._writer = writer_name(writer)
        self._retry_policy = retry_policy
        self._shards = LRUCache[ShardName, _Shard](_MAX_OPEN)

    async def add(self, records: Iterable[Record], *, again: bool = False) -> None:
        """Adds records, those of images as `images`, or *again* if their names were taken."""
        grouped: dict[ShardName, list[Record]] = {}
        for record in records:
            is_again = again and record.outcome == "completed"
            kind = "again" if is_again else KINDS[record.outcome]
            grouped.setdefault(ShardName(record.campaign, kind), []).append(record)
            distinct = ShardName(record.campaign, "distinct")
            if record.phash and distinct not in self._shards:
                grouped.setdefault(distinct, [])
        await concurrency.gather(*(self._append(*each) for each in grouped.items()))

    async def open(self, campaign: str, kind: ShardKind) -> None:
        """Begins a shard, and adds no record; raises SetupError if none may be written."""
        await self._append(ShardName(campaign, kind), [])

    async def _append(self, to: ShardName, records: Sequence[Record]) -> None:
        if (shard := self._shards.get(to)) is None:
            folder = shard_folder(to.campaign)
            shard = self._shards[to] = _Shard(folder, self._writer, to.kind)
        jobs = sum(record.completes_job for record in records)
        *parts, last = _parts(record.line() for record in records)
        async with shard.lock:
            for part in parts:
                await self._append_part(shard, part, 0)
            await self._append_part(shard, last, jobs)

    async def _append_part(self, to: _Shard, lines: list[bytes], jobs: int) -> None:
        for _ in range(_TRIES):
            if not to.name or to.appends >= _MAX_APPENDS or to.position >= _MAX_BYTES:
                to.begin(self._blobs.clock.now())
            totals = Totals(to.totals.records + len(lines), to.totals.jobs + jobs)
            append = partial(self._append_once, to, data := shard_part(lines, totals))
            try:
                is_appended = await self._retry_policy.call_in_doubt(append)
            except BaseException:
                to.name = ""  # nobody knows how long it is
                raise
            if is_appended:
                to.position += len(data)
                to.appends += 1
                to.totals = totals
                return
            to.name = ""
        raise TransientError(f"somebody else writes to the records in {to.folder}")

    async def _append_once(self, to: _Shard, data: bytes, is_in_doubt: bool) -> bool:
        return await self._blobs.append(to.name, data, to.position) or is_in_doubt


def _parts(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines for one member each; at least one, which may be empty."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        if part and size + len(line) > MAX_MEMBER_BYTES:
            yield part
            part = []
            size = 0
        part.append(line)
        size += len(line)
    yield part
