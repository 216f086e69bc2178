"""The ledger of what was sent: which jobs of each campaign, and of which digest.

It is among the files, where workers only read, so that none can make up or hide a job. Everybody
who sends appends to it: a frame is a header and 16 bytes for each job, the hashes of its id and of
its digest. The last entry of an id counts; a frame's header has the number of ids so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from imagefleet import concurrency
from imagefleet.errors import MissingResourceError, SetupError, TransientError
from imagefleet.job.message import DEFAULT_CAMPAIGN, read_job
from imagefleet.records.catalog import PART_BYTES, Damaged
from imagefleet.records.log import RETRIES
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart, BlobRecord

#: The folder of the ledgers, in the container of files.
SENT = "-sent/"

HASH_BYTES = 8
_ENTRY_BYTES = 2 * HASH_BYTES

#: A frame's header: what it begins with, entries, CRC-32 of these, the frame's number in its blob,
#: and the campaign's ids so far.
_HEADER = struct.Struct("<8sIIIQ")
_MAGIC = b"IF-SENT1"
_MAX_ENTRIES = 8_192

#: A blob's end in which there is a whole frame, if there is one.
_MAX_FRAME_BYTES = _HEADER.size + _MAX_ENTRIES * _ENTRY_BYTES
_END_BYTES = 2 * _MAX_FRAME_BYTES

#: A full blob is followed by the next: Azure appends 50,000 times to one.
_MAX_FRAMES = 40_000
_MAX_BYTES = 64 * 2**20

#: Others who append between a look at the end and the own append, before it is given up.
_TRIES = 50
_CONCURRENT_APPENDS = 16

#: Ledgers that one process remembers; others are read again.
MAX_LEDGERS = 4_000

_BUCKET_BYTES = 2

#: A job beside the one that was sent with its id.
Compared = Literal["new", "changed", "as_before"]

_ID = '"id":"'
_DIGEST = '"digest":"'
_CAMPAIGN = '"campaign":"'


class SentJob(NamedTuple):
    """A message's job: *entry* is the hashes of its id and its digest, none of a second drawing."""

    campaign: str
    id: str
    entry: bytes


class Digests:
    """A hash of 8 bytes for each hash of 8 bytes: some 20 bytes of memory for a job."""

    def __init__(self) -> None:
        self._buckets: dict[bytes, bytearray] = {}
        self._count = 0
        self._earlier: set[bytes] = set()  # entries that others have taken the place of

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        """The entries: key and value in one."""
        return itertools.chain.from_iterable(map(_entries, self._buckets.values()))

    def entry(self, key: bytes) -> bytes | None:
        bucket = self._buckets.get(key[:_BUCKET_BYTES])
        if bucket is None or (at := _find(bucket, key)) < 0:
            return None
        return bytes(bucket[at : at + _ENTRY_BYTES])

    def __contains__(self, key: bytes) -> bool:
        return self.entry(key) is not None

    def get(self, key: bytes) -> bytes | None:
        entry = self.entry(key)
        return None if entry is None else entry[HASH_BYTES:]

    def put(self, entry: bytes) -> None:
        """Takes in a key and its value, in place of an earlier one."""
        bucket = self._buckets.setdefault(entry[:_BUCKET_BYTES], bytearray())
        if (at := _find(bucket, entry[:HASH_BYTES])) < 0:
            bucket += entry
            self._count += 1
        elif bucket[at : at + _ENTRY_BYTES] != entry:
            self._earlier.add(bytes(bucket[at : at + _ENTRY_BYTES]))
            bucket[at : at + _ENTRY_BYTES] = entry

    def was(self, entry: bytes) -> bool:
        """True if another value has taken the place of this one of its key."""
        return entry in self._earlier and self.entry(entry[:HASH_BYTES]) != entry


def _find(bucket: bytearray, key: bytes) -> int:
    """Byte offset of the entry of *key* in its bucket; -1 if there is none."""
    at = bucket.find(key)
    while at > 0 and at % _ENTRY_BYTES:  # inside of another
        at = bucket.find(key, at + 1)
    return at


