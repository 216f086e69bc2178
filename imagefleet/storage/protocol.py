"""The two protocols of storage, a job queue and a blob store, that every implementation keeps.

They follow Azure Queue Storage, the narrower of the two homes: a lease (visibility timeout) has a
receipt that each renewal replaces, deliveries are counted, a message holds 64 KiB, and an empty
queue answers at once. `tests/jobs/test_storage_contract.py` is the contract, run on each home.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self
from xml.sax.saxutils import escape

from imagefleet import errors

#: Azure's limit, counted on the text as it travels (XML-escaped UTF-8).
MAX_MESSAGE_BYTES = 65_536

#: Azure hands out no more than this in one call.
MAX_RECEIVE = 32

#: Azure's limits of a lease.
MIN_LEASE_SECONDS = 1
MAX_LEASE_SECONDS = 7 * 24 * 3600

#: Azure's limit of a blob's name, in characters.
MAX_BLOB_NAME = 1024

#: Azure carries messages in XML 1.0, which has no place for these. (A carriage return passes, and
#: may arrive as a line feed: to JSON that is the same white space.)
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

#: No control characters, nothing that Windows or a shell reads as more than a name.
_BLOB_NAME_PART = re.compile(r"[^./\\:*?\"<>|\x00-\x1f\x7f][^/\\:*?\"<>|\x00-\x1f\x7f]{0,199}")


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it waits in a queue."""

    id: str
    body: str
    delivery_count: int
    enqueued_at: datetime


@dataclass(frozen=True, slots=True)
class LeasedMessage(Message):
    """A message in hand. Only the newest receipt renews, releases or deletes it."""

    receipt: str


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What waits in a queue. Azure tells the sum alone; what a home cannot tell is None."""

    messages: int
    leased: int | None
    oldest_age_seconds: float | None


class JobQueue(Protocol):
    """An at-least-once queue. Every method raises TransientError on a fault that may pass."""

    @property
    def name(self) -> str: ...

    async def check(self) -> None:
        """Raises SetupError, in one sentence, if there is no such queue or no way in."""

    async def send(self, bodies: Iterable[str]) -> None:
        """Adds messages that never expire; when it returns, they are stored.

        After an error, some of them may be stored: senders give jobs ids, so twice is harmless.

        Raises:
            JobError: a body is over 64 KiB; none of them was sent.
        """

    async def receive(self, max_messages: int, lease_seconds: float) -> list[LeasedMessage]:
        """Leases up to *max_messages* (32 at most); an empty queue answers [] at once.

        Cancelled on the way, it may leave messages leased until their leases end.
        """

    async def renew(self, message: LeasedMessage, lease_seconds: float) -> LeasedMessage:
        """Extends a lease from now on and returns the message with its new receipt.

        Raises:
            LeaseLost: the receipt is stale or the message gone.
        """

    async def release(self, message: LeasedMessage, delay_seconds: float = 0) -> None:
        """Hands a message back, visible to others after *delay_seconds*.

        Raises:
            LeaseLost: as for renew.
        """

    async def delete(self, message: LeasedMessage) -> None:
        """Acknowledges a message: it is gone for good.

        Raises:
            LeaseLost: as for renew.
        """

    def browse(self) -> AsyncIterator[Message]:
        """Reads what is visible without keeping it from others for longer than the reading.

        On Azure, reading more than 32 counts as a delivery of each: it is for poison queues.
        """

    async def depth(self) -> QueueDepth: ...


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """What a blob's home tells of it without its bytes."""

    name: str
    size_bytes: int
    created_at: datetime
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BlobPart:
    """Some of a blob's bytes; *version* changes when the blob is written anew."""

    data: bytes
    total_bytes: int
    version: str


