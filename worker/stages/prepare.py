"""The prepare stage: a message becomes requests that the engine can take at once."""

import asyncio
import contextlib
import logging
from asyncio import Queue, Semaphore
from collections.abc import AsyncIterator, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from cachetools import FIFOCache

from imagefleet import cancelled, concurrency
from imagefleet.errors import (
    InvalidMessageError,
    JobCancelled,
    JobError,
    NameTakenError,
    UnknownStageError,
)
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, job_key, read_job
from imagefleet.storage.deliveries import Deliveries
from worker.engine.contract import Engine, ImageRequest
from worker.files.manifest import FutureHash
from worker.inputs.reader import JobFiles
from worker.jobs import stored
from worker.jobs.in_flight import InFlightJob
from worker.pull import Puller
from worker.settle import Settler
from worker.stages.generate import GenerateStage
from worker.stages.requests import PREPARERS, RequestReader

#: Jobs that a worker remembers, so that it does not draw the same image a second time: many times
#: what it holds, since a job and its second drawing are sent together.
REMEMBERED = 10_000

#: A second drawing that comes to the worker of the first, or a stage before its input, is handed
#: back so many times: with five other workers a drawing reaches one of them but for one time in
#: eight thousand.
HAND_BACKS = 5

#: Seconds until others may have a job that is handed back. With --until-empty, where somebody waits
#: for the end, others ask for jobs at least once a second.
HAND_BACK_SECONDS = 10.0
HAND_BACK_SECONDS_UNTIL_EMPTY = 0.5

#: A job of a paused campaign is handed back for this time, after which a resumed one goes on: for a
#: million such jobs, a queue is asked 3,000 times a second.
PAUSED_SECONDS = 300.0

#: A job waits for the list of cancelled campaigns if the last reading is older.
MAX_LIST_AGE_SECONDS = 2 * cancelled.PERIOD_SECONDS


#: Jobs that are prepared at once beside those, of those that go before them.
URGENT_PREPARERS = 2


class Isolation:
    """A lock that many hold at once as `shared`, or one as `alone`, in the order of their calls."""

    def __init__(self) -> None:
        self.shared = Semaphore(PREPARERS + URGENT_PREPARERS)
        self._one_alone = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._one_alone, contextlib.AsyncExitStack() as places:
            for _ in range(PREPARERS + URGENT_PREPARERS):
                await places.enter_async_context(self.shared)
            yield


