"""Jobs in flight and how each ends: the class of an error decides, and no job ends twice."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from imagefleet import concurrency
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import (
    FleetError,
    JobCancelled,
    JobError,
    LeaseLost,
    NodeError,
    SetupError,
    TransientError,
    UnsettledFileError,
)
from imagefleet.files import safetensors
from imagefleet.records.log import RecordLog
from imagefleet.records.record import MAX_NAME_CHARACTERS, Record, of_job
from imagefleet.records.record import Outcome as RecordOutcome
from imagefleet.storage import dead_letter
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.deliveries import without_deliveries
from imagefleet.storage.open import Storage
from imagefleet.storage.routing.models import named
from imagefleet.storage.settings import priority_of
from imagefleet.validation import JSONDict
from worker.jobs import chains, stored
from worker.jobs.bundles import FAULTS, NOT_MOVED_SECONDS, BundleStage, Call, Fault
from worker.jobs.in_flight import InFlightImage, InFlightJob
from worker.leases import LeaseKeeper
from worker.metrics import CostMeter, Outcome, WorkerMetrics
from worker.settings import WorkerSettings
from worker.stages import record as recording
from worker.stages.record import RecordStage

#: The pause before a failed job's next attempt, doubled with each.
FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 120.0


@dataclass(eq=False)
class Settler:
    """Ends jobs, each once, and keeps the set of those in flight."""

    storage: Storage
    keeper: LeaseKeeper
    metrics: WorkerMetrics
    cost: CostMeter
    settings: WorkerSettings
    retry_policy: concurrency.RetryPolicy
    on_settled: Callable[[InFlightJob, Outcome], None]
    cancelled_campaigns: CancelledCampaigns
    #: Stores what is kept of a job whose images are judged.
    on_judged: Callable[[InFlightJob], Awaitable[None]] = field(init=False)
    pending: RecordStage = field(init=False)
    bundles: BundleStage = field(init=False)
    #: The model whose jobs are in flight.
    model_name: str = ""
    in_flight: dict[InFlightJob, None] = field(default_factory=dict)  # in order
    nothing_in_flight: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.nothing_in_flight.set()
        self.pending = RecordStage(
            RecordLog(self.storage.blobs, self.settings.name, self.retry_policy),
            self.metrics,
            recording.flush_seconds(
                self.settings.lease_seconds, is_local=self.settings.is_local
            ),
            self.in_flight,
            self.storage,
        )
        self.bundles = BundleStage(
            self.storage,
            self.keeper,
            self.metrics,
            self.cost,
            self.settings.name,
            self.retry_policy,
            self.pending,
            self._ended,
        )

    def add(self, entry: InFlightJob) -> None:
        self.in_flight[entry] = None
        self.nothing_in_flight.clear()

    async def attempt(
        self,
        entry: InFlightJob,
        work: Callable[[], Awaitable[None]],
        image: InFlightImage | None = None,
    ) -> None:
        """Awaits *work* unless the job is settled; an error, a lost lease's too, ends the job.

        An error of work on an *image*, which the GPU has generated, ends only that one at first.
        NodeError and SetupError, which are not the job's, are raised.
        """
        if not entry.settled:
            try:
                entry.lease.check()
                await work()
            except Exception as error:  # noqa: BLE001 - `failed` tells them apart by class
                if image is not None:
                    self.cost.lost("failed")
                await self.failed(entry, error, image)
            else:
                return
        elif image is not None:
            self.cost.lost("failed")
        if image is not None and not image.index:
            await entry.first_ended()

    def record(
        self, entry: InFlightJob, outcome: RecordOutcome, **facts: Any
    ) -> Record:
        """The record of an image, or of a job that ended without; *facts* besides its own."""
        message = entry.lease.message
        known: JSONDict = {"id": message.id} if entry.job is None else of_job(entry.job)
        if entry.job is not None and outcome != "completed":
            known["digest"] = entry.job.digest
        known |= {
            "outcome": outcome,
            "at": self.storage.blobs.clock.now(),
            "source": entry.source,
            "attempts": message.delivery_count,
            "worker": self.settings.name[:MAX_NAME_CHARACTERS],
        }
        return Record.model_validate(known | self.cost.record | facts)

    async def less_to_store(self, entry: InFlightJob, images: int) -> None:
        """Counts images of a job as stored, failed or dropped; ends the job after the last one."""
        entry.images_to_store -= images
        if not entry.images_to_store:
            await self.images_ended(entry)

    async def images_ended(self, entry: InFlightJob) -> None:
        """Notes that no image of a job is in the making, and that no more are begun here."""
        if entry.settled:
            return
        entry.has_ended = True
        if entry.is_cancelled:
            await self.cancelled(entry)
        elif entry.failures:
            await self._fail(entry, [*entry.failures.values()])
        elif entry.judged:
            await self.on_judged(entry)
        elif not entry.is_all_stored:  # some are left to its next delivery
            await self.hand_back(entry)
        elif not entry.has_next_stage:
            await self._completed(entry)
        else:
            await self._go_on(entry)

    async def look_up(self, entry: InFlightJob) -> None:
        """Notes which images of a job earlier deliveries have stored, and that they need records.

        Raises NameTakenError if another job's image has the name of one.
        """
        job = entry.job
        if job is None or not (entry.is_redelivered or job.stage > 1):
            return  # a stage may have been sent twice
        if entry.bundle is not None:
            await self.bundles.look_up(entry)
            return
        unknown = sorted({*range(job.images_to_draw)} - entry.stored)
        look = partial(
            stored.find_stored, self.storage.blobs, job, entry.source, unknown
        )
        found, taken = await self.retry_policy.call(look)
        entry.again += found
        entry.stored.update(each.index for each in found)
        if taken is not None:
            raise taken

    async def _completed(self, entry: InFlightJob) -> None:
        """Every image is stored: acknowledges the message once the records are."""
        if entry.bundle is not None:
            if entry.settle():
                await self.bundles.ended(entry, "completed")
            return

        async def finish(error: TransientError | None) -> None:
            if not entry.settle():
                return
            outcome: Outcome = "completed" if entry.images_written else "duplicate"
            if entry.is_second_drawing:
                outcome = "verified"
            await self._end(entry, outcome, error)

        entry.mark_completed()
        await self.pending.put(entry, finish)

    async def _go_on(self, entry: InFlightJob) -> None:
        """Sends the next stage of a job whose image is stored; its records may still wait."""
        send = partial(
            chains.send_next, self.storage.models, entry, self.cancelled_campaigns
        )
        try:
            await self.retry_policy.call(send)
        except JobCancelled:
            await self.cancelled(entry)
        except FleetError as error:
            # Unless it was handed back meanwhile, and its next worker sends it.
            if entry.settle():
                await self._not_sent(entry, error)
        else:
            await self._completed(entry)

    async def _not_sent(
        self,
        entry: InFlightJob,
        error: FleetError,
        why: str = "is drawn, but its next stage cannot be sent; it",
    ) -> None:
        """A job, or its next stage, could not be sent: it comes again, here or elsewhere."""
        if isinstance(error, FAULTS):
            await self._end(entry, "lost", error)
            return
        entry.log(
            logging.WARNING,
            f"{why} stays in the queue {entry.lease.message.queue}: {error.message}",
            "job_not_moved",
        )
        await self._release(entry, NOT_MOVED_SECONDS)

    async def cancelled(self, entry: InFlightJob) -> None:
        """Acknowledges a job of a cancelled campaign; what was begun is stored."""
        if entry.is_second_drawing:
            await self.unverified(entry, "its campaign was cancelled")
        elif entry.settle():
            record = self.record(entry, "cancelled")
            await self._end_without_image(entry, "cancelled", record)

    async def dropped(self, entry: InFlightJob, **facts: Any) -> None:
        """Acknowledges a job that keeps no image; its record has its message, to draw it again."""
        if entry.settle():
            body = dead_letter.replayable(entry.message, entry.job)
            record = self.record(entry, "dropped", body=body, **facts)
            await self._end_without_image(entry, "dropped", record)

    async def _end_without_image(
        self, entry: InFlightJob, outcome: Outcome, record: Record, *failed: FailedJob
    ) -> None:
        """Ends a job behind its record: a replay deletes messages that no record calls failed."""
        if await self.bundles.ended(entry, outcome, record):
            return
        finish = partial(self._end, entry, outcome, failed=failed)
        await self.pending.put(entry, finish, record)

    async def failed(
        self, entry: InFlightJob, error: Exception, image: InFlightImage | None = None
    ) -> None:
        """An *image* of a job, or the job itself, failed; an *error* not of the job is raised."""
        if isinstance(error, (NodeError, SetupError)):
            raise error
        if isinstance(error, JobCancelled):
            await self.cancelled(entry)
            return
        if entry.settled:
            return
        if isinstance(error, LeaseLost):
            entry.settle()
            await self._lose(entry, error)
            return
        if not isinstance(error, FleetError):
            # A bug of ours is retried: it could end all workers.
            entry.log(logging.ERROR, "hit a bug", "job_defect", exc_info=error)
            error = TransientError(f"{type(error).__name__}: {error}")
        # At its end no image is left that could be awaited; a judgement needs all of them.
        if image is None or entry.has_ended or (image.job.keep and not entry.kept):
            await self._fail(entry, [error])
            return
        entry.image_failed(image.index, error)
        await self.less_to_store(entry, 1)

    async def _fail(self, entry: InFlightJob, failures: list[FleetError]) -> None:
        """Ends a job as one of its failures says: one that another attempt cannot mend, if any."""
        error = next(
            (each for each in failures if isinstance(each, JobError)),
            failures[0],
        )
        attempts = entry.deliveries.failed + 1
        waits = isinstance(error, UnsettledFileError)
        is_final = isinstance(error, JobError) or (
            attempts >= self.settings.max_attempts and not waits
        )
        if is_final and entry.is_second_drawing:
            # Not a failed job: whoever waits for the job must not be told that it failed.
            await self.unverified(entry, error.message)
        elif not entry.settle():
            return
        elif is_final:
            await self._dead_letter(entry, error)
        elif waits:
            # No attempt of the job's.
            entry.log(logging.INFO, f"waits: {error}", "job_waits_for_file")
            await self._release(entry, safetensors.REST_SECONDS)
        else:
            delay_seconds = concurrency.backoff(
                attempts - 1, FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
            )
            entry.log(
                logging.WARNING,
                f"failed, attempt {attempts} of {self.settings.max_attempts}, retrying in"
                f" {delay_seconds:.0f} s: {error}",
                "job_retried",
                error=type(error).__name__,
            )
            await self._release(entry, delay_seconds, failed=True)

    async def hand_back(self, entry: InFlightJob, delay_seconds: float = 0) -> None:
        """Leaves a job that was not finished in time to another worker, by default at once.

        That one draws the images that are not stored yet, and writes the records of the others.
        """
        if entry.settle():
            await self._release(entry, delay_seconds)

    async def move(self, entry: InFlightJob) -> None:
        """Another model's job: sends it to the queue of its model, where it waits for a worker.

        What a crash between the two leaves in both queues is drawn once, by its id.
        """
        if entry.job is None or not entry.settle():
            return
        message = entry.lease.message
        model = entry.job.model
        own = self.storage.models.of(model)[priority_of(message.queue)]
        if own.name == message.queue:
            await self._release(entry)
            return
        if await self.bundles.ended(entry, "moved"):
            return
        # Sent again it is younger; but who cancels its campaign waits as long as this worker may
        # not know of it.
        body = named(without_deliveries(message.body), entry.id)
        try:
            await self.bundles.move(entry.lease, body)
        except FleetError as error:
            await self._not_sent(entry, error, "asks for another model and")
        else:
            entry.log(
                logging.INFO,
                f"is moved to the queue of {model}",
                "job_moved",
                model=model,
            )
            await self._end(entry, "moved")

    async def unverified(self, entry: InFlightJob, reason: str) -> None:
        """There will be no second drawing: acknowledges the message that asks for it."""
        if not entry.settle():
            return
        entry.log(
            logging.INFO, f"is not drawn a second time: {reason}", "job_unverified"
        )
        await self._end(entry, "unverified")

    async def _dead_letter(self, entry: InFlightJob, error: FleetError) -> None:
        await entry.uploads_end()  # so that their records are there
        try:
            entry.lease.check()
        except LeaseLost as lost:
            await self._lose(entry, lost)
            return
        reason = entry.reason(error)
        kind = type(error).__name__
        entry.log(
            logging.WARNING, f"failed permanently: {reason}", "job_failed", error=kind
        )
        failed = dead_letter.failed_job(
            entry.message,
            entry.job,
            error,
            self.settings.name,
            self.storage.blobs.clock.now(),
            reason=reason,
            stored=entry.stored,
        )

        record = self.record(entry, **failed.model_dump(exclude_unset=True))
        await self._end_without_image(entry, "failed", record, failed)

    async def _release(
        self, entry: InFlightJob, delay_seconds: float = 0, *, failed: bool = False
    ) -> None:
        """Hands a job's message back."""
        outcome: Outcome = "retried" if failed else "handed_back"
        if await self.bundles.ended(entry, outcome, delay_seconds=delay_seconds):
            return
        release = partial(
            self.bundles.release, entry.lease, delay_seconds, failed=failed
        )
        await self._end(entry, outcome, call=release)

    async def _end(
        self,
        entry: InFlightJob,
        outcome: Outcome,
        fault: Fault | None = None,
        failed: Sequence[FailedJob] = (),
        call: Call | None = None,
    ) -> None:
        """Ends a job with its message; what is stored of one that is lost stays stored."""
        is_ended = await self.bundles.end(entry.lease, fault, failed, call)
        self._ended(entry, outcome if is_ended else "lost")

    async def _lose(self, entry: InFlightJob, error: LeaseLost) -> None:
        if not await self.bundles.ended(entry, "lost"):
            await self._end(entry, "lost", error)

    def _ended(self, entry: InFlightJob, outcome: Outcome) -> None:
        for _ in entry.judged:  # images that nobody has chosen from
            self.cost.lost("failed")
        self.in_flight.pop(entry, None)
        self.pending.job_ended()
        if not self.in_flight:
            self.nothing_in_flight.set()
        self.metrics.outcomes[outcome] += 1
        self.metrics.jobs.labels(outcome).inc()
        self.metrics.model_jobs.labels(self.model_name, outcome).inc()
        self.on_settled(entry, outcome)
