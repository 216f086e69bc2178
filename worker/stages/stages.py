"""The work of each stage between the pull and the end of a job.

Every arrow between two stages is a bounded queue, so a slow stage holds back the one before it,
up to the engine and the pull. An error ends the job it belongs to, by its class; only NodeError
and SetupError leave a stage, and end the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from imagefleet import errors, retry
from imagefleet.job.message import Job, read_job
from imagefleet.storage import protocol
from worker.cost import CostMeter
from worker.engine import contract
from worker.files.loras import LoraLibrary
from worker.gpu_thread import EngineThread
from worker.in_flight import InFlightImage, InFlightJob
from worker.metrics import WorkerMetrics
from worker.node.canary import Canary
from worker.node.limits import standard_images
from worker.node.watchdog import NodeWatchdog
from worker.pull import Puller
from worker.settings import WorkerSettings
from worker.settle import Settler
from worker.stages import encode, infotext

#: Jobs prepared at once: one that waits for its LoRA's download must not hold up the others.
PREPARERS = 8

#: Encoded images that may wait, for each upload in flight.
WAITING_PER_UPLOAD = 2

Item = TypeVar("Item")
Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Drawn:
    image: InFlightImage
    pixels: contract.Pixels


@dataclass(frozen=True, slots=True)
class _Encoded:
    image: InFlightImage
    file: encode.EncodedImage


class Stages:
    """prepare, generate, encode, upload, acknowledge, joined by bounded queues."""

    def __init__(
        self,
        storage: protocol.Storage,
        engine: contract.Engine,
        engine_thread: EngineThread,
        puller: Puller,
        settler: Settler,
        library: LoraLibrary,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
        *,
        retry_policy: retry.RetryPolicy,
        cost: CostMeter,
        watch: NodeWatchdog,
    ) -> None:
        self.images_written = 0
        self.pulled: asyncio.Queue[InFlightJob] = asyncio.Queue(protocol.MAX_RECEIVE)
        self._drawn: asyncio.Queue[_Drawn] = asyncio.Queue(settings.encode_threads)
        self._encoded: asyncio.Queue[_Encoded] = asyncio.Queue(
            WAITING_PER_UPLOAD * settings.uploads
        )
        self._stored: asyncio.Queue[InFlightJob] = asyncio.Queue(settings.uploads)
        self._storage = storage
        self._engine = engine
        self._engine_thread = engine_thread
        self._puller = puller
        self._settler = settler
        self._library = library
        self._metrics = metrics
        self._settings = settings
        self._retry_policy = retry_policy
        self._cost = cost
        self._watch = watch
        self._tickets = itertools.count()
        self.canary = Canary(engine, engine_thread, self._tickets)
        self._alarms: asyncio.Queue[str] = asyncio.Queue()
        self._at_engine: dict[int, InFlightImage] = {}
        self._engine_failures_in_a_row = 0
        self._prepare_threads = ThreadPoolExecutor(PREPARERS, "prepare")
        self._encode_threads = ThreadPoolExecutor(settings.encode_threads, "encode")

    def tasks(self) -> Iterator[tuple[str, int, Work]]:
        """Each stage's name, how many tasks work in it, and their work; it never ends by itself."""
        uploads = self._settings.uploads
        yield "prepare", PREPARERS, lambda: _each(self.pulled, self._prepare)
        yield "generate", 1, self._collect
        yield "encode", self._settings.encode_threads, lambda: _each(self._drawn, self._encode)
        yield "upload", uploads, lambda: _each(self._encoded, self._upload)
        yield "acknowledge", uploads, lambda: _each(self._stored, self._acknowledge)
        yield "prove", 1, lambda: _each(self._alarms, self._prove)

    def withdraw(self) -> list[InFlightJob]:
        """The jobs in hand that the engine has not begun, or only in part."""
        withdrawn: set[InFlightJob] = set()
        for ticket in self._engine_thread.shut():
            image = self._at_engine.pop(ticket, None)
            if image is None:
                self.canary.finished(ticket, None)
            else:
                withdrawn.add(image.owner)
        return [
            in_flight
            for in_flight in self._settler.in_flight
            if in_flight in withdrawn or not in_flight.submitted
        ]

    def close(self) -> None:
        for threads in (self._prepare_threads, self._encode_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, in_flight: InFlightJob) -> None:
        async with self._ending(in_flight):
            if in_flight.settled:
                return
            with self._metrics.stage_seconds.labels("prepare").time():
                job = in_flight.job = self._read(in_flight)
                size = self._size(job)
                prepared = [
                    await self._in_thread(self._prepare_threads, self._engine.prepare, request)
                    for request in await self._requests(job, size)
                ]
            in_flight.images_to_generate = in_flight.images_to_store = len(prepared)
            for index, ready in enumerate(prepared):
                ticket = next(self._tickets)
                self._at_engine[ticket] = InFlightImage(in_flight, job, index, size)
                if not await self._engine_thread.submit(ticket, ready):
                    del self._at_engine[ticket]
                    return  # the worker drains, and hands this job back
            in_flight.submitted = True

    def _read(self, in_flight: InFlightJob) -> Job:
        message = in_flight.lease.message
        job = read_job(message.body, message.id)
        in_flight.job = (
            job  # from here on, a failure is recorded with the job's own id and campaign
        )
        if message.delivery_count > self._settings.max_attempts:
            raise errors.JobError(
                f"the job was delivered {message.delivery_count} times and never ended: the"
                " workers that had it died or lost their leases"
            )
        if job.model not in {None, self._engine.model_name}:
            raise errors.MissingFileError(
                f"the job asks for the model {job.model!r}; this worker has"
                f" {self._engine.model_name!r}"
            )
        return job

    def _size(self, job: Job) -> tuple[int, int]:
        width, height = self._engine.default_size
        return job.width or width, job.height or height

    async def _requests(self, job: Job, size: tuple[int, int]) -> list[contract.ImageRequest]:
        prompt = job.parsed_prompt
        paths = await asyncio.gather(
            *(
                retry.UNTIL_ACCESS.call(partial(self._library.resolve, tag.name))
                for tag in prompt.loras
            )
        )
        loras = [
            contract.Lora(
                name=tag.name,
                path=path,
                text_encoder_weight=tag.text_encoder_weight,
                unet_weight=tag.unet_weight,
            )
            for tag, path in zip(prompt.loras, paths, strict=True)
        ]
        width, height = size
        return [
            contract.ImageRequest(
                prompt=prompt,
                negative_prompt=job.parsed_negative_prompt,
                loras=tuple(loras),
                sampler=job.sampler,
                steps=job.steps,
                cfg_scale=job.cfg_scale,
                seed=job.image_seed(index),
                width=width,
                height=height,
                clip_skip=job.clip_skip,
            )
            for index in range(job.images)
        ]

    async def _collect(self) -> None:
        """Takes what the engine finished; the waiting and generating itself is in the lane."""
        while True:
            delivery = await self._engine_thread.finished()
            ticket, outcome = delivery.finished.ticket, delivery.finished.outcome
            image = self._at_engine.pop(ticket, None)
            if image is None:
                self.canary.finished(ticket, outcome)
                continue
            in_flight = image.owner
            self._watch.drawn(standard_images(image.job.steps, *image.size))
            waited = self._metrics.stage_seconds.labels("wait_gpu")
            waited.observe(max(0.0, delivery.admitted_at - image.ready_at))
            generated = self._metrics.stage_seconds.labels("generate")
            generated.observe(delivery.finished_at - delivery.admitted_at)
            in_flight.images_to_generate -= 1
            if not in_flight.images_to_generate:
                self._puller.generated(in_flight)
            if in_flight.settled:
                self._cost.lost("failed")
                continue
            async with self._ending(in_flight, image_is_made=True):
                if isinstance(outcome, errors.FleetError):
                    self._count_engine_failure(outcome)
                    raise outcome
                await self._drawn.put(_Drawn(image, outcome))

    async def _encode(self, drawn: _Drawn) -> None:
        image = drawn.image
        async with self._ending(image.owner, image_is_made=True):
            if image.owner.settled:
                self._cost.lost("failed")
                return
            text = infotext.parameters(image.job, image.index, image.size, self._engine.model_name)
            try:
                with self._metrics.stage_seconds.labels("encode").time():
                    file = await self._in_thread(
                        self._encode_threads, encode.encode, drawn.pixels, image.job.output, text
                    )
            except errors.TransientError as error:  # a flat image is the engine's failure
                self._count_engine_failure(error)
                raise
            self._engine_failures_in_a_row = 0
            await self._encoded.put(_Encoded(image, file))

    async def _upload(self, encoded: _Encoded) -> None:
        image = encoded.image
        in_flight = image.owner
        async with self._ending(in_flight, image_is_made=True):
            if in_flight.settled:
                self._cost.lost("failed")
                return
            name = image.job.blob_name(image.index)
            metadata = self._metadata(image)

            async def create() -> bool:
                in_flight.lease.check()
                file = encoded.file
                with self._watch.uploading(len(file.data)):
                    return await self._storage.blobs.create(
                        name, file.data, file.content_type, metadata
                    )

            with self._metrics.stage_seconds.labels("upload").time():
                written = await self._retry_policy.call(create)
            if written:
                in_flight.images_written += 1
                self.images_written += 1
                self._metrics.images.inc()
            else:
                self._cost.lost("duplicate")
            in_flight.images_to_store -= 1
            if not in_flight.images_to_store:
                await self._stored.put(in_flight)

    async def _acknowledge(self, in_flight: InFlightJob) -> None:
        with self._metrics.stage_seconds.labels("acknowledge").time():
            await self._settler.completed(in_flight)

    def _metadata(self, image: InFlightImage) -> dict[str, str]:
        """What rides along with the blob; Azure wants ASCII values."""
        facts = {
            "job": str(image.job.id),
            "seed": str(image.job.image_seed(image.index)),
            "worker": self._settings.name.encode("ascii", "replace").decode(),
            "attempt": str(image.owner.lease.message.delivery_count),
            "seconds": f"{time.monotonic() - image.owner.pulled_at:.3f}",
            **self._cost.record,
        }
        if image.job.images > 1:
            facts["images"] = str(image.job.images)
        if image.job.campaign:
            facts["campaign"] = image.job.campaign
        if image.job.metadata:
            facts["metadata"] = json.dumps(image.job.metadata)
        return facts

    def _count_engine_failure(self, error: errors.FleetError) -> None:
        if not isinstance(error, errors.TransientError):
            return
        self._watch.failed_image(error)
        self._engine_failures_in_a_row += 1
        # Once: what fails while the proof is drawn is the same suspicion.
        if self._engine_failures_in_a_row == self._settings.engine_failures:
            self._alarms.put_nowait(
                f"the engine failed {self._engine_failures_in_a_row} images in a row, the last"
                f" with: {error}"
            )

    async def _prove(self, alarm: str) -> None:
        reason = await self.canary.verdict(alarm)
        if reason is not None:
            raise errors.NodeError(reason)
        self._engine_failures_in_a_row = 0

    @contextlib.asynccontextmanager
    async def _ending(
        self, in_flight: InFlightJob, *, image_is_made: bool = False
    ) -> AsyncIterator[None]:
        """Whatever is raised inside ends *held*, and with it an image that the GPU has made."""
        try:
            in_flight.lease.check()
            yield
        except Exception as error:  # noqa: BLE001 - the settler tells them apart by class
            if image_is_made:
                self._cost.lost("failed")
            await self._settler.failed(in_flight, error)

    async def _in_thread(
        self, threads: ThreadPoolExecutor, function: Callable[..., Item], *arguments: object
    ) -> Item:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


async def _each(queue: asyncio.Queue[Item], work: Callable[[Item], Awaitable[None]]) -> None:
    while True:
        await work(await queue.get())
