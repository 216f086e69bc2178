"""The prepare stage: a message becomes requests that the engine can take at once.

It is the first of one model's stages, and is made with those after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from imagefleet import cancelled, concurrency, errors
from imagefleet.job.message import Job, job_key, read_job
from imagefleet.pricing import families
from imagefleet.storage import protocol
from worker import tasks
from worker.engine import contract
from worker.inputs.reader import NO_INPUTS, Inputs, JobFiles
from worker.jobs import stored
from worker.jobs.in_flight import InFlightImage, InFlightJob
from worker.node.watchdog import NodeWatchdog, Suspects
from worker.pull import Puller
from worker.stages.image import ENCODING, UPLOADS, EncodeStage, GenerateStage, UploadStage

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

#: A job waits for the list of cancelled campaigns if the last reading is older.
MAX_LIST_AGE_SECONDS = 2 * cancelled.PERIOD_SECONDS

#: Jobs prepared at once: one that waits for its LoRA's download must not hold up the others.
PREPARERS = 8


class Isolation:
    """A lock that many hold at once as `shared`, or one as `alone`, in the order of their calls."""

    def __init__(self) -> None:
        self.shared = asyncio.Semaphore(PREPARERS)
        self._one_alone = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._one_alone, contextlib.AsyncExitStack() as places:
            for _ in range(PREPARERS):
                await places.enter_async_context(self.shared)
            yield


@dataclass(slots=True, eq=False)
class BegunJob:
    """A job and its images that the engine has not been given yet.

    They share what was prepared for the first: their prompts and their LoRAs in memory.
    """

    entry: InFlightJob
    job: Job
    """As it is drawn."""
    requests: deque[tuple[int, contract.ImageRequest]]
    """The requests left, each with its image's index."""
    first: contract.PreparedRequest

    def take(self) -> tuple[InFlightImage, contract.PreparedRequest]:
        """The next image."""
        entry = self.entry
        index, request = self.requests.popleft()
        prepared = self.first
        if request is not prepared.request:
            dataclass_of_engine: Any = prepared
            prepared = dataclasses.replace(dataclass_of_engine, request=request)
        size = final = request.width, request.height
        if (last := request.upscale or request.hires) is not None:
            final = last.width, last.height
        elif entry.overlay is not None:
            final = entry.overlay.size
        image = InFlightImage(entry, self.job, index, size, final, request.embeddings)
        return image, prepared


class Turns:
    """Lets every other image be one of a job that is not begun, while there are both.

    So neither does a job of a thousand images hold up the others, nor they it.
    """

    def __init__(self, most_new: int) -> None:
        """*most_new*: jobs that may wait here to be begun; then `put` waits."""
        self._new: asyncio.Queue[InFlightJob] = asyncio.Queue(most_new)
        self._begun: deque[BegunJob] = deque()
        self._waiting = asyncio.Semaphore(0)
        self._was_new = False

    async def put(self, entry: InFlightJob) -> None:
        """A job that is not begun."""
        await self._new.put(entry)
        self._waiting.release()

    def go_on(self, job: BegunJob) -> None:
        """A job with images left; others that are begun come first."""
        self._begun.append(job)
        self._waiting.release()

    async def next(self) -> InFlightJob | BegunJob:
        await self._waiting.acquire()
        self._was_new = not self._new.empty() and not (self._was_new and self._begun)
        return self._new.get_nowait() if self._was_new else self._begun.popleft()


