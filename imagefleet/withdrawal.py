"""Withdraws jobs that nobody wants any more: their messages go, and their campaigns add up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from imagefleet import cancelled, concurrency
from imagefleet.errors import FleetError, LeaseLost, SetupError
from imagefleet.job.message import Job, job_key
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record, of_job
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.storage.settings import Priority
from imagefleet.submit import RETRIES
from imagefleet.telemetry.logs import log

#: Seconds for which a withdrawal waits for others: each is a record, and a rewrite of one list.
_WAIT_SECONDS = 0.5

#: Messages that are taken back at once.
_AT_ONCE = 32


@dataclass(frozen=True, slots=True, eq=False)
class SentJob:
    """A job that was sent, and how."""

    #: The job with its id and campaign.
    job: Job
    priority: Priority
    #: Its message as it was sent; None if somebody else has sent it.
    message: LeasedMessage | None
    #: Why it is withdrawn.
    reason: str
    #: No queue holds it any more, and no record tells of its end.
    is_lost: bool = False

    @property
    def key(self) -> str:
        return job_key(self.job.campaign, self.job.id)


class Withdrawals:
    """Takes messages back that no worker has, and lists the other jobs as cancelled.

    The list is `cancelled.json`, which workers obey; a job leaves it when it has ended.
    """

    def __init__(
        self, storage: Storage, writer: str, on_taken: Callable[[str], None]
    ) -> None:
        """*on_taken* is called with the key of each job that has ended so; *writer*: its name."""
        self._storage = storage
        self._writer = writer
        self._on_taken = on_taken
        self._records = RecordLog(storage.blobs, writer)
        self._allowed: set[str] = set()  # campaigns
        self._listed: set[str] = set()  # jobs by their keys
        self._new: list[SentJob] = []
        self._ended: set[str] = set()
        self._has_work = asyncio.Event()

    def add(self, job: SentJob) -> None:
        self._new.append(job)
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
            new = self._new
            self._new = []
            ended = self._ended
            self._ended = set()
            try:
                await self._withdraw(new, ended)
            except FleetError as error:  # they are drawn instead
                log.warning(
                    f"jobs not withdrawn: {error.message}", action="not_withdrawn"
                )

    async def _withdraw(self, new: list[SentJob], ended: set[str]) -> None:
        for campaign in {str(sent.job.campaign) for sent in new} - self._allowed:
            await cancelled.allow(self._storage, campaign)
            self._allowed.add(campaign)
        taken = []

        async def take_back(sent: SentJob) -> None:
            if sent.is_lost or await self._take_back(sent):
                taken.append(sent)

        await concurrency.for_each(new, take_back, _AT_ONCE)
        await self._records.add(map(self._record, taken))
        for sent in taken:
            self._on_taken(sent.key)
        in_flight = {sent.key for sent in new if sent not in taken}
        if in_flight or ended:
            await cancelled.cancel_jobs(self._storage, in_flight, ended)
            self._listed |= in_flight
            self._listed -= ended

    async def _take_back(self, sent: SentJob) -> bool:
        """Deletes a job's message; False if a worker has it, or had it."""
        message = sent.message
        if message is None:
            return False
        queues = [
            self._storage.models.of(model)[sent.priority]
            for model in (sent.job.model, None)
        ]
        queue = next(queue for queue in queues if queue.name == message.queue)
        try:
            await RETRIES.call(lambda: queue.delete(message))
        except (LeaseLost, SetupError):
            return False
        return True

    def _record(self, sent: SentJob) -> Record:
        return Record.model_validate(
            of_job(sent.job)
            | {
                "outcome": "cancelled",
                "at": self._storage.blobs.clock.now(),
                "source": sent.message and sent.message.id,
                "reason": sent.reason,
                "worker": self._writer,
            }
        )
