"""The protocols of storage: a job queue and a blob store.

They follow Azure Queue Storage, the more limited implementation: each renewal of a lease
(visibility timeout) replaces its receipt, deliveries are counted, a message holds 64 KiB, and a
receive on an empty queue returns at once. `test_contract.py` tests every implementation.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from imagefleet import concurrency
from imagefleet.errors import JobError, TransientError, UnusableFileError
from imagefleet.job import sizes
from imagefleet.telemetry.logs import log

#: A blob's metadata: names and texts in ASCII.
Metadata = Mapping[str, str]

#: Azure's limit for one receive.
MAX_RECEIVE = 32

#: Azure's limit for a lease.
MAX_LEASE_SECONDS = 7 * 24 * 3600

#: Others who change a blob in the same moment, before an edit of it is given up.
_EDIT_TRIES = 10

#: No control characters, nor any that are special to Windows or a shell.
_BLOB_NAME_PART = re.compile(
    r"[^./\\:*?\"<>|\x00-\x1f\x7f][^/\\:*?\"<>|\x00-\x1f\x7f]{0,199}"
)


@dataclass(frozen=True, slots=True)
class Message:
    """A message in a queue; `queue` is that queue's name."""

    id: str
    body: str
    delivery_count: int
    enqueued_at: datetime
    queue: str = field(default="", kw_only=True)

    def leased(self, receipt: str) -> LeasedMessage:
        """The message as it is in flight, with the receipt of its lease."""
        return LeasedMessage(
            self.id,
            self.body,
            self.delivery_count,
            self.enqueued_at,
            receipt,
            queue=self.queue,
        )


@dataclass(frozen=True, slots=True)
class LeasedMessage(Message):
    """A message in flight. Only its newest receipt renews, releases or deletes it."""

    receipt: str

    def renewed(self, receipt: str, body: str | None) -> LeasedMessage:
        """A copy with the new receipt and, if given, a new body."""
        return replace(self, receipt=receipt, body=self.body if body is None else body)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The size of a queue. `leased` is None on Azure, which reports only the sum.

    `messages` and `leased` count jobs: a bundle as all of its own. Azure counts messages alone, so
    they are estimated there by the first 32.
    `by_queue` has the sizes of the queues that are drained as one.
    `model` is that of the queue's jobs.
    """

    messages: int
    leased: int | None
    oldest_age_seconds: float | None
    by_queue: Mapping[str, QueueDepth] = field(default_factory=dict, compare=False)
    model: str | None = field(default=None, compare=False)


#: A clock that is off by more is named: a job's times, and those of its node, are compared.
NOTABLE_OFFSET_SECONDS = 60.0


class Clock:
    """The storage's clock, which all who use it share, as its answers tell it.

    An answer's date is a whole second, and it was written between the request and the answer: each
    narrows how far this machine's clock may be ahead. One that is far off is named in the log.
    """

    def __init__(self, machine: Callable[[], float] = time.time) -> None:
        """*machine* tells this machine's time, in Unix seconds."""
        self.machine = machine
        self._least = self._most = 0.0
        self._is_named = False

    @property
    def offset_seconds(self) -> float:
        """Seconds this machine's clock is ahead of the storage's; 0 before its first answer."""
        return (self._least + self._most) / 2

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.machine() - self.offset_seconds, UTC)

    def answered(self, date: datetime, asked_at: float) -> None:
        """Learns from an answer's *date*; it was asked for at *asked_at* of `machine`."""
        second = date.timestamp()
        least = asked_at - second - 1.0
        most = self.machine() - second
        self._least = max(least, self._least)
        self._most = min(most, self._most)
        if self._least > self._most:  # the first answer; or one of the clocks was set
            self._least = least
            self._most = most
        ahead = self.offset_seconds
        if abs(ahead) > NOTABLE_OFFSET_SECONDS and not self._is_named:
            self._is_named = True
            side = "ahead of" if ahead > 0 else "behind"
            log.warning(
                f"this machine's clock is {abs(ahead):,.0f} seconds {side} the storage's, whose"
                " time is used: set it",
                action="clock_off",
                seconds=round(ahead),
            )