@dataclass(eq=False)
class PrepareStage:
    """Reads jobs, resolves their files and cuts their prompts; feeds the generate stage."""

    generate: GenerateStage
    files: JobFiles

    def __post_init__(self) -> None:
        self.engine, self.settler = self.generate.engine, self.generate.settler
        self.turns = Turns(protocol.MAX_RECEIVE)
        self._isolation = Isolation()
        self._accelerator_hash: Future[str | None] | None = None
        self._drawn_here: OrderedDict[str, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(PREPARERS, "prepare")
        self._prepared = concurrency.Batches(
            concurrency.one_by_one(self.engine.prepare), self._threads, most=1, at_once=PREPARERS
        )

    @classmethod
    def of(
        cls,
        engine: contract.Engine,
        model_hash: Future[str | None],
        files: JobFiles,
        puller: Puller,
        watchdog: NodeWatchdog,
    ) -> PrepareStage:
        """The stages for an engine whose model's file has *model_hash*."""
        settler = puller.settler
        suspects = Suspects(
            settler.settings.name,
            settler.storage.blobs,
            settler.metrics,
            settler.retry_policy,
            lambda: settler.storage.prover,
        )
        upload = UploadStage(settler, watchdog, suspects)
        return cls(GenerateStage(engine, EncodeStage(model_hash, upload), puller), files)

    def start(self, side_tasks: tasks.SideTasks) -> None:
        """Starts the tasks of all stages."""
        encode, pending = self.generate.encode, self.settler.pending
        side_tasks.start("prepare", self.run, PREPARERS)
        side_tasks.start("generate", self.generate.run)
        side_tasks.start("encode", encode.run, ENCODING)
        side_tasks.start("upload", encode.upload.run, UPLOADS)
        side_tasks.start("record", pending.run)
        side_tasks.start("acknowledge", pending.finish, UPLOADS)

    async def run(self) -> NoReturn:
        while True:
            turn = await self.turns.next()
            if isinstance(turn, BegunJob):
                await self.settler.attempt(turn.entry, partial(self._go_on, turn))
                continue
            entry = turn
            # After hours without work the list is as old.
            await self.settler.cancelled_campaigns.refresh(MAX_LIST_AGE_SECONDS)
            work = self._generate_alone if entry.is_suspect else self._generate_with_others
            await self.settler.attempt(entry, partial(work, entry))

    def close(self) -> None:
        """Ends the threads of all stages, whose tasks have ended."""
        self.generate.encode.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _generate_with_others(self, entry: InFlightJob) -> None:
        async with self._isolation.shared:
            job = await self._prepare(entry)
        if job is not None:
            await self._go_on(job)

    async def _go_on(self, job: BegunJob) -> None:
        """Gives the engine the next image of a job; the others have to wait for their turns."""
        async with self._isolation.shared:
            await self._submit(job)
        if job.requests:
            self.turns.go_on(job)

    async def _generate_alone(self, entry: InFlightJob) -> None:
        """Generates a job whose workers have died, so that no other dies with this one.

        Raises JobError if the workers that generated it alone died as well.
        """
        if self._is_others(self._read(entry)):
            await self.settler.move(entry)
            return
        if entry.deliveries.is_condemned:
            raise errors.JobError(
                f"the workers that had the job died or lost their leases"
                f" {entry.deliveries.lost} times, {entry.deliveries.lost_alone} of them while they"
                " generated nothing else"
            )
        async with self._isolation.alone():
            await self.generate.nothing_at_engine.wait()
            lost = f"{entry.deliveries.lost} workers that had it died or lost their leases"
            entry.log(logging.WARNING, f"is generated alone: {lost}", "job_alone")
            if body := entry.deliveries.marked_alone().write_to(entry.lease.message.body):
                keeper = self.settler.keeper
                await self.settler.retry_policy.call(partial(keeper.rewrite, entry.lease, body))
            job = await self._prepare(entry)
            while job is not None and job.requests:
                await self._submit(job)
            await self.generate.nothing_at_engine.wait()

    async def _prepare(self, entry: InFlightJob) -> BegunJob | None:
        """Prepares a job; None: none of its images is drawn here."""
        with self.settler.metrics.stage_seconds["prepare"].time():
            job = self._read(entry)
            if self._is_others(job):
                self.generate.puller.not_ahead(entry)
                await self.settler.move(entry)
                return None
            if job.verify and await self._left_to_others(entry, job):
                return None
            images = await self._missing(entry, job)
            if not images:
                await self.settler.images_ended(entry)
                return None
            if job.place is not None and await self._is_too_early(entry, job, job.place.before):
                return None
            if self.files.accelerator is not None and not job.only_upscales:
                job = self.files.accelerator.fit(job)
            requests = await self._requests(entry, job, self._size(job), images)
            first = await self._prepared(requests[0])
        if entry.settled:
            return None  # handed back meanwhile
        entry.images_to_submit = entry.images_to_store = len(images)
        entry.is_first_awaited = job.images > 1 and 0 in images
        return BegunJob(entry, job, deque(zip(images, requests, strict=True)), first)

    async def _missing(self, entry: InFlightJob, job: Job) -> list[int]:
        """The images to draw: earlier deliveries may have stored some."""
        if job.verify:
            return [0]
        if entry.lease.message.delivery_count > 1 or job.images > 1 or job.stage > 1:
            await self.settler.look_up(entry)
        images = [index for index in range(job.images) if index not in entry.stored]
        self.generate.puller.not_ahead(entry, entry.ahead - len(images))
        return images

    async def _submit(self, job: BegunJob) -> None:
        """Gives the engine the next image of a job, unless no more of them are to be drawn."""
        entry, left = job.entry, job.entry.images_to_submit
        if entry.settled or not left:
            job.requests.clear()  # handed back, or put off
        elif entry.is_stopping or self.generate.is_cancelled(entry):
            job.requests.clear()
            entry.images_to_submit = 0
            await self.generate.leave_out(entry, left)
        elif not await self.generate.submit(*job.take()):
            job.requests.clear()  # the worker drains

    async def _left_to_others(self, entry: InFlightJob, job: Job) -> bool:
        """Hands a second drawing back if the first is this worker's: it would prove nothing."""
        if job_key(job.campaign, job.id) not in self._drawn_here:
            return False
        if not await self._hand_back(entry):
            await self.settler.unverified(entry, "no other worker has taken it")
        return True

    async def _is_too_early(self, entry: InFlightJob, job: Job, before: Job) -> bool:
        """Hands a stage back unless its input, the image of the stage before, is stored.

        Workers send a stage once that is; but its number is not signed, and anybody may write it.
        """
        look = partial(stored.look_up, self.settler.storage.blobs, before, 0)
        with contextlib.suppress(errors.NameTakenError):  # by another job's image
            if await self.settler.retry_policy.call(look) is not None:
                return False
        if not await self._hand_back(entry):
            entry.job = None  # which has its end by a message of its own
            raise errors.UnknownStageError(
                f"stage {job.stage} of job {job_key(job.campaign, job.id)} begins with the image"
                f" {before.blob_name(0)!r}, which is not stored as that job's: if it was deleted,"
                " send the job again"
            )
        return True

    async def _hand_back(self, entry: InFlightJob) -> bool:
        """Leaves a job to others, or to later; False: that was done often enough."""
        if entry.lease.message.delivery_count - entry.deliveries.failed > HAND_BACKS:
            return False
        until_empty = self.settler.settings.until_empty
        seconds = HAND_BACK_SECONDS_UNTIL_EMPTY if until_empty else HAND_BACK_SECONDS
        await self.settler.hand_back(entry, concurrency.jitter(seconds))
        return True

    def _remember(self, job: Job) -> None:
        self._drawn_here[job_key(job.campaign, job.id)] = None
        if len(self._drawn_here) > REMEMBERED:
            self._drawn_here.popitem(last=False)  # a plain dict looks for its first key for long

    def _read(self, entry: InFlightJob) -> Job:
        message = entry.lease.message
        job = read_job(message.body, message.id, self.files.trusted)
        entry.job = job  # from here on, a failure is recorded with the job's id and campaign
        if self.generate.is_cancelled(entry):
            self.generate.puller.not_ahead(entry)  # others are pulled while it is acknowledged
            raise errors.JobCancelled
        if not (job.verify or self._is_others(job)):
            self._remember(job)
        return job

    def _is_others(self, job: Job) -> bool:
        """Whether a job asks for another model than the engine has."""
        return job.model not in {None, self.engine.model_name}

    def _size(self, job: Job, default: tuple[int, int] | None = None) -> tuple[int, int]:
        """The size of a job's first pass; *default*: in the place of the engine's."""
        width, height = default or self.engine.default_size
        return job.width or width, job.height or height

    async def _requests(
        self, entry: InFlightJob, job: Job, size: tuple[int, int], images: Collection[int]
    ) -> list[contract.ImageRequest]:
        if job.only_upscales:
            inputs = await self.files.inputs.read_upscale(job)
            entry.source_parameters = inputs.parameters
            return requests_of(job, size, (), (), images, inputs)
        prompt = job.parsed_prompt
        resolving = [
            concurrency.UNTIL_ACCESS.call(partial(self.files.loras.resolve, tag.name))
            for tag in prompt.loras
        ]
        paths = await asyncio.gather(*resolving) if resolving else []
        loras = [
            contract.Lora(
                name=tag.name,
                path=path,
                text_encoder_weight=tag.text_encoder_weight,
                unet_weight=tag.unet_weight,
                identity=self.files.loras.identity(path),
            )
            for tag, path in zip(prompt.loras, paths, strict=True)
        ]
        embeddings = await self._find_embeddings(job)
        entry.lora_hashes = {
            lora.name: self.files.hashes.of_lora(lora.path, lora.identity) for lora in loras
        }
        if (accelerator := self.files.accelerator) is not None:
            if self._accelerator_hash is None:  # that of the file which is merged, for good
                path = await concurrency.UNTIL_ACCESS.call(self.files.accelerator_path)
                self._accelerator_hash = self.files.hashes.of_lora(path)
            entry.lora_hashes[accelerator.name] = self._accelerator_hash
        inputs = NO_INPUTS
        text_encoder = self.engine.text_encoder
        if job.has_inputs or text_encoder is not None:
            family = families.find(self.engine.family)
            inputs = await self.files.inputs.read(
                job, size, is_enlarged=family.enlarges, text_encoder=text_encoder
            )
            if inputs.init is not None:
                height, width = inputs.init.pixels.shape[:2]
                size = self._size(job, family.scaled((width, height)))
        entry.overlay = inputs.overlay
        return requests_of(job, size, loras, embeddings, images, inputs)

    async def _find_embeddings(self, job: Job) -> tuple[contract.Embedding, ...]:
        """The embeddings that the prompts name."""
        names = await concurrency.UNTIL_ACCESS.call(self.files.embeddings.names)
        if not names:
            return ()
        find = partial(self.engine.find_embeddings, job.all_prompts, names)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, find)
        files = await asyncio.gather(
            *(
                concurrency.UNTIL_ACCESS.call(partial(self.files.embeddings.resolve_hashed, name))
                for name in found
            )
        )
        return tuple(
            contract.Embedding(name, path, sha256)
            for name, (path, sha256) in zip(found, files, strict=True)
        )


def requests_of(
    job: Job,
    size: tuple[int, int],
    loras: Sequence[contract.Lora],
    embeddings: tuple[contract.Embedding, ...],
    images: Collection[int] | None = None,
    inputs: Inputs = NO_INPUTS,
) -> list[contract.ImageRequest]:
    """A job's *images*, by default all, of *size* (width, height), with its prompts' files."""
    width, height = size
    if inputs.upscale is not None and inputs.init is not None:
        height, width = inputs.init.pixels.shape[:2]
    return [
        contract.ImageRequest(
            prompt=job.parsed_prompt,
            negative_prompt=job.parsed_negative_prompt,
            loras=tuple(loras),
            sampler=job.sampler,
            steps=job.steps,
            cfg_scale=job.guidance,
            seed=job.image_seed(index),
            width=width,
            height=height,
            clip_skip=job.clip_skip,
            embeddings=embeddings,
            text_states=inputs.text_states,
            sampler_options=job.sampler_options,
            noise=job.image_noise(index),
            init=inputs.init,
            hires=inputs.hires,
            controls=inputs.controls,
            decoder=job.sd_vae_decode_method,
            upscale=inputs.upscale,
        )
        for index in (range(job.images_to_draw) if images is None else images)
    ]
