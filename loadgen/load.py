"""One load: a source, and the queue that it fills with the jobs that the ledger does not know."""

import dataclasses
import itertools
import secrets
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass

from imagefleet import concurrency, errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.message import job_key
from imagefleet.records.ledger import Ledgers, job_of
from imagefleet.storage import enqueue
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import Priority
from imagefleet.submit import BulkSender, Progress, keep_noting
from loadgen.campaigns import FileJobs, LoadedCampaigns, Sample, jobs_of, shown
from loadgen.caption_sweep import SweepSource
from loadgen.file_source import FileSource
from loadgen.settings import LoadSettings
from loadgen.sources import Source

#: Ids of changed jobs that are named.
_NAMED = 3

#: Changed jobs that are replaced together.
_REPLACED_AT_ONCE = 32

#: Called with the storage, the messages that take the place of others, and by name *only_check*.
Replace = Callable[..., Awaitable[None]]


class Refusals:
    """Counts requests that the storage was too busy for; they are made again, more slowly."""

    def __init__(self) -> None:
        self.count = 0
        self.policy = dataclasses.replace(concurrency.PATIENT, on_retry=self._note)

    def _note(self, error: errors.TransientError) -> None:
        self.count += isinstance(error, errors.BusyError)
        concurrency.log_retry(error)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one load. *confirmed* counts positions of the source."""

    storage: str
    queue: str
    """The queue of jobs without a model."""
    queues: Mapping[str, int]
    """Messages that were sent, by their queue: that of their job's model."""
    sent: int
    new: int
    changed: int
    as_before: int
    """Jobs that were sent before; they are sent again with `--restart` alone."""
    confirmed: int
    total: int
    finished: bool
    seconds: float
    jobs_per_second: float
    second_drawings: int
    """Messages in addition to the jobs (`--verify-share`)."""
    cancelled: Mapping[str, int]
    """Jobs that were not sent, by campaign: it was cancelled during the load."""
    refusals: int
    """Number of times that the storage has asked to slow down."""