@dataclass(eq=False)
class PrepareStage:
    """Reads jobs, resolves their files and cuts their prompts; feeds the generate stage."""

    _engine: Engine
    _files: JobFiles
    _settler: Settler
    _puller: Puller
    _generate: GenerateStage

    def __post_init__(self) -> None:
        self._own_models = {None, self._engine.model_name}
        # Jobs in turns: one with images left waits behind the others for its next.
        self._ordinary: Queue[InFlightJob] = Queue()
        self._urgent: Queue[InFlightJob] = Queue()
        self._isolation = Isolation()
        self._own_hashes: Mapping[str, FutureHash] | None = None
        self._drawn_here: FIFOCache[str, None] = FIFOCache(REMEMBERED)
        self._threads = ThreadPoolExecutor(PREPARERS, "prepare")
        self._reader = RequestReader(self._engine, self._files, self._threads)

    def add(self, entry: InFlightJob) -> None:
        """Queues a job that was leased."""
        (self._urgent if entry.is_urgent else self._ordinary).put_nowait(entry)

    async def run(self, *, is_urgent: bool = False) -> NoReturn:
        """Prepares ordinary jobs, or those that go before them, each on its own."""
        queue = self._urgent if is_urgent else self._ordinary
        while True:
            entry = await queue.get()
            work = self._go_on
            if entry.is_suspect and not entry.requests:
                work = self._generate_alone
            await self._settler.attempt(entry, partial(work, entry))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _go_on(self, entry: InFlightJob) -> None:
        """Prepares a job that is not begun, and gives the engine its next image.

        The others have to wait for their turns.
        """
        async with self._isolation.shared:
            if not entry.requests:
                await self._prepare(entry)
            if entry.requests:
                await self._submit(entry)
        if entry.requests:
            self.add(entry)

    async def _generate_alone(self, entry: InFlightJob) -> None:
        """Generates a job whose workers have died, so that no other dies with this one.

        Raises JobError if the workers that generated it alone died as well.
        """
        job = await self._read(entry)
        if await self._is_not_drawn_now(entry, job):
            return
        async with self._isolation.alone():
            if entry.deliveries.is_condemned and not entry.is_all_stored:
                await self._condemn(entry)
            await self._generate.nothing_at_engine.wait()
            entry.log(
                logging.WARNING,
                f"is generated alone: {entry.deliveries.lost} workers that had it died or lost"
                " their leases",
                "job_alone",
            )
            await self._rewrite(entry, entry.deliveries.marked_alone())
            await self._prepare(entry)
            while entry.requests:
                await self._submit(entry)
            await self._generate.nothing_at_engine.wait()
            # The next job of a bundle may be what its workers die of, and is found by this one.
            await self._settler.bundles.stored(entry)

    async def _condemn(self, entry: InFlightJob) -> NoReturn:
        """Raises JobError: of a bundle it is the first job that nobody has ended."""
        known = entry.deliveries
        if entry.bundle is not None:  # its other jobs are drawn
            await self._rewrite(entry, known.model_copy(update={"lost_alone": 0}))
        raise JobError(
            f"the workers that had the job died or lost their leases {known.lost} times,"
            f" {known.lost_alone} of them while they generated nothing else"
        )

    async def _rewrite(self, entry: InFlightJob, deliveries: Deliveries) -> None:
        """Notes how a message's deliveries went, while it is leased."""
        if body := deliveries.write_to(entry.lease.message.body):
            rewrite = partial(self._settler.keeper.rewrite, entry.lease, body)
            await self._settler.retry_policy.call(rewrite)

    async def _prepare(self, entry: InFlightJob) -> None:
        """Prepares a job's requests; adds none if none of its images is drawn here."""
        with self._settler.metrics.stage_seconds["prepare"].time():
            job = await self._read(entry)
            if await self._is_not_drawn_now(entry, job):
                return
            if job.verify and await self._left_to_others(entry, job):
                return
            images = sorted({*range(job.images_to_draw)} - entry.stored)
            if job.keep is not None and images:  # they are judged together
                images = [*range(job.images_to_draw)]
            self._puller.not_ahead(entry, entry.ahead - len(images))
            if not images:
                await self._settler.images_ended(entry)
                return
            if job.place is not None and await self._is_too_early(
                entry, job, job.place.before
            ):
                return
            job = self._reader.fit(job)
            requests = await self._requests(entry, job, images)
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._engine.prepare, requests[0]
            )
        if entry.settled:
            return  # handed back meanwhile
        entry.images_to_submit = entry.images_to_store = len(images)
        entry.is_first_awaited = job.images > 1 and 0 in images and job.keep is None
        entry.drawn = job
        entry.prepared = prepared
        entry.requests.extend(zip(images, requests, strict=True))

    async def _submit(self, entry: InFlightJob) -> None:
        """Gives the engine the next image of a job, unless no more of them are to be drawn."""
        left = entry.images_to_submit
        if entry.settled or not left:
            entry.requests.clear()  # handed back, or put off
        elif entry.is_stopping or entry.is_of(self._settler.cancelled_campaigns):
            entry.requests.clear()
            entry.images_to_submit = 0
            await self._generate.leave_out(entry, left)
        elif not await self._generate.submit(*entry.take_image()):
            entry.requests.clear()  # the worker drains
        if not entry.requests:
            entry.prepared = None  # frees its LoRAs

    async def _is_not_drawn_now(self, entry: InFlightJob, job: Job) -> bool:
        """Leaves a job of another model to others; hands one of a paused campaign back."""
        paused = self._settler.cancelled_campaigns.paused
        if job.model not in self._own_models:
            leave = self._settler.move(entry)
        elif (job.campaign or DEFAULT_CAMPAIGN) in paused:
            leave = self._settler.hand_back(entry, concurrency.jitter(PAUSED_SECONDS))
        else:
            return False
        self._puller.not_ahead(entry)
        await leave
        return True

    async def _left_to_others(self, entry: InFlightJob, job: Job) -> bool:
        """Hands a second drawing back if the first is this worker's: it would prove nothing."""
        if job_key(job.campaign, job.id) not in self._drawn_here:
            return False
        if not await self._hand_back(entry):
            await self._settler.unverified(entry, "no other worker has taken it")
        return True

    async def _is_too_early(self, entry: InFlightJob, job: Job, before: Job) -> bool:
        """Hands a stage back unless its input, the image of the stage before, is stored.

        Workers send a stage once that is; but its number is not signed, and anybody may write it.
        """
        look = partial(stored.look_up, self._settler.storage.blobs, before, 0)
        with contextlib.suppress(NameTakenError):  # by another job's image
            if await self._settler.retry_policy.call(look) is not None:
                return False
        if not await self._hand_back(entry):
            entry.job = None  # which has its end by a message of its own
            raise UnknownStageError(
                f"stage {job.stage} of job {job_key(job.campaign, job.id)} begins with the image"
                f" {before.blob_name(0)!r}, which is not stored as that job's: if it was deleted,"
                " send the job again"
            )
        return True

    async def _hand_back(self, entry: InFlightJob) -> bool:
        """Leaves a job to others, or to later; False: that was done often enough."""
        if entry.lease.message.delivery_count - entry.deliveries.failed > HAND_BACKS:
            return False
        until_empty = self._settler.settings.until_empty
        seconds = HAND_BACK_SECONDS_UNTIL_EMPTY if until_empty else HAND_BACK_SECONDS
        await self._settler.hand_back(entry, concurrency.jitter(seconds))
        return True

    async def _read(self, entry: InFlightJob) -> Job:
        message = entry.message
        # After hours without work the list of cancelled campaigns is as old.
        cancelled_campaigns = self._settler.cancelled_campaigns
        await cancelled_campaigns.refresh(MAX_LIST_AGE_SECONDS)
        if entry.bundle is not None and entry.bundle.problem is not None:
            raise InvalidMessageError(entry.bundle.problem)
        job = read_job(message.body, message.id, self._files.trusted)
        # From here on, a failure is recorded with the job's id and campaign.
        entry.job = job
        if not job.verify:
            await self._settler.look_up(entry)
        if entry.is_of(cancelled_campaigns) and not entry.is_all_stored:
            # Others are pulled while it is acknowledged.
            self._puller.not_ahead(entry)
            raise JobCancelled
        if not job.verify and job.model in self._own_models:
            self._drawn_here[job_key(job.campaign, job.id)] = None
        return job

    async def _requests(
        self, entry: InFlightJob, job: Job, images: Collection[int]
    ) -> list[ImageRequest]:
        """The requests of a job's *images*; notes what their files are to tell of it."""
        found = await self._reader.read(job, images)
        inputs = found.inputs
        entry.source_parameters = inputs.parameters
        hashes = self._files.hashes
        for lora in found.loras:
            entry.lora_hashes[lora.name] = hashes.of_lora(lora.path, lora.identity)
        if self._files.own and not job.only_upscales:
            own = await self._hash_own_files()
            if (accelerator := self._files.accelerator) is not None:
                entry.lora_hashes[accelerator.name] = own["accelerator"]
            if "vae" in own:
                entry.model_hashes["sd_vae"] = own["vae"]
        named = {
            "sd_vae": inputs.vae and inputs.vae.path,
            "hr_checkpoint_name": inputs.hires and inputs.hires.checkpoint,
            "refiner_checkpoint": inputs.refiner and inputs.refiner.path,
        }
        for field, path in named.items():
            if path:
                entry.model_hashes[field] = hashes.of_model(path)
        entry.overlay = inputs.overlay
        return found.requests

    async def _hash_own_files(self) -> Mapping[str, FutureHash]:
        """Hashes of the files that all jobs are drawn with; they are loaded for good."""
        if self._own_hashes is None:
            hashes = self._files.hashes
            paths = await self._files.own_paths()
            self._own_hashes = {
                name: hashes.of_model(path) if name == "vae" else hashes.of_lora(path)
                for name, path in paths.items()
            }
        return self._own_hashes
