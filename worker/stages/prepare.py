"""The prepare stage: a message becomes requests that the engine can take at once.

It is the first of one model's stages, and is made with those after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from cachetools import FIFOCache

from imagefleet import cancelled, concurrency, errors
from imagefleet.files import safetensors
from imagefleet.job import differences, sizes
from imagefleet.job.message import Job, job_key, read_job
from imagefleet.pricing import families
from imagefleet.storage import protocol
from worker import tasks
from worker.engine import contract
from worker.inputs.reader import NO_INPUTS, Inputs, JobFiles
from worker.jobs import stored
from worker.jobs.in_flight import InFlightImage, InFlightJob
from worker.node.checks import NodeChecks
from worker.pull import Puller
from worker.stages.image import (
    ENCODING,
    UPLOADS,
    EncodeStage,
    GenerateStage,
    UploadStage,
)

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
            prepared = replace(dataclass_of_engine, request=request)
        size = request.width, request.height
        if (last := request.upscale or request.hires) is not None:
            final = last.width, last.height
        elif entry.overlay is not None and entry.overlay.box is not None:
            final = entry.overlay.image.size
        else:
            final = sizes.whole_cells(*size)
        return InFlightImage(
            entry, self.job, index, size, final, request.embeddings
        ), prepared


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


class PrepareStage:
    """Reads jobs, resolves their files and cuts their prompts; feeds the generate stage."""

    def __init__(
        self,
        engine: contract.Engine,
        model_hash: Future[str | None],
        files: JobFiles,
        puller: Puller,
        checks: NodeChecks,
    ) -> None:
        """Makes the stages of an engine whose model's file has *model_hash*."""
        self.engine, self.files, self.settler = engine, files, puller.settler
        upload = UploadStage(self.settler, checks)
        self.generate = GenerateStage(engine, EncodeStage(model_hash, upload), puller)
        self.turns = Turns(protocol.MAX_RECEIVE)
        self._isolation = Isolation()
        self._own_hashes: Mapping[str, Future[str | None]] | None = None
        self._drawn_here: FIFOCache[str, None] = FIFOCache(REMEMBERED)
        self._threads = ThreadPoolExecutor(PREPARERS, "prepare")
        self._reader = RequestReader(self.engine, self.files, self._threads)
        self._prepared = concurrency.Batches(
            concurrency.one_by_one(self.engine.prepare),
            self._threads,
            most=1,
            at_once=PREPARERS,
        )

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
            work = (
                self._generate_alone if entry.is_suspect else self._generate_with_others
            )
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
            lost = (
                f"{entry.deliveries.lost} workers that had it died or lost their leases"
            )
            entry.log(logging.WARNING, f"is generated alone: {lost}", "job_alone")
            if body := entry.deliveries.marked_alone().write_to(
                entry.lease.message.body
            ):
                keeper = self.settler.keeper
                await self.settler.retry_policy.call(
                    partial(keeper.rewrite, entry.lease, body)
                )
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
            if job.place is not None and await self._is_too_early(
                entry, job, job.place.before
            ):
                return None
            if self.files.accelerator is not None and not job.only_upscales:
                job = self.files.accelerator.fit(job)
            requests = await self._requests(entry, job, images)
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

    def _read(self, entry: InFlightJob) -> Job:
        message = entry.lease.message
        job = read_job(message.body, message.id, self.files.trusted)
        entry.job = (
            job  # from here on, a failure is recorded with the job's id and campaign
        )
        if self.generate.is_cancelled(entry):
            self.generate.puller.not_ahead(
                entry
            )  # others are pulled while it is acknowledged
            raise errors.JobCancelled
        if not (job.verify or self._is_others(job)):
            self._drawn_here[job_key(job.campaign, job.id)] = None
        return job

    def _is_others(self, job: Job) -> bool:
        """Whether a job asks for another model than the engine has."""
        return job.model not in {None, self.engine.model_name}

    async def _requests(
        self, entry: InFlightJob, job: Job, images: Collection[int]
    ) -> list[contract.ImageRequest]:
        """The requests of a job's *images*; notes what their files are to tell of it."""
        found = await self._reader.read(job, images)
        entry.source_parameters = found.inputs.parameters if job.only_upscales else ""
        entry.lora_hashes = {
            lora.name: self.files.hashes.of_lora(lora.path, lora.identity)
            for lora in found.loras
        }
        if self.files.own and not job.only_upscales:
            if (
                own := self._own_hashes
            ) is None:  # of the files that are loaded, for good
                hashes = self.files.hashes
                paths = await concurrency.UNTIL_ACCESS.call(self.files.own_paths)
                own = self._own_hashes = {
                    name: hashes.of_model(path)
                    if name == "vae"
                    else hashes.of_lora(path)
                    for name, path in paths.items()
                }
            if (accelerator := self.files.accelerator) is not None:
                entry.lora_hashes[accelerator.name] = own["accelerator"]
            if "vae" in own:
                entry.model_hashes["sd_vae"] = own["vae"]
        inputs, of_model = found.inputs, self.files.hashes.of_model
        named = {
            "sd_vae": inputs.vae and inputs.vae.path,
            "hr_checkpoint_name": inputs.hires and inputs.hires.checkpoint,
            "refiner_checkpoint": inputs.refiner and inputs.refiner.path,
        }
        entry.model_hashes |= {
            field: of_model(path) for field, path in named.items() if path
        }
        entry.overlay = inputs.overlay
        return found.requests


