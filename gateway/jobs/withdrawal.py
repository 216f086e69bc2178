"""Withdraws jobs that nobody wants any more: their messages go, and their campaigns add up."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from gateway.jobs.ticket import Ticket
from imagefleet import cancelled, concurrency, errors
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record, of_job
from imagefleet.storage.open import Storage
from imagefleet.submit import RETRIES
from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

#: Seconds for which a withdrawal waits for others: each is a record, and a rewrite of one list.
_WAIT_SECONDS = 0.5

#: Messages that are taken back at once.
_AT_ONCE = 32


class Withdrawals:
    """Takes messages back that no worker has, and lists the other jobs as cancelled.

    The list is `cancelled.json`, which workers obey; a job leaves it when it has ended.
    """

    def __init__(self, storage: Storage, on_taken: Callable[[Ticket], None]) -> None:
        """*on_taken* is called for each job that has ended so."""
        self._storage = storage
        self._on_taken = on_taken
        self._records = RecordLog(storage.blobs, "gateway")
        self._allowed: set[str] = set()  # campaigns
        self._listed: set[str] = set()  # jobs by their keys
        self._new: list[Ticket] = []
        self._ended: set[str] = set()
        self._has_work = asyncio.Event()

    def add(self, ticket: Ticket) -> None:
        """Withdraws a job that was sent."""
        self._new.append(ticket)
        self._has_work.set()

    def ended(self, key: str) -> None:
        """A job has ended by its worker, withdrawn or not."""
        if key in self._listed:
            self._ended.add(key)
            self._has_work.set()

    def forget(self, key: str) -> None:
        """Looks for a job's end no longer; it stays in the list for a day."""
        self._listed.discard(key)

    async def run(self) -> NoReturn:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(concurrency.jitter(_WAIT_SECONDS))
            self._has_work.clear()
            new, self._new = self._new, []
            ended, self._ended = self._ended, set()
            try:
                await self._withdraw(new, ended)
            except errors.FleetError as error:  # they are drawn instead
                log.warning(
                    f"jobs not withdrawn: {error.message}", action="not_withdrawn"
                )

    async def _withdraw(self, new: list[Ticket], ended: set[str]) -> None:
        campaigns = {ticket.client.campaign for ticket in new}
        for campaign in campaigns - self._allowed:
            await cancelled.allow(self._storage, campaign)
            self._allowed.add(campaign)
        taken: list[Ticket] = []

        async def take_back(ticket: Ticket) -> None:
            if ticket.is_lost or await self._take_back(ticket):
                taken.append(ticket)

        await concurrency.for_each(new, take_back, _AT_ONCE)
        await self._records.add(map(self._record, taken))
        for ticket in taken:
            self._on_taken(ticket)
        in_flight = {ticket.key for ticket in new if ticket not in taken}
        if in_flight or ended:
            await cancelled.cancel_jobs(self._storage, in_flight, ended)
            self._listed |= in_flight
            self._listed -= ended

    async def _take_back(self, ticket: Ticket) -> bool:
        """Deletes a job's message; False if a worker has it, or had it."""
        message = ticket.message
        if message is None:
            return False
        models, priority = self._storage.models, ticket.client.priority
        queues = [models.of(model)[priority] for model in (ticket.job.model, None)]
        queue = next(queue for queue in queues if queue.name == message.queue)
        try:
            await RETRIES.call(lambda: queue.delete(message))
        except (errors.LeaseLost, errors.SetupError):
            return False
        return True

    def _record(self, ticket: Ticket) -> Record:
        job = ticket.job.identified(ticket.id, ticket.client.campaign)
        source = None if ticket.message is None else ticket.message.id
        return Record.model_validate(
            of_job(job)
            | {
                "outcome": "cancelled",
                "at": self._storage.blobs.clock.now(),
                "source": source,
                "reason": ticket.reason,
                "worker": "gateway",
            }
        )