#: Called with what is done so far, in bytes or jobs.
OnProgress = Callable[[int], None]

#: Called where somebody else may have taken the name of a blob that counts as written.
OnDoubt = Callable[[], None]

#: Messages that were found in a queue, and whether each is leased.
FoundMessages = AsyncIterator[tuple[Message, bool]]


class JobQueue(Protocol):
    """An at-least-once queue. Every method may raise TransientError."""

    @property
    def name(self) -> str: ...

    async def check(self) -> None:
        """Raises SetupError if the queue does not exist or access is refused."""

    async def send(self, bodies: Iterable[str]) -> list[LeasedMessage]:
        """Adds messages that never expire; when it returns, they are stored durably.

        Returns them in their order: each can be deleted by its receipt until somebody receives it.
        After an error some may be stored: jobs have ids, so sending twice is harmless. After a
        JobError, for a body over 64 KiB, none is.
        """

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[LeasedMessage]:
        """Leases up to 32 messages; [] at once if there are none; if cancelled, maybe some."""

    async def renew(
        self, message: LeasedMessage, lease_seconds: float, body: str | None = None
    ) -> LeasedMessage:
        """Extends a lease to *lease_seconds* from now; returns the message with its new receipt.

        *body* replaces the message's text. As `release` and `delete`, it raises LeaseLost if the
        receipt is stale or the message was deleted.
        """

    async def release(
        self, message: LeasedMessage, delay_seconds: float = 0, body: str | None = None
    ) -> None:
        """Hands a message back: others see it after *delay_seconds*, with *body* as its text."""

    async def delete(self, message: LeasedMessage) -> None:
        """Acknowledges a message, which deletes it."""

    @property
    def is_local(self) -> bool:
        """True if a request costs nothing, and `find` sees every message.

        On Azure it sees the first 32 that are visible.
        """

    def find(self, text: str) -> FoundMessages:
        """The messages that may contain *text*, and whether each is leased; changes nothing."""

    async def depth(self) -> QueueDepth: ...

    async def clear(self) -> None:
        """Deletes all messages, those in flight as well."""


class StoredQueue(JobQueue, Protocol):
    """One plain queue of the storage."""

    async def create(self) -> bool:
        """Creates the queue if it does not exist; False if the credentials do not allow that."""


class BlobRecord(NamedTuple):
    """A blob without its content, as listed."""

    name: str
    size_bytes: int
    created_at: datetime
    metadata: Metadata
    #: The time of its last change; None: as it was created.
    modified_at: datetime | None = None


class BlobPart(NamedTuple):
    """Some of a blob's bytes; `version` changes when the blob is rewritten."""

    data: bytes
    total_bytes: int
    version: str