class JobRequests(NamedTuple):
    """The requests of a job's images, and what they were made of."""

    requests: list[contract.ImageRequest]
    loras: Sequence[contract.Lora] = ()
    inputs: Inputs = NO_INPUTS


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Makes requests of jobs, with the files that these name."""

    engine: contract.Engine
    files: JobFiles
    threads: ThreadPoolExecutor

    async def read(
        self, job: Job, images: Collection[int] | None = None
    ) -> JobRequests:
        """The requests of a job's *images*, by default all; raises as the libraries of files."""
        size = self._size(job)
        if job.only_upscales:
            inputs = await self.files.inputs.read_upscale(job)
            return JobRequests(
                requests_of(job, size, (), (), images, inputs), (), inputs
            )
        tags = job.loras
        resolving = [
            concurrency.UNTIL_ACCESS.call(partial(self.files.loras.resolve, tag.name))
            for tag in tags
        ]
        paths = await asyncio.gather(*resolving) if resolving else []
        loras = {
            tag: contract.Lora(
                name=tag.name,
                path=path,
                text_encoder_weight=tag.text_encoder_weight,
                unet_weight=tag.unet_weight,
                identity=self.files.loras.identity(path),
            )
            for tag, path in zip(tags, paths, strict=True)
        }
        drawn_with = [loras[tag] for tag in job.parsed_prompt.loras]
        embeddings = await self._find_embeddings(job)
        inputs = NO_INPUTS
        if job.has_inputs or self.engine.text_encoder is not None:
            family = families.find(self.engine.family)
            inputs = await self.files.inputs.read(
                job, size, self.engine, is_enlarged=family.enlarges
            )
            if inputs.init is not None:
                height, width = inputs.init.pixels.shape[:2]
                size = self._size(job, family.scaled((width, height)))
            second, _ = job.hires_prompts
            if inputs.hires and second and second.loras != job.parsed_prompt.loras:
                own = tuple(loras[tag] for tag in second.loras)
                inputs = replace(inputs, hires=replace(inputs.hires, loras=own))
        requests = requests_of(job, size, drawn_with, embeddings, images, inputs)
        return JobRequests(requests, list(loras.values()), inputs)

    async def read_rested(self, job: Job) -> JobRequests:
        """`read`, once nobody writes the files any more."""
        while True:
            with contextlib.suppress(errors.UnsettledFileError):
                return await self.read(job)
            await asyncio.sleep(safetensors.REST_SECONDS)

    def _size(
        self, job: Job, default: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """The size of a job's first pass; *default*: in the place of the engine's."""
        width, height = default or self.engine.default_size
        return job.width or width, job.height or height

    async def _find_embeddings(self, job: Job) -> tuple[contract.Embedding, ...]:
        """The embeddings that the prompts name."""
        names = await concurrency.UNTIL_ACCESS.call(self.files.embeddings.names)
        if not names:
            return ()
        find = partial(self.engine.find_embeddings, job.all_prompts, names)
        found = await asyncio.get_running_loop().run_in_executor(self.threads, find)
        files = await asyncio.gather(
            *(
                concurrency.UNTIL_ACCESS.call(
                    partial(self.files.embeddings.resolve_hashed, name)
                )
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
    hires = inputs.hires
    pixels = max(width * height, hires.width * hires.height if hires else 0)
    if job.randn_source == "GPU" and pixels > differences.GPU_NOISE_PIXELS:
        differences.warn("gpu_noise")
    return [
        contract.ImageRequest(
            prompt=job.parsed_prompt,
            negative_prompt=job.parsed_negative_prompt,
            loras=tuple(loras),
            sampler=job.sampler,
            steps=job.steps,
            cfg_scale=job.cfg_scale,
            seed=job.image_seed(index),
            width=width,
            height=height,
            clip_skip=job.clip_skip,
            embeddings=embeddings,
            text_states=inputs.text_states,
            sampler_options=job.sampler_options,
            noise=job.image_noise(index),
            init=inputs.init,
            # AUTOMATIC1111 fills the masks of each batch with the noise of the first.
            fill_seed=job.image_seed(index % job.batch_size),
            hires=inputs.hires,
            controls=inputs.controls,
            decoder=job.sd_vae_decode_method,
            tiling=job.tiling,
            vae=inputs.vae,
            refiner=inputs.refiner,
            upscale=inputs.upscale,
        )
        for index in (range(job.images_to_draw) if images is None else images)
    ]
