"""The two protocols of storage, a job queue and a blob store, that every implementation keeps.

They follow Azure Queue Storage, the narrower of the two homes: a lease (visibility timeout) has a
receipt that each renewal replaces, deliveries are counted, a message holds 64 KiB, and an empty
queue answers at once. `tests/jobs/test_storage_contract.py` is the contract, run on each home.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self
from xml.sax.saxutils import escape

from jobs import errors

#: Azure's limit, counted on the text as it travels (XML-escaped UTF-8).
MAX_MESSAGE_BYTES = 65_536

#: Azure hands out no more than this in one call.
MAX_RECEIVE = 32

#: Azure's limits of a lease.
MIN_LEASE_SECONDS = 1
MAX_LEASE_SECONDS = 7 * 24 * 3600


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

    async def send(self, bodies: Iterable[str]) -> None:
        """Adds messages that never expire; when it returns, they are stored.

        After an error, some of them may be stored: senders give jobs ids, so twice is harmless.

        Raises:
            JobError: a body is over 64 KiB; none of them was sent.
        """

    async def receive(self, max_messages: int, lease_seconds: float) -> list[LeasedMessage]:
        """Leases up to *max_messages* (32 at most); an empty queue answers [] at once."""

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
        """Reads what is visible without keeping it from others for longer than the reading."""

    async def depth(self) -> QueueDepth: ...


class BlobStore(Protocol):
    """Named bytes, written once. Every method raises TransientError on a fault that may pass."""

    async def create(
        self, name: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> bool:
        """Writes a blob unless the name is taken; tells whether it was written (If-None-Match)."""

    async def read(self, name: str) -> bytes | None:
        """A blob's bytes, or None where there is none of that name."""

    def names(self, prefix: str = "") -> AsyncIterator[str]: ...


class Storage(Protocol):
    """One home of jobs and images: the job queue, its poison queue and the blobs."""

    @property
    def url(self) -> str:
        """The home's address, fit for a terminal: without any secret."""

    @property
    def queue(self) -> JobQueue: ...

    @property
    def poison(self) -> JobQueue: ...

    @property
    def blobs(self) -> BlobStore: ...

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
    return len(escape(body).encode())


def check_message_size(body: str) -> None:
    """Raises JobError for a body that is over what one message holds."""
    size = message_bytes(body)
    if size > MAX_MESSAGE_BYTES:
        raise errors.JobError(
            f"the message has {size:,} bytes; a queue message holds {MAX_MESSAGE_BYTES:,}"
        )