class BlobStore(Protocol):
    """A store of blobs, which only `replace` overwrites. Every method may raise TransientError."""

    #: True if a missing container counts as an empty one to whoever checks or reads.
    may_be_missing: bool = False

    #: The clock of the storage: times that others compare are read from it.
    clock: Clock

    name: str

    async def create_container(self) -> None:
        """Creates what holds the blobs, if it does not exist."""

    async def check(self) -> None:
        """Raises SetupError if it does not exist or access is refused."""

    async def create(
        self,
        name: str,
        data: bytes,
        content_type: str,
        metadata: Metadata,
        on_doubt: OnDoubt = lambda: None,
    ) -> bool:
        """Writes a blob durably; returns False if the name is taken (If-None-Match: *).

        A name taken by an attempt of this call whose reply was lost counts as written, as it does
        to a caller who repeats it after an error with `outcome_is_unknown`. Where somebody else may
        have taken it all the same, *on_doubt* is called. Raises JobError if the name is no plain
        relative path, or HTTP headers cannot carry the metadata.
        """

    async def upload(
        self,
        name: str,
        file: Path,
        content_type: str,
        metadata: Metadata,
        on_progress: OnProgress = lambda _: None,
    ) -> bool:
        """Creates a blob from a file too large for memory; a reader sees all of it or nothing.

        *on_progress* gets the bytes stored so far. After an error the same call sends again only
        what the storage does not have.
        """

    async def replace(
        self, name: str, data: bytes, content_type: str, version: str | None
    ) -> bool:
        """Overwrites a blob; False if it has no longer that *version* (None: it does not exist).

        For the few blobs that people edit: a local storage does not notice two processes that
        overwrite the same one in the same moment.
        """

    async def edit(
        self,
        name: str,
        changed: Callable[[BlobPart | None], bytes | None],
        max_bytes: int,
    ) -> None:
        """Stores what *changed* makes of a small JSON blob, or of None without one; None: nothing.

        It is called again where somebody else was faster. Raises TransientError if others keep on.
        """
        for _ in range(_EDIT_TRIES):
            part = await self.read_part(name, 0, max_bytes)
            data = changed(part)
            version = None if part is None else part.version
            if data is None or await self.replace(
                name, data, "application/json", version
            ):
                return
            await asyncio.sleep(concurrency.jitter(0.2))
        raise TransientError(
            f"{name} is being changed by others: try again in a moment"
        )

    async def append(self, name: str, data: bytes, position: int) -> bool:
        """Adds to the end of a blob of *position* bytes, durably; at 0 creates it.

        False if it has another length, or was not made by appending; after an error with
        `outcome_is_unknown`, to the same call, that the data is there. At most 4 MiB at once, and
        50,000 times to one blob (Azure's limits).
        """

    async def exists(self, name: str) -> bool:
        """True if there is such a blob, for credentials that may append, but not read."""

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """A blob's bytes; None without it. UnusableFileError: it has more than *max_bytes*."""

    async def record(self, name: str) -> BlobRecord | None:
        """A blob without its content; None if it does not exist. Lists nothing."""

    async def metadata(self, name: str) -> Metadata | None:
        """A blob's metadata; None if it does not exist."""
        found = await self.record(name)
        return None if found is None else found.metadata

    async def delete(self, name: str) -> bool:
        """Deletes a blob if it exists; False if the credentials do not allow that."""

    async def read_part(
        self, name: str, offset: int, max_bytes: int
    ) -> BlobPart | None:
        """Reads *max_bytes* at most from *offset*, of a blob too large for memory, if it exists."""

    def address(self, name: str) -> str:
        """The blob's URL (`file:` on a local storage), without any credential."""

    def names(self, prefix: str = "") -> AsyncIterator[str]: ...

    def records(self, prefix: str = "") -> AsyncIterator[BlobRecord]:
        """Lists the blobs of `names` with their metadata, without reading the blobs."""

    def folders(self, prefix: str) -> AsyncIterator[str]:
        """The names of the folders right below *prefix*, which ends in a slash; lists no blobs."""


@dataclass
class Operations:
    """Operations so far, as Azure bills them: each request, retries included; deletes are free.

    A write whose name is taken is billed, and so is a page of a listing, as a write.
    """

    queue: int = 0
    blob_writes: int = 0
    blob_reads: int = 0


def check_blob_name(name: str) -> None:
    """Raises JobError unless the name is a plain relative path, without dots at the start."""
    is_plain = all(map(_BLOB_NAME_PART.fullmatch, name.split("/")))
    if not is_plain or len(name) > sizes.MAX_BLOB_NAME:
        raise JobError(
            f"{name[:80]!r} is not a valid blob name: give a relative path with / between its"
            ' parts, none of which begins with a dot or has any of \\ : * ? " < > | in it'
        )


def check_blob_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raises UnusableFileError for a file larger than *max_bytes*."""
    if max_bytes is not None and size > max_bytes:
        raise UnusableFileError(
            f"{name} is too large: it has {size:,} bytes, and at most {max_bytes:,} are allowed"
        )


def check_metadata(metadata: Metadata) -> None:
    """Raises JobError for metadata that HTTP headers cannot carry, as Azure requires."""
    for name, value in metadata.items():
        if not (
            name.isidentifier()
            and name.isascii()
            and value.isascii()
            and value.isprintable()
        ):
            raise JobError(
                f"the metadata {name[:80]!r} is not valid: names must be ASCII identifiers,"
                " values printable ASCII"
            )