class Load:
    """Fills a job queue with a source's jobs, but for those that were sent before."""

    def __init__(
        self,
        storage: Storage,
        source: Source | SweepSource,
        settings: LoadSettings,
        *,
        restart: bool = False,
        new_only: bool = False,
        replace: Replace | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
        priority: Priority = "normal",
        models: Collection[str] = (),
        refusals: Refusals | None = None,
    ) -> None:
        """*on_notice*: called with notices. *models*: those that workers have from elsewhere.

        *restart* sends all jobs, also those that were sent before. Jobs that were sent with another
        content are refused; *new_only* leaves them out, and *replace* sends them.
        """
        self._storage = storage
        self._queue = storage.queues[priority]
        self._source = source
        self._on_notice = on_notice
        self._replace, self._new_only = replace, new_only
        self._restart = restart
        self._jobs: FileJobs | None = None
        self._replaced = 0
        self._is_compared = False
        self._unreadable: list[str] = []
        self._is_said = False
        self._cancelled = CancelledCampaigns(
            storage.files, storage.queue.name, self._unreadable.append
        )
        self._ledgers = Ledgers(storage)
        self._campaigns = LoadedCampaigns(
            self._cancelled,
            self._ledgers,
            on_notice,
            only=getattr(source, "campaign", None),
            total=source.count,
            sends_again=restart,
            skips_changed=new_only,
        )
        self.refusals = refusals or Refusals()
        signer = settings.keys().signer(storage.scope)
        sample = Sample(settings.second_drawings, secrets.token_hex(16), signer)
        self._to = enqueue.JobSender(storage, priority, elsewhere=models)
        batches, jobs = settings.batches
        self._sender = BulkSender(
            self._to.send,
            source.bodies(),
            concurrency=batches,
            batch=jobs,
            rate=settings.rate,
            choose=self._campaigns.choose,
            second_drawing=sample.second_drawing,
        )

    def check(self) -> None:
        """Raises SetupError for invalid jobs, with their places; slow for a long file."""
        if isinstance(self._source, FileSource):
            self._jobs = jobs_of(self._source)
        else:
            self._source.check()

    def stop(self) -> None:
        self._sender.stop()

    async def run(self, on_confirmed: Callable[[int], None]) -> Summary:
        """Sends what is left, or raises FleetError; *on_confirmed* gets the positions stored."""
        began = time.monotonic()
        progress = Progress(0, 0, finished=True)
        try:
            if self._source.count:
                progress = await self._send(on_confirmed)
        finally:
            await self._campaigns.note()
        seconds = time.monotonic() - began
        found = self._campaigns.counts
        found.update(changed=self._replaced, as_before=-self._replaced)
        if not self._is_compared and (found["changed"] or found["as_before"]):
            self._on_notice(shown(found))
        return Summary(
            storage=self._storage.url,
            queue=self._queue.name,
            queues=dict(
                sorted(self._to.sent_to.items(), key=lambda each: (-each[1], each[0]))
            ),
            sent=progress.sent + self._replaced,
            new=found["new"],
            changed=found["changed"],
            as_before=found["as_before"],
            confirmed=progress.confirmed,
            total=self._source.count,
            finished=progress.finished,
            seconds=round(seconds, 3),
            jobs_per_second=round(progress.sent / max(seconds, 1e-6), 1),
            second_drawings=progress.second_drawings,
            cancelled=dict(self._campaigns.left_out),
            refusals=self.refusals.count,
        )

    async def _send(self, on_confirmed: Callable[[int], None]) -> Progress:
        changed: list[int] = []
        sent_before = await self._compare(changed)
        try:
            await self._queue.check()
        except errors.SetupError as error:
            if sent_before and not self._restart:
                raise errors.SetupError(
                    f"some of these jobs were sent before, but {error.message}; --restart sends"
                    " all of them"
                ) from None
        await self._storage.create()
        await self._cancelled.refresh()
        if changed and not self._new_only:
            await self._replace_changed(changed)
        self._jobs = None

        def confirm(progress: Progress) -> None:
            self._campaigns.confirm(progress.confirmed)
            # Not before something is sent: what cannot be sent has an error of its own.
            if self._unreadable and not self._is_said:
                self._is_said = True
                self._on_notice(
                    f"cancelled campaigns are not noticed: {self._unreadable[0]}"
                )
            self._unreadable.clear()
            on_confirmed(progress.confirmed)

        await self._campaigns.begin()
        watching = self._cancelled.watch()
        async with concurrency.beside(watching, keep_noting(self._campaigns.note)):
            return await self._sender.run(confirm)

    async def _compare(self, changed: list[int]) -> bool:
        """Tells what was sent before; *changed* gets the positions of jobs that differ from it."""
        try:
            if self._jobs is None:
                campaign = getattr(self._source, "campaign", None)
                return bool(campaign and not await self._ledgers.of(campaign).is_new())
            found = await self._jobs.compared(self._ledgers, changed)
        except errors.SetupError:
            return False  # which is said where they are noted
        self._is_compared = True
        if found["changed"] or found["as_before"]:
            self._on_notice(shown(found))
        return found["changed"] > 0 or found["as_before"] > self._jobs.again

    async def _replace_changed(self, changed: list[int]) -> None:
        """Replaces the jobs at these positions, or raises SetupError."""
        if self._replace is None:
            first = itertools.islice(self._at(changed), _NAMED)
            named = [job_key(*job_of(body)[:2]) for body in first]
            more = ", ..." if len(changed) > _NAMED else ""
            were = "was" if len(changed) == 1 else "were"
            raise errors.SetupError(
                f"{len(changed):,} of the jobs {were} sent before with another content:"
                f" {', '.join(named)}{more}; nothing was sent. Give them other ids; or send only"
                " the others with --new-only, or have these drawn again with --replace"
            )
        for only_check in (True, False):
            left = self._at(changed)
            while bodies := list(itertools.islice(left, _REPLACED_AT_ONCE)):
                await self._replace(self._storage, bodies, only_check=only_check)
                if not only_check:
                    for job in map(job_of, bodies):
                        self._ledgers.of(job.campaign).pending += job.entry
                    await self._ledgers.note()
                    self._replaced += len(bodies)

    def _at(self, positions: Sequence[int]) -> Iterator[str]:
        """The messages at these positions, which are in order: what follows is not read."""
        wanted = frozenset(positions)
        bodies = itertools.islice(self._source.bodies(), positions[-1] + 1)
        for position, body in enumerate(bodies):
            if position in wanted and body is not None:
                yield body
