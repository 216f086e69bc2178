"""Jobs of all requests: sent together, awaited by one reader, cancelled if nobody waits for them.

However many requests wait, a look at a campaign's records is two listings and a read of what is
new; so a thousand that wait cost the storage what one does.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from gateway.clients import Client, Refused
from imagefleet import aio, cancelled, concurrency, errors
from imagefleet.job.message import Job
from imagefleet.records import outcomes, reader
from imagefleet.records.batch import Watch
from imagefleet.records.outcomes import JobFacts
from imagefleet.storage.settings import Priority
from imagefleet.submit import RETRIES
from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

#: Seconds between two looks at the records; on Azure a look is two billed listings.
_LOCAL_POLL_SECONDS, _REMOTE_POLL_SECONDS = 0.015, 0.5

#: Seconds for which a cancellation waits for others: each is a rewrite of one list.
_CANCEL_SECONDS = 0.5

#: Images of all clients that may be waited for.
_MAX_WAITING = 20_000

#: Seconds for which the age of the queue is believed, and the longest that it sends a client away.
_AGE_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 600

INTERRUPTED = "interrupted: what had begun is drawn and stored, and nothing else"


@dataclass(eq=False)
class Ticket:
    """One job of a client: on its way to the queue, then waited for."""

    client: Client
    job: Job
    sent: asyncio.Future[JobFacts] = field(default_factory=asyncio.Future)
    ended: asyncio.Future[JobFacts] = field(default_factory=asyncio.Future)
    created_at: float = field(default_factory=time.monotonic)
    is_dropped: bool = False  # nobody waits for it any more

    @property
    def id(self) -> str:
        """The job's id, which it has once it is sent."""
        return self.sent.result().id