def folder_of(storage: Storage) -> str:
    """The folder of a fleet's ledgers; several may share the container of files."""
    return f"{SENT}{storage.blobs.name}/"


def id_hash(job_id: str) -> bytes:
    return hashlib.blake2b(job_id.encode(), digest_size=HASH_BYTES).digest()


def entry_of(job_id: str, digest: str) -> bytes:
    return id_hash(job_id) + bytes.fromhex(digest[: 2 * HASH_BYTES])


def job_of(body: str) -> SentJob:
    """The job of a message that was checked."""
    has_one = body.count(_ID) == body.count(_DIGEST) == 1
    if has_one and body.count(_CAMPAIGN) <= 1 and '"verify":true' not in body:
        # As `Job.to_message` writes most of them: to parse each would take as long as to make it.
        job_id, digest, campaign = (
            body.partition(field)[2].partition('"')[0]
            for field in (_ID, _DIGEST, _CAMPAIGN)
        )
        entry = entry_of(job_id, digest)
        return SentJob(campaign or DEFAULT_CAMPAIGN, job_id, entry)
    job = read_job(body, "none").whole
    entry = b"" if job.verify else entry_of(str(job.id), job.digest)
    return SentJob(job.campaign or DEFAULT_CAMPAIGN, str(job.id), entry)


class _End(NamedTuple):
    """The end of a ledger: its last blob, that one's bytes and frames, and the campaign's ids."""

    number: int = 0
    size_bytes: int = 0
    frames: int = 0
    jobs: int = 0

    @property
    def is_full(self) -> bool:
        return self.frames >= _MAX_FRAMES or self.size_bytes >= _MAX_BYTES

    def next_blob(self) -> _End:
        return _End(self.number + 1, jobs=self.jobs)


