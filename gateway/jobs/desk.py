"""Jobs of all requests: sent together, awaited by one reader, withdrawn if nobody waits for them.

However many requests wait, a look at a campaign's records is two listings and a read of what is
new; so a thousand that wait cost the storage what one does, and none that waits costs nothing.
"""

import asyncio
import contextlib
import time
from asyncio import Event, Lock
from collections.abc import Collection, Iterable
from typing import NoReturn
from weakref import WeakValueDictionary

from gateway.clients import Client
from gateway.jobs import claims
from gateway.jobs.claims import Claims
from gateway.jobs.ticket import Ticket, refusal
from gateway.models import Models
from imagefleet import aio, concurrency
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import FleetError, TransientError
from imagefleet.http.refused import Refused
from imagefleet.job.message import Job, job_key
from imagefleet.records import outcomes, reader
from imagefleet.records.batch import Submission, Watch
from imagefleet.records.ledger import Ledgers
from imagefleet.records.outcomes import JobFacts
from imagefleet.storage import presence
from imagefleet.storage.protocol import StoredQueue
from imagefleet.storage.settings import Priority
from imagefleet.submit import RETRIES
from imagefleet.telemetry.logs import log
from imagefleet.withdrawal import Withdrawals

#: Seconds between two looks at the records; on Azure a look is two billed listings.
_LOCAL_POLL_SECONDS = 0.015
_REMOTE_POLL_SECONDS = 0.5

#: The first where a worker of this process says what it has ended, and each look takes from its
#: drawing: for what others have drawn.
_POLL_SECONDS_BESIDE_WORKER = 0.1

#: Seconds between two looks for what has been cancelled, or deleted, or has no worker.
_LOOK_SECONDS = 5.0

#: A look may take this share of the time.
_LOOK_SHARE = 0.05

#: Images of all clients that may be waited for.
_MAX_WAITING = 20_000

#: Seconds for which the age of a queue is believed, and the longest that it sends a client away.
_AGE_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 600

#: Images of one client that wait with its own priority while others draw as well: beyond them its
#: jobs are of low priority, so that those of the others need not wait for them.
_BURST = 4

#: Seconds after its last job for which a client is one of the others.
_ACTIVE_SECONDS = 60.0

#: A message of low priority that has waited for so long is of a batch, if none here waits.
_OTHERS_SECONDS = 30.0

_CLAIMED_AT_ONCE = 32

#: Seconds within which a worker ends a job that is interrupted; one that is gone does not.
_INTERRUPTED_SECONDS = 15.0

#: The share of the last job in the average of all.
_LEARNED = 0.2

#: Seconds after which the end of a withdrawn job is looked for no longer.
_FORGET_SECONDS = 600.0

Tickets = list[Ticket]

INTERRUPTED = "interrupted: what had begun is drawn and stored, and nothing else"


