"""Requests that are drawn once, however often they are sent: by the key that a client gives each.

The job's id follows from the key, so that every gateway finds it. Whoever creates the claim, a blob
of that name, sends the job; the others wait for it. A claim goes when its job has ended.
"""

import hashlib
from asyncio import Queue
from typing import NoReturn

from gateway.clients import Client
from gateway.jobs.ticket import Ticket
from imagefleet import concurrency
from imagefleet.errors import FleetError
from imagefleet.http.refused import Refused
from imagefleet.records.ledger import Ledgers, entry_of
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import log

#: The folder of claims, beside the images.
FOLDER = "-requests/"

#: Claims of ended jobs that are deleted at once.
_AT_ONCE = 32


def job_id(client: Client, key: str) -> str:
    """The id of the job that a client asks for by a key of its own."""
    named = f"{client.sha256}/{key}".encode(errors="replace")
    return f"once-{hashlib.sha256(named).hexdigest()[:32]}"


def used_for_another() -> Refused:
    """The answer to a key that another job has."""
    return Refused(422, "Idempotency-Key: it was sent before with another request")


class Claims:
    """Claims of one gateway's tickets, each of a job with a key."""

    def __init__(self, storage: Storage, ledgers: Ledgers) -> None:
        self._storage = storage
        self._ledgers = ledgers
        self._ended: Queue[Ticket] = Queue()

    async def take(self, ticket: Ticket) -> bool:
        """True if this gateway is to send the job; False: it was sent, or will be.

        Raises Refused if the key was used for another job.
        """
        blobs = self._storage.blobs
        digest = ticket.job.digest
        name = self._name(ticket, ticket.attempts)
        ticket.attempts += 1
        if await blobs.create(name, digest.encode(), "text/plain", {}):
            drawn = await blobs.record(ticket.job.blob_name(0))
            if drawn is None:
                return True
            known = drawn.metadata.get("digest", digest)
            if known != digest:
                await blobs.delete(name)
        else:
            known = (await blobs.read(name) or digest.encode()).decode()
        if known != digest:
            raise used_for_another()
        return False

    async def is_noted(self, ticket: Ticket) -> bool:
        """True if somebody has noted that the job is in the queue."""
        ledger = self._ledgers.of(ticket.client.campaign)
        await ledger.read()
        return ledger.compare(self._entry(ticket)) != "new"

    def ended(self, ticket: Ticket) -> None:
        """The job has ended: its claim goes."""
        if ticket.is_keyed:
            self._ended.put_nowait(ticket)

    async def run(self) -> NoReturn:
        while True:
            ended = [await self._ended.get()]
            while len(ended) < _AT_ONCE and not self._ended.empty():
                ended.append(self._ended.get_nowait())
            try:
                await concurrency.for_each(ended, self._settle, _AT_ONCE)
            except FleetError as error:
                log.warning(f"claims stay: {error.message}", action="claims_stay")

    async def _settle(self, ticket: Ticket) -> None:
        if ticket.message is None and not await self.is_noted(ticket):
            # The gateway that has sent it died before it could note that.
            ledger = self._ledgers.of(ticket.client.campaign)
            ledger.pending += self._entry(ticket)
            await ledger.note()
        for attempt in range(ticket.attempts):
            await self._storage.blobs.delete(self._name(ticket, attempt))

    def _entry(self, ticket: Ticket) -> bytes:
        return entry_of(str(ticket.job.id), ticket.job.digest)

    def _name(self, ticket: Ticket, attempt: int) -> str:
        return f"{FOLDER}{ticket.client.campaign}/{ticket.job.id}/{attempt}"