class BlobStore(Protocol):
    """Named bytes, written once. Every method raises TransientError on a fault that may pass."""

    async def create(
        self, name: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> bool:
        """Writes a blob unless the name is taken; tells whether it was written (If-None-Match).

        When it returns, the blob is there for good.

        Raises:
            JobError: the name is no plain relative path, or the metadata cannot be HTTP headers.
        """

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """A blob's bytes, or None where there is none of that name.

        Raises:
            UnusableFileError: it has more than *max_bytes*; it was not read.
        """

    async def delete(self, name: str) -> bool:
        """Removes a blob, if it is there; False where the credentials do not allow that."""

    async def read_part(self, name: str, offset: int, max_bytes: int) -> BlobPart | None:
        """At most *max_bytes* from *offset* on, none past its end; None if no blob has the name.

        For what is too large for memory: a caller asks on until it has `total_bytes`.
        """

    def names(self, prefix: str = "") -> AsyncIterator[str]: ...

    def records(self, prefix: str = "") -> AsyncIterator[BlobRecord]:
        """As names, with what is kept beside each blob; a listing, not a read of each."""


@dataclass(slots=True)
class Operations:
    """Operations so far, as Azure bills them: each request, retries included; deletes are free.

    A write whose name is taken is billed as one, and so is a page of a listing.
    """

    queue: int = 0
    blob_writes: int = 0
    blob_reads: int = 0


class Storage(Protocol):
    """The job queue, its poison queue and the blobs."""

    @property
    def url(self) -> str:
        """The home's address, fit for a terminal: without any secret."""

    @property
    def queue(self) -> JobQueue: ...

    @property
    def poison(self) -> JobQueue: ...

    @property
    def blobs(self) -> BlobStore: ...

    @property
    def operations(self) -> Operations:
        """What was requested of the queues and blobs so far."""

    async def create(self) -> None:
        """Creates what is missing of queues and container; what exists stays as it is."""

    async def check(self) -> None:
        """Raises SetupError, in one sentence, if the queue cannot be used as it is set up."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def message_bytes(body: str) -> int:
    """A message's size as Azure counts it: UTF-8 after XML escaping."""
    return len(escape(body).encode(errors="surrogatepass"))


def check_message_size(body: str) -> None:
    """Raises JobError for a body that is over what one message holds."""
    size = message_bytes(body)
    if size > MAX_MESSAGE_BYTES:
        raise errors.JobError(
            f"the message has {size:,} bytes; a queue message holds {MAX_MESSAGE_BYTES:,}"
        )


def checked_messages(bodies: Iterable[str]) -> list[str]:
    """The bodies; raises JobError before any is sent if one of them no queue can carry."""
    checked = list(bodies)
    for body in checked:
        check_message_size(body)
        if odd := _NOT_XML.search(body):
            raise errors.JobError(
                f"the message holds the character U+{ord(odd[0]):04X}, which queues cannot carry;"
                " JSON writes it as an escape"
            )
    return checked


def check_receive(max_messages: int, lease_seconds: float) -> None:
    """Raises ValueError for what no home can do."""
    if not 1 <= max_messages <= MAX_RECEIVE:
        raise ValueError(f"max_messages is {max_messages}; it is 1 to {MAX_RECEIVE}")
    check_lease(lease_seconds)


def check_lease(lease_seconds: float) -> None:
    """Raises ValueError for a lease that no home can give."""
    if not MIN_LEASE_SECONDS <= lease_seconds <= MAX_LEASE_SECONDS:
        raise ValueError(
            f"lease_seconds is {lease_seconds}; it is {MIN_LEASE_SECONDS} to {MAX_LEASE_SECONDS:,}"
        )


def check_blob_name(name: str) -> None:
    """Raises JobError for a name that is no plain relative path on every home.

    Segments between slashes are neither empty nor begin with a dot, so none leaves the folder.
    """
    parts = name.split("/")
    if any(not _BLOB_NAME_PART.fullmatch(part) for part in parts) or len(name) > MAX_BLOB_NAME:
        raise errors.JobError(f"{name[:80]!r} is no name for a blob: it is no plain relative path")


def check_blob_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raises UnusableFileError, with both numbers, for a file that is over a limit."""
    if max_bytes is not None and size > max_bytes:
        raise errors.UnusableFileError(
            f"{name} has {size:,} bytes; at most {max_bytes:,} are accepted"
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises JobError for what cannot travel in HTTP headers beside a blob, as on Azure it does."""
    for name, value in metadata.items():
        if not (name.isidentifier() and name.isascii() and value.isascii() and value.isprintable()):
            raise errors.JobError(
                f"the metadata {name[:80]!r} is refused: names are ASCII identifiers, values"
                " printable ASCII"
            )