class Ledger:
    """One campaign's ledger: `known` is what `read` has found, and what was noted since.

    Several may append to it at the same time, other processes and machines too.
    """

    def __init__(self, storage: Storage, campaign: str) -> None:
        self.known = Digests()
        self.is_read = False
        #: Entries of jobs in the queue that `note` is still to append.
        self.pending = bytearray()
        #: Digests by id of jobs on their way to the queue, until they are noted.
        self.claimed: dict[bytes, bytes] = {}
        self._files = storage.files
        self._folder = f"{folder_of(storage)}{campaign}/"
        self._end: _End | None = None
        self._read_until = _End()
        self._start: BlobPart | None = None  # the whole ledger, if `end` has read it
        #: Bytes of `pending` in an append that may be there, though nobody has said so.
        self._begun_bytes = 0
        self._lock = asyncio.Lock()

    async def read(self, damaged: Damaged | None = None) -> Digests:
        """Reads what was appended since, 4 MiB at once; returns `known`."""
        async with self._lock:
            self._end = await self._read(damaged or Damaged())
            self.is_read = True
        return self.known

    @property
    def is_in_use(self) -> bool:
        return bool(self.pending or self.claimed) or self._lock.locked()

    def digest_of(self, entry: bytes) -> bytes | None:
        """The digest that the id of *entry* was sent with."""
        key = entry[:HASH_BYTES]
        return self.claimed.get(key) or self.known.get(key)

    def compare(self, entry: bytes) -> Compared:
        """Compares a job with the one already sent under its id: new, the same, or changed."""
        before = self.digest_of(entry)
        if before is None:
            return "new"
        return "as_before" if before == entry[HASH_BYTES:] else "changed"

    async def is_new(self) -> bool:
        """True if nothing was noted yet."""
        async with self._lock:
            if self._end is None:
                self._end = await self.end()
        return self._end == _End()

    async def note(self) -> None:
        """Appends what is pending; those who ask at once share an append. Raises FleetError.

        May be cancelled or fail at any moment: the next call asks whether its append is there.
        """
        async with self._lock:
            while self.pending:
                # The same bytes as before, so that they are recognized where they would be.
                most = self._begun_bytes or _MAX_ENTRIES * _ENTRY_BYTES
                entries = bytes(self.pending[:most])
                self._begun_bytes = len(entries)
                await self._append(entries)
                self._begun_bytes = 0
                del self.pending[: len(entries)]
                for entry in _entries(entries) if self.claimed else ():
                    self.claimed.pop(entry[:HASH_BYTES], None)

    async def count(self) -> int | None:
        """Number of jobs sent, each id once; None if nobody has noted any. Mostly one read."""
        try:
            end = await self.end()
        except MissingResourceError:  # there are no files
            return None
        return None if end == _End() else end.jobs

    async def end(self) -> _End:
        """The end as the last whole frame tells it: one read of a short ledger."""
        end = _End()
        while (part := await self._part(end.number, 0, _END_BYTES)) is not None:
            total = part.total_bytes
            data = part.data
            if end == _End() and total == len(data):
                self._start = part
            if total > len(data):
                part = await self._part(
                    end.number, max(0, total - _END_BYTES), _END_BYTES
                )
                data = b"" if part is None else part.data
            at = len(data)
            while (at := data.rfind(_MAGIC, 0, at)) >= 0:
                if (frame := _frame_at(data, at)) is not None:
                    _, frames, jobs = frame
                    end = end._replace(frames=frames, jobs=jobs)
                    break
            end = end._replace(size_bytes=total)
            if not end.is_full:
                break
            end = end.next_blob()
        return end

    async def _append(self, entries: bytes) -> None:
        count = len(entries) // _ENTRY_BYTES
        ids = {entry[:HASH_BYTES] for entry in _entries(entries)}
        for _ in range(_TRIES):
            if self._end is None:
                self._end = await (
                    self._read(Damaged()) if self.is_read else self.end()
                )
            end = self._end.next_blob() if self._end.is_full else self._end
            known = sum(each in self.known for each in ids) if len(self.known) else 0
            jobs = end.jobs + len(ids) - known
            header = _MAGIC, count, zlib.crc32(entries), end.frames + 1, jobs
            frame = _HEADER.pack(*header) + entries
            append = partial(
                self._files.append, self._name(end.number), frame, end.size_bytes
            )
            if await RETRIES.call(append) or await self._is_there(frame, end):
                new = end._replace(
                    size_bytes=end.size_bytes + len(frame),
                    frames=end.frames + 1,
                    jobs=jobs,
                )
                if self.is_read:
                    self._take(entries)
                    if self._read_until[:2] == end[:2]:
                        self._read_until = new
                self._end = new
                return
            self._end = None  # somebody else has appended
        raise TransientError(f"others append to {self._folder} all the time")

    async def _is_there(self, frame: bytes, end: _End) -> bool:
        """True if the frame is there, so that only the reply to its append was lost."""
        part = await self._part(end.number, end.size_bytes, len(frame))
        return part is not None and part.data == frame

    async def _read(self, damaged: Damaged) -> _End:
        end = self._read_until
        while True:
            part = self._start
            self._start = None
            if part is None or end != _End():
                part = await self._part(end.number, end.size_bytes, PART_BYTES)
            if part is None:
                break
            read_bytes = end.size_bytes + len(part.data)
            end = await asyncio.to_thread(self._take_frames, part.data, end, damaged)
            if read_bytes < part.total_bytes:
                continue
            # What is left is no whole frame; the next one begins behind it.
            self._read_until = end
            end = end._replace(size_bytes=part.total_bytes)
            if not end.is_full:
                break
            self._read_until = end = end.next_blob()
        return end

    def _take_frames(self, data: bytes, end: _End, damaged: Damaged) -> _End:
        """Takes in the whole frames; returns the end of the last one."""
        at = taken = 0
        while (found := data.find(_MAGIC, at)) >= 0:
            if (frame := _frame_at(data, found)) is not None:
                stop, frames, jobs = frame
                end = end._replace(frames=frames, jobs=jobs)
                self._take(data[found + _HEADER.size : stop])
                taken += stop - found
                at = stop
            elif (
                data.find(_MAGIC, found + 1) < 0
                and len(data) - found < _MAX_FRAME_BYTES
            ):
                at = found  # it goes on in the next part
                break
            else:
                at = found + 1
        if found < 0 and len(data) - at > _MAX_FRAME_BYTES:
            at = len(data) - len(_MAGIC)
        if at > taken:
            damaged.add(
                self._name(end.number), f"{at - taken:,} bytes of it are damaged"
            )
        return end._replace(size_bytes=end.size_bytes + at)

    def _take(self, entries: bytes) -> None:
        for entry in _entries(entries):
            self.known.put(entry)

    async def _part(self, number: int, offset: int, size: int) -> BlobPart | None:
        return await self._files.read_part(self._name(number), offset, size)

    def _name(self, number: int) -> str:
        return f"{self._folder}{number:04}"


