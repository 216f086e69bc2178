"""The prepare stage: a message becomes requests that the engine can take at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from imagefleet import errors, retry
from imagefleet.job.message import Job, read_job
from imagefleet.storage import protocol
from worker.engine import contract
from worker.files.loras import LoraLibrary
from worker.metrics import WorkerMetrics
from worker.settle import InFlightImage, InFlightJob, Settler
from worker.stages.generate import GenerateStage

#: Jobs prepared at once: one that waits for its LoRA's download must not hold up the others.
PREPARERS = 8


@dataclass(slots=True, eq=False)
class PrepareStage:
    """Reads jobs, resolves their LoRAs and encodes their prompts; feeds the generate stage."""

    engine: contract.Engine
    generate: GenerateStage
    library: LoraLibrary
    settler: Settler
    metrics: WorkerMetrics
    max_attempts: int
    queue: asyncio.Queue[InFlightJob] = field(
        default_factory=lambda: asyncio.Queue(protocol.MAX_RECEIVE), init=False
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PREPARERS, "prepare"), init=False
    )

    async def run(self) -> NoReturn:
        while True:
            entry = await self.queue.get()
            await self.settler.attempt(entry, partial(self._prepare, entry))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, entry: InFlightJob) -> None:
        with self.metrics.stage_seconds.labels("prepare").time():
            job = self._read(entry)
            size = self._size(job)
            loop = asyncio.get_running_loop()
            prepared = [
                await loop.run_in_executor(self._threads, self.engine.prepare, request)
                for request in await self._requests(job, size)
            ]
        entry.images_to_generate = entry.images_to_store = len(prepared)
        for index, request in enumerate(prepared):
            image = InFlightImage(entry, job, index, size)
            if not await self.generate.submit(image, request):
                return  # the worker drains, and hands this job back
        entry.submitted = True

    def _read(self, entry: InFlightJob) -> Job:
        message = entry.lease.message
        job = read_job(message.body, message.id)
        entry.job = job  # from here on, a failure is recorded with the job's id and campaign
        if message.delivery_count > self.max_attempts:
            raise errors.JobError(
                f"the job was delivered {message.delivery_count} times and never ended: the"
                " workers that had it died or lost their leases"
            )
        if job.model not in {None, self.engine.model_name}:
            raise errors.MissingFileError(
                f"the job asks for the model {job.model!r}; this worker has"
                f" {self.engine.model_name!r}"
            )
        return job

    def _size(self, job: Job) -> tuple[int, int]:
        width, height = self.engine.default_size
        return job.width or width, job.height or height

    async def _requests(self, job: Job, size: tuple[int, int]) -> list[contract.ImageRequest]:
        prompt = job.parsed_prompt
        paths = await asyncio.gather(
            *(
                retry.UNTIL_ACCESS.call(partial(self.library.resolve, tag.name))
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