class Desk:
    """Takes jobs, and tells what has become of them."""

    def __init__(
        self,
        fleet: aio.Fleet,
        models: Models,
        *,
        wait_seconds: float,
        worker_seconds: float,
        has_worker: bool = False,
    ) -> None:
        """*wait_seconds*: the longest wait for an image, and the age of a queue that is full.

        *worker_seconds*: the longest wait for a worker while none is there. *has_worker*: one of
        this process calls `look_soon` for each job that it has ended.
        """
        self.storage = fleet.storage
        self.models = models
        self.wait_seconds = wait_seconds
        #: Seconds of a job for each of its steps, waiting included; 0 before the first.
        self.seconds_per_step = 0.0
        self._worker_seconds = worker_seconds
        self._fleet = fleet
        self._poll_seconds = _REMOTE_POLL_SECONDS
        if fleet.storage.settings.is_local:
            self._poll_seconds = (
                _POLL_SECONDS_BESIDE_WORKER if has_worker else _LOCAL_POLL_SECONDS
            )
        self._ledgers = Ledgers(fleet.storage)
        self._cancelled = CancelledCampaigns(
            fleet.storage.files, fleet.storage.queue.name
        )
        self._withdrawals = Withdrawals(fleet.storage, "gateway", self._forget)
        self._claims = Claims(fleet.storage, self._ledgers)
        self._keyed = WeakValueDictionary[str, Ticket]()  # by the key of the job
        self._unsent: Tickets = []
        self._sending: Tickets = []
        self._tickets: dict[str, Ticket] = {}  # by the key of the job
        self._watches: dict[str, Watch] = {}  # by campaign
        self._has_unsent = Event()
        self._has_waiting = Event()
        self._has_news = Event()
        self._looking = Lock()
        self._look_at = self._looked_at = 0.0  # the next thorough look, and the last
        self._ages: dict[str, tuple[float, float]] = {}  # time and age, by queue
        self._active: dict[Client, float] = {}  # time of the last job

    @property
    def tickets(self) -> Tickets:
        """All that is on its way or waited for."""
        return [ticket for ticket in self._known_tickets() if not ticket.is_dropped]

    def _known_tickets(self) -> Tickets:
        """The same with those that are being withdrawn."""
        return list(
            dict.fromkeys([*self._unsent, *self._sending, *self._tickets.values()])
        )

    def of(self, client: Client) -> Tickets:
        return [ticket for ticket in self.tickets if ticket.client == client]

    async def run(self) -> None:
        """Side tasks: the sender, the reader, and the one that withdraws; ends if one fails."""
        await concurrency.gather(
            self._keep_sending(),
            self._keep_reading(),
            self._withdrawals.run(),
            self._claims.run(),
        )

    def stop(self) -> None:
        """Answers everybody who waits; their jobs go on."""
        for ticket in self.tickets:
            ticket.is_kept = True
            why = (
                "and has not sent the job"
                if ticket.facts is None
                else f"the job goes on: ask for it at /jobs/{ticket.id} later"
            )
            ticket.refuse(refusal(f"the gateway stops; {why}"))

    async def check(self, client: Client, job: Job) -> None:
        """Raises Refused where there is no room for a *job* of the client's."""
        if job.images > client.max_waiting:
            raise Refused(
                400,
                f"{job.images:,} images; {client.max_waiting:,} at most in one request",
            )
        waiting = _images(self.of(client))
        is_recent = time.monotonic() - self._looked_at < _LOOK_SECONDS / 5
        if waiting + job.images > client.max_waiting and not is_recent:
            self._look_at = 0.0
            await self._look()
            waiting = _images(self.of(client))
        everybody = _images(self.tickets)
        age = await self._age(job.model, client.priority)
        if waiting + job.images > _BURST:
            await self._age(job.model, "low")
        why = ""
        if waiting + job.images > client.max_waiting:
            why = f"{waiting:,} images of {client.max_waiting:,} at most are waited for already"
        elif everybody + job.images > _MAX_WAITING:
            why = f"{everybody:,} images are waited for, as many as there can be"
        elif age > self.wait_seconds:
            why = f"the queue is full: its oldest job has waited {age:,.0f} seconds"
        if why:
            seconds = max(1, min(round(age), _LONGEST_RETRY_SECONDS))
            raise Refused(
                429,
                f"{why}; try again in {seconds} s",
                {"Retry-After": str(seconds)},
            )

    def known(self, client: Client, job: Job, key: str | None) -> Ticket | None:
        """The ticket of the same job, asked for by the same *key*, if somebody waits for it here.

        Raises Refused if the key was used for another job.
        """
        if key is None:
            return None
        job_id = claims.job_id(client, key)
        ticket = self._keyed.get(job_key(client.campaign, job_id))
        if ticket is None or ticket.ended.done():
            return None
        if ticket.job.digest != job.identified(job_id).digest:
            raise claims.used_for_another()
        return ticket

    def take(self, client: Client, job: Job, key: str | None) -> Ticket:
        """Puts a job into the queue soon, with all that come in the same moment.

        One with a *key* is drawn even if nobody waits: who asks for it again gets it.
        """
        priority = self._priority(client, job)
        if key is None:
            ticket = Ticket(client, job, priority)
        elif (known := self.known(client, job, key)) is not None:
            return known
        else:
            named = job.identified(claims.job_id(client, key), client.campaign)
            ticket = Ticket(client, named, priority, is_keyed=True, is_kept=True)
            self._keyed[job_key(client.campaign, named.id)] = ticket
        self._put(ticket)
        return ticket

    def _put(self, ticket: Ticket) -> None:
        self._unsent.append(ticket)
        self._has_unsent.set()

    async def wait(self, ticket: Ticket) -> JobFacts:
        """Waits for a job's end; raises Refused or a FleetError. Cancelled, it is withdrawn."""
        ticket.waiters += 1
        self._has_waiting.set()
        try:
            async with asyncio.timeout(self.wait_seconds):
                return await asyncio.shield(ticket.ended)
        except TimeoutError:
            if ticket.facts is None:
                raise refusal("the storage takes no jobs now") from None
            ticket.is_kept = True
            address = f"/jobs/{ticket.id}"
            raise Refused(
                202,
                f"the images are not drawn yet: ask for them at {address}",
                {"Location": address},
            ) from None
        finally:
            ticket.waiters -= 1
            if not (ticket.waiters or ticket.is_kept or ticket.ended.done()):
                self._withdraw(ticket, "its client hung up")

    def interrupt(self, client: Client, most: int | None) -> None:
        """Withdraws all that the client waits for, or the first, and ends it by what is drawn."""
        for ticket in self.of(client)[:most]:
            ticket.is_interrupted = True
            self._withdraw(ticket, INTERRUPTED)
            # A worker that has it may be dead.
            asyncio.get_running_loop().call_later(
                _INTERRUPTED_SECONDS, ticket.end_without_images
            )

    async def facts(self, campaign: str, job_id: str) -> JobFacts:
        """Looks a job up, in the storage if need be; raises JobError for an invalid id."""
        facts = JobFacts(self._fleet.job(job_id, campaign).id, campaign)
        ticket = self._tickets.get(facts.key)
        if ticket is not None and ticket.is_waited_for:
            return facts  # nothing has come yet
        return await outcomes.look_up(self.storage, facts)

    async def image(self, facts: JobFacts, index: int) -> bytes:
        """An image's file; raises JobError if there is none."""
        return await aio.Result(**facts.fields(), fleet=self._fleet).data(index)

    def _priority(self, client: Client, job: Job) -> Priority:
        """The client's own; low beyond a burst, unless a batch of others' waits there."""
        now = time.monotonic()
        self._active[client] = now
        is_alone = all(
            other == client or now - at > _ACTIVE_SECONDS
            for other, at in self._active.items()
        )
        known = self._known_tickets()
        # Those that are withdrawn as well: a worker may have them.
        images = _images(ticket for ticket in known if ticket.client == client)
        if is_alone or images + job.images <= _BURST:
            return client.priority
        _, age = self._ages.get(self._queue_of(job.model, "low").name, (0.0, 0.0))
        is_own = any(ticket.priority == "low" for ticket in known)
        is_others = age > _OTHERS_SECONDS and not is_own
        return client.priority if is_others else "low"

    def _queue_of(self, model: str | None, priority: Priority) -> StoredQueue:
        return self.storage.models.of(model)[priority]

    async def _age(self, model: str | None, priority: Priority) -> float:
        """Seconds that jobs of a model and a priority wait to be begun, as of some seconds ago."""
        if model not in await self.storage.models.names():
            model = None
        queue = self._queue_of(model, priority)
        at, age = self._ages.get(queue.name, (-_AGE_SECONDS, 0.0))
        if time.monotonic() - at > _AGE_SECONDS:
            # Meanwhile others go by the age as it was.
            self._ages[queue.name] = time.monotonic(), age
            age = await presence.waiting_seconds(
                self.storage, queue, await queue.depth(), self.wait_seconds
            )
            self._ages[queue.name] = time.monotonic(), age
        return age

    async def _keep_sending(self) -> NoReturn:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            self._sending = self._unsent
            self._unsent = []
            await concurrency.for_each(
                [ticket for ticket in self._sending if ticket.is_keyed],
                self._claim,
                _CLAIMED_AT_ONCE,
            )
            order: dict[tuple[str, Priority], Tickets] = {}
            for ticket in self._sending:
                if ticket.is_dropped:
                    ticket.refuse(Refused(409, INTERRUPTED))
                elif not ticket.ended.done() and not ticket.is_foreign:
                    to = ticket.client.campaign, ticket.priority
                    order.setdefault(to, []).append(ticket)
            for tickets in order.values():
                await self._send(tickets)
            self._sending = []

    async def _claim(self, ticket: Ticket) -> None:
        """Finds out who sends a job with a key; waits for one that somebody else has sent."""
        if ticket.is_dropped:
            return
        try:
            ticket.is_foreign = not await self._claims.take(ticket)
            if ticket.is_foreign:
                await self._join(ticket)
        except Exception as error:  # noqa: BLE001 - becomes the answer of its request
            ticket.refuse(error)

    async def _join(self, ticket: Ticket) -> None:
        """Waits for a job that was sent, or has ended before."""
        campaign = ticket.client.campaign
        submission = Submission(self.storage, self._ledgers)
        list(submission.messages([ticket.job], campaign, self._fleet.signer))
        ((key, facts),) = submission.jobs.items()
        watch = await self._watch(campaign)
        watch.waiting[key] = facts
        self._tickets[key] = ticket
        ticket.is_sent(facts, None)
        self._has_waiting.set()
        # After it is waited for, lest it ends in between.
        found = await outcomes.look_up(self.storage, facts)
        if found.status not in {"pending", "unknown"}:
            self._forget(key)
            ticket.end(found)

    async def _send(self, tickets: Tickets) -> None:
        """Sends jobs of one campaign and priority; an error is that of its job alone."""
        try:
            await self._submit(tickets)
        except Exception as error:  # noqa: BLE001 - becomes the answer of its request
            is_of_one = not isinstance(error, TransientError)
            if is_of_one and len(tickets) > 1:
                for ticket in tickets:
                    await self._send([ticket])
                return
            for ticket in tickets:
                ticket.refuse(error)

    async def _submit(self, tickets: Tickets) -> None:
        campaign = tickets[0].client.campaign
        priority = tickets[0].priority
        submission = Submission(self.storage, self._ledgers)
        bodies = list(
            submission.messages(
                [ticket.job for ticket in tickets], campaign, self._fleet.signer
            )
        )
        await submission.check()
        watch = await self._watch(campaign)
        # They are waited for from before they are sent, lest one ends before.
        watch.waiting.update(submission.jobs)
        self._tickets.update(zip(submission.jobs, tickets, strict=True))
        send = self.storage.models.send
        with_queues = await self.storage.models.names()
        try:
            messages = await RETRIES.call(
                lambda: send(bodies, priority, with_queues=with_queues)
            )
        except BaseException:
            for key in submission.jobs:
                self._tickets.pop(key, None)
                watch.waiting.pop(key, None)
            raise
        for ticket, facts, message in zip(
            tickets, submission.jobs.values(), messages, strict=True
        ):
            ticket.is_sent(facts, message)
            if ticket.is_dropped:  # meanwhile
                self._withdrawals.add(ticket.withdrawn())
        self._has_waiting.set()
        await submission.note_sent(len(bodies))

    async def _watch(self, campaign: str) -> Watch:
        """The reader of a campaign, which begins at the present end of the records."""
        if (known := self._watches.get(campaign)) is None:
            end = await reader.end(self.storage, campaign)
            known = self._watches[campaign] = Watch(self.storage, (), {campaign: end})
        return known

    async def _keep_reading(self) -> NoReturn:
        while True:
            while not self._is_reading:
                self._has_waiting.clear()
                await self._has_waiting.wait()
                await self._pause()
            try:
                await self._look()
            except FleetError as error:
                log.warning(
                    f"records are not read: {error.message}", action="records_unread"
                )
            await self._pause()

    def look_soon(self) -> None:
        """Ends the pause between two looks, unless each look is billed: there are new records."""
        if self.storage.settings.is_local:
            self._has_news.set()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), self._poll_seconds)
        self._has_news.clear()

    @property
    def _is_reading(self) -> bool:
        """True while somebody waits, or more records may be there already."""
        return any(ticket.is_waited_for for ticket in self._tickets.values()) or any(
            watch.is_behind for watch in self._watches.values()
        )

    async def _look(self) -> None:
        """Reads the records, and now and then looks for what they cannot tell of."""
        async with self._looking:
            if time.monotonic() < self._look_at:
                await self._read()
            else:
                await self._look_thoroughly()

    async def _look_thoroughly(self) -> None:
        began_at = time.monotonic()
        sent = [
            ticket
            for ticket in self._tickets.values()
            if ticket.sent_at and began_at - ticket.sent_at > _LOOK_SECONDS
        ]
        if sent:
            await self._end_cancelled(sent)
            await self._end_unserved(sent)
            await self._end_lost(sent)
        await self._read()
        self._give_up(began_at)
        self._looked_at = time.monotonic()
        took = self._looked_at - began_at
        self._look_at = self._looked_at + max(_LOOK_SECONDS, took / _LOOK_SHARE)

    async def _read(self) -> None:
        """Reads the campaigns' new records, and answers those whose jobs have ended."""
        for campaign, watch in list(self._watches.items()):
            await RETRIES.call(watch.poll)
            found = watch.found
            watch.found = []
            for facts in found:
                if (ticket := self._tickets.pop(facts.key, None)) is not None:
                    ticket.end(facts)
                    self._claims.ended(ticket)
                    self._learn(ticket, facts)
                self._withdrawals.ended(facts.key)
            if not watch.waiting and self._watches.get(campaign) is watch:
                del self._watches[campaign]

    def _learn(self, ticket: Ticket, facts: JobFacts) -> None:
        if facts.status == "completed" and ticket.job.steps:
            took = time.monotonic() - ticket.created_at
            seconds = took / (ticket.job.steps * ticket.job.images)
            known = self.seconds_per_step or seconds
            self.seconds_per_step = known + _LEARNED * (seconds - known)

    async def _end_cancelled(self, tickets: Collection[Ticket]) -> None:
        await self._cancelled.refresh(_LOOK_SECONDS / 2)
        for ticket in tickets:
            message = ticket.message
            if message is None or ticket.is_dropped:
                continue
            if self._cancelled.includes(
                ticket.client.campaign, message.enqueued_at, ticket.id
            ):
                self._withdraw(ticket, "it was cancelled")
                ticket.refuse(Refused(409, f"the job {ticket.id} was cancelled"))

    async def _end_unserved(self, tickets: Collection[Ticket]) -> None:
        """Ends jobs that have waited for a worker for long, if there has been none."""
        latest = time.monotonic() - self._worker_seconds
        waiting = [
            ticket
            for ticket in tickets
            if ticket.created_at < latest and ticket.is_waited_for
        ]
        for model in {ticket.job.model for ticket in waiting}:
            if not await self.models.are_unserved(model):
                continue
            serves = "" if model is None else f" that serves the model {model!r}"
            reason = f"no worker{serves} has been seen for 5 minutes"
            for ticket in waiting:
                if ticket.job.model == model:
                    self._withdraw(ticket, reason)
                    ticket.refuse(refusal(f"{reason}: try again later"))

    async def _end_lost(self, tickets: Collection[Ticket]) -> None:
        """Ends jobs that no queue holds any more, and of whose ends no record tells."""
        left = [ticket for ticket in tickets if not ticket.is_dropped]
        for _ in range(2):  # a worker may just have moved one to another queue
            if not left:
                return
            present = await presence.present_jobs(self.storage)
            if present is None:
                left = [
                    ticket
                    for ticket in left
                    if ticket.is_foreign and not await self._claims.is_noted(ticket)
                ]
            else:
                left = [ticket for ticket in left if ticket.key not in present]
        await self._read()  # whose records came before their messages went
        for ticket in left:
            if self._tickets.get(ticket.key) is not ticket:
                continue
            if ticket.is_foreign:
                # Another gateway has claimed it, and then died.
                del self._tickets[ticket.key]
                self._put(ticket)
                continue
            reason = "its message was deleted from the queue"
            ticket.is_lost = True
            self._withdraw(ticket, reason)
            ticket.refuse(Refused(409, f"the job {ticket.id} is gone: {reason}"))

    def _give_up(self, now: float) -> None:
        """Forgets jobs that nobody waits for, and whose ends have not come in all this time."""
        for ticket in list(self._tickets.values()):
            longest = _FORGET_SECONDS if ticket.is_dropped else 2 * self.wait_seconds
            age = now - ticket.created_at
            if age > longest and not ticket.is_waited_for and ticket.sent_at:
                ticket.is_keyed = False  # its claim stays
                self._forget(ticket.key)
                self._withdrawals.forget(ticket.key)

    def _withdraw(self, ticket: Ticket, reason: str) -> None:
        if ticket.is_dropped:
            return
        ticket.is_dropped = True
        ticket.reason = reason
        if ticket.sent_at:
            self._withdrawals.add(ticket.withdrawn())

    def _forget(self, key: str) -> None:
        """Waits no longer for a job that was sent."""
        if (ticket := self._tickets.pop(key, None)) is None:
            return
        self._claims.ended(ticket)
        if ticket.is_dropped:
            ticket.end_without_images()
        watch = self._watches.get(ticket.client.campaign)
        if watch is not None:
            watch.waiting.pop(key, None)


def _images(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.job.images for ticket in tickets)