class Ledgers:
    """The ledgers that one process appends to, by campaign."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ledgers: OrderedDict[str, Ledger] = OrderedDict()

    def of(self, campaign: str) -> Ledger:
        """A campaign's ledger, as far as it was read."""
        if campaign not in self._ledgers:
            self._ledgers[campaign] = Ledger(self._storage, campaign)
        self._ledgers.move_to_end(campaign)
        surplus = max(0, len(self._ledgers) - MAX_LEDGERS)
        for name in list(itertools.islice(self._ledgers, surplus)):
            if not self._ledgers[name].is_in_use:
                del self._ledgers[name]
        return self._ledgers[campaign]

    async def note(self) -> None:
        """Appends what is pending; raises FleetError."""
        ledgers = [ledger for ledger in self._ledgers.values() if ledger.pending]
        await concurrency.for_each(ledgers, Ledger.note, _CONCURRENT_APPENDS)


async def listed(storage: Storage) -> dict[str, list[BlobRecord]]:
    """The blobs of each campaign's ledger; one listing."""
    found: dict[str, list[BlobRecord]] = {}
    folder = folder_of(storage)
    with contextlib.suppress(MissingResourceError):  # there are no files
        async for blob in storage.files.records(folder):
            campaign = blob.name.removeprefix(folder).partition("/")[0]
            found.setdefault(campaign, []).append(blob)
    return found


async def known(storage: Storage, campaign: str) -> Digests | None:
    """The digest of each job that was sent, by its id; None if nobody has noted any."""
    noted = Ledger(storage, campaign)
    return None if await noted.count() is None else await noted.read()


async def digest_of(storage: Storage, campaign: str, job_id: str) -> str:
    """First bytes (hex) of the digest that a job was sent with; empty where nobody has noted it."""
    try:
        found = (await Ledger(storage, campaign).read()).get(id_hash(job_id))
    except SetupError:  # there are no files, or none to read with these credentials
        return ""
    return "" if found is None else found.hex()


async def note(storage: Storage, bodies: Iterable[str]) -> None:
    """Notes messages that are in the queue; those of ids that were sent before count once."""
    ledgers = Ledgers(storage)
    for job in map(job_of, bodies):
        ledger = ledgers.of(job.campaign)
        if not ledger.is_read:
            await ledger.read()
        ledger.pending += job.entry
    await ledgers.note()


def _frame_at(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Where the frame at *at* ends, its number, and the campaign's ids; None if it is not whole."""
    if len(data) < (start := at + _HEADER.size):
        return None
    _, count, crc, frames, jobs = _HEADER.unpack_from(data, at)
    end = start + count * _ENTRY_BYTES
    if end > len(data) or zlib.crc32(data[start:end]) != crc:
        return None
    return end, frames, jobs


def _entries(data: bytes | bytearray) -> Iterator[bytes]:
    return (
        bytes(data[at : at + _ENTRY_BYTES]) for at in range(0, len(data), _ENTRY_BYTES)
    )
