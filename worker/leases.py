"""One keeper renews every lease, from the pull to the acknowledgement.

Each renewal replaces a message's receipt, so renewing, releasing and deleting one message share a
lock: a delete with the previous receipt would fail.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from imagefleet.errors import LeaseLost, TransientError
from imagefleet.storage.deliveries import Deliveries
from imagefleet.storage.protocol import JobQueue, LeasedMessage
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import log

#: Renewals in flight: after a large pull a hundred leases are due together.
CONCURRENT_RENEWALS = 16

#: A renewal is tried this many times before its lease runs out.
TRIES_PER_LEASE = 10

RenewalResult = Literal["renewed", "unknown", "lost"]


@dataclass(eq=False)
class Lease:
    """One leased message: its latest receipt and what is known about the lease."""

    message: LeasedMessage
    expires_at: float  # on this machine's monotonic clock
    is_lost: bool = False  # not where a renewal's reply was: the next one tells
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check(self) -> None:
        """Raises LeaseLost if another worker may have the message."""
        if self.is_lost:
            raise LeaseLost(f"the lease on message {self.message.id} is lost")


@dataclass(eq=False)
class LeaseKeeper:
    """Renews leases at half their time; its end must stop the worker."""

    queue: JobQueue
    lease_seconds: float
    on_renewal: Callable[[RenewalResult], None] = lambda _: None

    def __post_init__(self) -> None:
        self._leases: dict[Lease, None] = {}  # in their order, unlike a set's
        self._slots = asyncio.Semaphore(CONCURRENT_RENEWALS)
        self._warning = logs.Occasion()

    def hold(self, message: LeasedMessage, leased_at: float) -> Lease:
        """Keeps a message leased by a call that began at *leased_at* (monotonic seconds)."""
        lease = Lease(message, leased_at + self.lease_seconds)
        self._leases[lease] = None
        return lease

    async def run(self) -> None:
        """Renews forever; raises what is neither transient nor a lost lease."""
        pause_seconds = self.lease_seconds / 2 / TRIES_PER_LEASE
        while True:
            half_way = time.monotonic() + self.lease_seconds / 2
            due = [lease for lease in self._leases if lease.expires_at <= half_way]
            due.sort(key=lambda lease: lease.expires_at)
            await asyncio.gather(*(self._renew(lease) for lease in due))
            await asyncio.sleep(pause_seconds)

    async def acknowledge(self, lease: Lease) -> None:
        """Deletes the message; raises LeaseLost or TransientError, as the next two do."""
        async with lease.lock:
            lease.check()
            await self._end(lease, self.queue.delete(lease.message))

    async def rewrite(self, lease: Lease, body: str) -> None:
        """Renews the lease and replaces the message's text."""
        async with lease.lock:
            lease.check()
            await self._extend(lease, body)

    async def release(
        self, lease: Lease, delay_seconds: float = 0, *, failed: bool = False
    ) -> None:
        """Hands the message back, with the record of this delivery, for after *delay_seconds*."""
        async with lease.lock:
            lease.check()
            deliveries = Deliveries.of(lease.message).ended(failed=failed)
            body = deliveries.write_to(lease.message.body)
            await self._end(
                lease, self.queue.release(lease.message, delay_seconds, body)
            )

    def drop(self, lease: Lease) -> None:
        """Forgets a lease, which expires by itself."""
        self._leases.pop(lease, None)

    async def _end(self, lease: Lease, call: Awaitable[None]) -> None:
        try:
            await call
        except LeaseLost:
            self._mark_lost(lease)
            raise
        self.drop(lease)

    async def _renew(self, lease: Lease) -> None:
        async with lease.lock, self._slots:
            if lease not in self._leases:  # it has ended, or is lost
                return
            try:
                await self._extend(lease)
            except LeaseLost:
                self.on_renewal("lost")
            except TransientError as error:
                # Neither held nor lost: the reply may have been lost after the renewal.
                self.on_renewal("unknown")
                if self._warning.is_due():
                    log.warning(
                        f"leases cannot be renewed, retrying: {error}",
                        action="lease_unknown",
                        in_flight=len(self._leases),
                    )
            else:
                self.on_renewal("renewed")

    async def _extend(self, lease: Lease, body: str | None = None) -> None:
        asked_at = time.monotonic()
        try:
            lease.message = await self.queue.renew(
                lease.message, self.lease_seconds, body
            )
        except LeaseLost:
            self._mark_lost(lease)
            raise
        lease.expires_at = asked_at + self.lease_seconds

    def _mark_lost(self, lease: Lease) -> None:
        lease.is_lost = True
        self.drop(lease)
        log.warning(
            f"the lease on message {lease.message.id} is lost",
            action="lease_lost",
            message_id=lease.message.id,
        )
