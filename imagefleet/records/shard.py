"""The format of a shard: gzip members of JSON lines, each followed by an empty one with totals.

`zcat` reads it. The totals lie in the extra field of the empty member's header, so that the end of
a shard tells what is in it.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from imagefleet import concurrency, errors, retry
from imagefleet.job.message import RECORDS
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore

#: `again` are images whose names were taken; most of them have a record in `images`.
Kind = Literal["again", "images", "jobs", "replaced", "sent"]

#: The most bytes in a member's lines. Azure appends 4 MiB at once; a record has 200 KiB at most.
MAX_MEMBER_BYTES = 3 * 2**20

_NAME = re.compile(
    rf"{re.escape(RECORDS)}(?P<campaign>[^/]+)/[^/]+\.(?P<kind>again|images|jobs|replaced|sent)\.jsonl\.gz"
)

#: An empty gzip member whose header has one extra field, `IF`: lines, and completed jobs.
_TOTALS = struct.Struct("<4s4xxB H2sHQQ 2s8x")
_GZIP_WITH_EXTRA = b"\x1f\x8b\x08\x04"
_UNKNOWN_SYSTEM = 255
_SUBFIELD = b"IF"
_EMPTY_BLOCK = b"\x03\x00"

TOTALS_BYTES = _TOTALS.size

#: How the empty members begin.
_BEFORE_TOTALS = struct.pack("<4s5xB H2sH", _GZIP_WITH_EXTRA, _UNKNOWN_SYSTEM, 20, _SUBFIELD, 16)

#: zlib's parameter for a gzip member.
_GZIP = 31


class Totals(NamedTuple):
    """What a shard holds: its records, and the jobs that are complete with one of them."""

    records: int
    jobs: int


NOTHING = Totals(0, 0)


class ShardName(NamedTuple):
    """What a shard's name says."""

    campaign: str
    kind: Kind

    @classmethod
    def read(cls, blob: str) -> ShardName | None:
        """The name's parts; None for a blob that is no shard."""
        match = _NAME.fullmatch(blob)
        return cls(match["campaign"], match["kind"]) if match else None  # type: ignore[arg-type]


def folder(campaign: str) -> str:
    """The folder of a campaign's shards."""
    return f"{RECORDS}{campaign}/"


def encode(lines: Iterable[bytes], totals: Totals) -> bytes:
    """What to append: *lines*, and the *totals* of the shard with them."""
    compressor = zlib.compressobj(6, wbits=_GZIP)
    data = compressor.compress(b"".join(lines)) + compressor.flush()
    return data + _TOTALS.pack(
        *(_GZIP_WITH_EXTRA, _UNKNOWN_SYSTEM, 20, _SUBFIELD, 16, *totals, _EMPTY_BLOCK)
    )


def totals(end: bytes) -> Totals | None:
    """The totals in a shard's last `TOTALS_BYTES`; None if it ends otherwise."""
    if len(end) != TOTALS_BYTES:
        return None
    start, system, length, subfield, size, records, jobs, block = _TOTALS.unpack(end)
    expected = (_GZIP_WITH_EXTRA, _UNKNOWN_SYSTEM, 20, _SUBFIELD, 16, _EMPTY_BLOCK)
    if (start, system, length, subfield, size, block) != expected or jobs > records:
        return None
    return Totals(records, jobs)


def first_member(end: bytes) -> int:
    """The start of the first whole member of lines in a shard's end, after some totals."""
    found = end.find(_BEFORE_TOTALS)
    return found + TOTALS_BYTES if found >= 0 else len(end)


@dataclass(slots=True)
class Decoder:
    """Reads a shard from its parts; `position` is the end of the last whole member."""

    position: int = 0
    is_damaged: bool = False
    _member: zlib._Decompress | None = None
    _member_bytes: int = 0
    _text: bytes = b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines of the members that *data*, the next bytes of the shard, completes.

        Where it is damaged, they end, and `is_damaged` is set.
        """
        found: list[bytes] = []
        while data and not self.is_damaged:
            if self._member is None:
                self._member, self._member_bytes, self._text = zlib.decompressobj(_GZIP), 0, b""
            try:
                self._text += self._member.decompress(data, MAX_MEMBER_BYTES + 1)
            except zlib.error:
                self.is_damaged = True
                break
            self.is_damaged = len(self._text) > MAX_MEMBER_BYTES
            self._member_bytes += len(data) - len(self._member.unused_data)
            data = self._member.unused_data
            if self._member.eof:
                self._member = None
                self.position += self._member_bytes
                found += self._text.removesuffix(b"\n").split(b"\n") if self._text else []
        return found


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

        Raises TransientError if the storage does not answer (some records may be stored), and
        SetupError if access is refused.
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
            self._shards[key] = _Shard(folder(campaign), self._writer, kind)
            if len(self._shards) > _MAX_OPEN:
                self._shards.popitem(last=False)
        self._shards.move_to_end(key)
        return self._shards[key]

    async def _append_part(self, to: _Shard, lines: list[bytes], jobs: int) -> None:
        if not to.name or to.appends >= _MAX_APPENDS or to.position >= _MAX_BYTES:
            to.begin()
        for _ in range(_TRIES):
            totals = Totals(to.totals.records + len(lines), to.totals.jobs + jobs)
            data = encode(lines, totals)
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
        if part and size + len(line) > MAX_MEMBER_BYTES:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield part