class Desk:
    """Takes jobs, and tells what has become of them."""

    def __init__(self, fleet: aio.Fleet, wait_seconds: float) -> None:
        """*wait_seconds*: the age of the queue from which on nothing new is taken."""
        self.storage = fleet.storage
        self.wait_seconds = wait_seconds
        self._fleet = fleet
        is_local = fleet.storage.settings.is_local
        self._poll_seconds = _LOCAL_POLL_SECONDS if is_local else _REMOTE_POLL_SECONDS
        self._unsent: list[Ticket] = []
        self._tickets: dict[str, Ticket] = {}  # by the key of the job
        self._watches: dict[str, Watch] = {}  # by campaign
        self._has_unsent, self._has_dropped = asyncio.Event(), asyncio.Event()
        self._age_seconds, self._age_at = 0.0, -_AGE_SECONDS

    @property
    def tickets(self) -> list[Ticket]:
        """All that is on its way or waited for."""
        return list(dict.fromkeys([*self._unsent, *self._tickets.values()]))

    def of(self, client: Client) -> list[Ticket]:
        """The client's tickets that somebody waits for."""
        return [
            each
            for each in self.tickets
            if each.client == client and not each.is_dropped
        ]

    async def run(self) -> None:
        """Side tasks: the sender, the reader, and the one that cancels; ends if one fails."""
        await concurrency.gather(
            self._keep_sending(), self._keep_reading(), self._keep_list()
        )

    def stop(self) -> None:
        """Answers everybody who waits; their jobs go on."""
        for ticket in self.tickets:
            if not ticket.sent.done():
                _refuse(
                    ticket.sent,
                    Refused(503, "the gateway stops, and has not sent the job"),
                )
            else:
                _refuse(
                    ticket.ended,
                    Refused(
                        503,
                        "the gateway stops; the job goes on: ask for it at"
                        f" /jobs/{ticket.id} later",
                    ),
                )

    async def check(self, client: Client, images: int) -> None:
        """Raises Refused where there is no room for so many more *images*."""
        waiting = sum(ticket.job.images for ticket in self.of(client))
        everybody = sum(ticket.job.images for ticket in self.tickets)
        if images > client.max_waiting:
            raise Refused(
                400, f"{images:,} images; {client.max_waiting:,} at most in one request"
            )
        if time.monotonic() - self._age_at > _AGE_SECONDS:
            self._age_at = time.monotonic()  # meanwhile others go by the age as it was
            self._age_seconds = (
                await self.storage.queue.depth()
            ).oldest_age_seconds or 0.0
        age = self._age_seconds
        seconds = max(1, min(round(age), _LONGEST_RETRY_SECONDS))
        why = ""
        if waiting + images > client.max_waiting:
            why = f"{waiting:,} images of {client.max_waiting:,} at most are waited for already"
        elif everybody + images > _MAX_WAITING or age > self.wait_seconds:
            why = f"the queue is full: its oldest job has waited {age:,.0f} seconds"
        if why:
            raise Refused(
                429, f"{why}; try again in {seconds} s", {"Retry-After": str(seconds)}
            )

    async def send(self, client: Client, job: Job) -> Ticket:
        """Puts a job into the queue, with all that come in the same moment; raises JobError."""
        ticket = Ticket(client, job)
        self._unsent.append(ticket)
        self._has_unsent.set()
        try:
            await asyncio.shield(ticket.sent)
        except asyncio.CancelledError:
            self.drop(ticket)
            raise
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Cancels a job that has not begun: nobody waits for it any more."""
        ticket.is_dropped = True
        self._has_dropped.set()

    def interrupt(self, client: Client) -> None:
        """Cancels all that the client waits for, and answers at once."""
        for ticket in self.of(client):
            self.drop(ticket)
            if ticket.sent.done():
                _refuse(ticket.ended, Refused(409, INTERRUPTED))

    async def facts(self, campaign: str, job_id: str) -> JobFacts:
        """Looks a job up, in the storage if need be; raises JobError for an invalid id."""
        facts = JobFacts(self._fleet.job(job_id, campaign).id, campaign)
        ticket = self._tickets.get(facts.key)
        if (
            ticket is not None
            and time.monotonic() < ticket.created_at + self.wait_seconds
        ):
            return facts  # a request waits for it, and nothing has come yet
        return await outcomes.look_up(self.storage, facts)

    async def image(self, facts: JobFacts, index: int) -> bytes:
        """An image's file; raises JobError if there is none."""
        return await aio.Result(**facts.fields(), fleet=self._fleet).data(index)

    async def _keep_sending(self) -> NoReturn:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            order: dict[tuple[str, Priority], list[Ticket]] = {}
            for ticket in self._unsent:
                if ticket.is_dropped:
                    _refuse(ticket.sent, Refused(409, INTERRUPTED))
                else:
                    to = ticket.client.campaign, ticket.client.priority
                    order.setdefault(to, []).append(ticket)
            for tickets in order.values():
                await self._send(tickets)
            self._unsent = [each for each in self._unsent if not each.sent.done()]

    async def _send(self, tickets: list[Ticket]) -> None:
        campaign = tickets[0].client.campaign
        noted: Mapping[str, JobFacts] = {}
        waiting: dict[str, JobFacts] = {}

        def note(jobs: Mapping[str, JobFacts]) -> None:
            """Waits for the jobs from before they are sent, lest one ends before."""
            nonlocal noted
            noted = jobs
            self._watches[campaign] = watch
            waiting.update(jobs)
            self._tickets.update(zip(jobs, tickets, strict=True))

        try:
            known = self._watches.get(campaign)
            # From the present end of the records on, if nobody reads them yet.
            watch = known or Watch(
                self.storage, (), {campaign: await reader.end(self.storage, campaign)}
            )
            waiting = watch.waiting
            await self._fleet.submit(
                [ticket.job for ticket in tickets],
                campaign=campaign,
                priority=tickets[0].client.priority,
                before_send=note,
            )
        except errors.FleetError as error:
            for key in noted:
                self._tickets.pop(key, None)
                waiting.pop(key, None)
            if (
                isinstance(error, errors.JobError) and len(tickets) > 1
            ):  # of one of them
                for ticket in tickets:
                    await self._send([ticket])
                return
            for ticket in tickets:
                _refuse(ticket.sent, error)
            return
        for ticket, facts in zip(tickets, noted.values(), strict=True):
            ticket.sent.set_result(facts)
        self._has_dropped.set()  # some perhaps, on their way

    async def _keep_reading(self) -> NoReturn:
        while True:
            for campaign, watch in list(self._watches.items()):
                try:
                    await RETRIES.call(watch.poll)
                except errors.FleetError as error:
                    log.warning(
                        f"records of {campaign}: {error.message}",
                        action="records_unread",
                    )
                found, watch.found = watch.found, []
                for facts in found:
                    ticket = self._tickets.pop(facts.key, None)
                    if ticket is not None and not ticket.ended.done():
                        ticket.ended.set_result(facts)
                    self._has_dropped.set()  # perhaps; what has ended leaves the list
                if not watch.waiting and self._watches.get(campaign) is watch:
                    del self._watches[campaign]
            await asyncio.sleep(self._poll_seconds)

    async def _keep_list(self) -> NoReturn:
        """Keeps the storage's list of what is cancelled, in which jobs stay until they end."""
        listed: set[str] = set()
        while True:
            await self._has_dropped.wait()
            await asyncio.sleep(concurrency.jitter(_CANCEL_SECONDS))
            self._has_dropped.clear()
            known, tickets = listed, self._tickets.items()
            listed = {
                key for key, each in tickets if each.is_dropped and each.sent.done()
            }
            try:
                if listed != known:
                    await cancelled.cancel_jobs(
                        self.storage, listed - known, known - listed
                    )
            except errors.FleetError as error:  # they are drawn instead
                log.warning(
                    f"jobs not cancelled: {error.message}", action="not_cancelled"
                )


def _refuse(future: asyncio.Future[JobFacts], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen, even if nobody waits
