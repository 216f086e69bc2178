"""Reads the files that a job names and makes the engine's requests of it."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import NamedTuple

from imagefleet import concurrency
from imagefleet.errors import UnsettledFileError
from imagefleet.files import safetensors
from imagefleet.job import differences
from imagefleet.job.message import Job
from imagefleet.job.prompt import LoraTag
from imagefleet.job.sizes import Size
from imagefleet.pricing import families
from worker.accelerator import Accelerator
from worker.engine.contract import Embedding, Engine, ImageRequest, Lora
from worker.inputs.reader import NO_INPUTS, Inputs, JobFiles

#: Jobs prepared at once: one that waits for its LoRA's download must not hold up the others.
PREPARERS = 8


class JobRequests(NamedTuple):
    """The requests of a job's images, and what they were made of."""

    requests: list[ImageRequest]
    loras: Sequence[Lora] = ()
    inputs: Inputs = NO_INPUTS


@dataclass(eq=False)
class RequestReader:
    """Makes requests of jobs, with the files that these name."""

    engine: Engine
    files: JobFiles
    threads: ThreadPoolExecutor

    def __post_init__(self) -> None:
        own = Accelerator.of_family(self.engine.family)
        self._usual = self.files.accelerator or own

    def fit(self, job: Job) -> Job:
        """The job as the worker's accelerator, or the model itself, wants it; see `Accelerator`."""
        return job if self._usual is None else self._usual.fit(job)

    async def read(
        self, job: Job, images: Collection[int] | None = None
    ) -> JobRequests:
        """The requests of a job's *images*, by default all; raises as the libraries of files."""
        width, height = self.engine.default_size
        size = job.width or width, job.height or height
        if job.only_upscales:
            inputs = await self.files.inputs.read_upscale(job)
            requests = requests_of(job, size, (), (), images, inputs)
            return JobRequests(requests, (), inputs)
        for detail in job.details:  # or it would be missed once the image is drawn
            await self.files.detectors.resolve(detail.ad_model)
        if job.keep is not None:
            await concurrency.gather(*map(self.files.judges.find, job.keep.networks))
        tags = job.loras
        found = await concurrency.gather(*map(self._find_lora, tags))
        loras = dict(zip(tags, found, strict=True))
        drawn_with = tuple(map(loras.__getitem__, job.parsed_prompt.loras))
        embeddings = await self._find_embeddings(job)
        inputs = NO_INPUTS
        if job.has_inputs or self.engine.text_encoder is not None:
            family = families.find(self.engine.family)
            inputs = await self.files.inputs.read(
                job, size, self.engine, is_enlarged=family.enlarges
            )
            if inputs.init is not None:
                height, width = inputs.init.pixels.shape[:2]
                scaled = family.scaled((width, height)) or self.engine.default_size
                size = job.width or scaled[0], job.height or scaled[1]
            second, _ = job.hires_prompts
            if inputs.hires and second and second.loras != job.parsed_prompt.loras:
                own = tuple(map(loras.__getitem__, second.loras))
                inputs = replace(inputs, hires=replace(inputs.hires, loras=own))
        requests = requests_of(job, size, drawn_with, embeddings, images, inputs)
        return JobRequests(requests, list(loras.values()), inputs)

    async def read_rested(self, job: Job) -> JobRequests:
        """`read`, once nobody writes the files any more."""
        while True:
            with contextlib.suppress(UnsettledFileError):
                return await self.read(job)
            await asyncio.sleep(safetensors.REST_SECONDS)

    async def _find_lora(self, tag: LoraTag) -> Lora:
        library = self.files.loras
        path = await library.resolve(tag.name)
        return Lora(
            name=tag.name,
            path=path,
            text_encoder_weight=tag.text_encoder_weight,
            unet_weight=tag.unet_weight,
            identity=library.identity(path),
        )

    async def _find_embeddings(self, job: Job) -> tuple[Embedding, ...]:
        """The embeddings that the prompts name."""
        names = await concurrency.UNTIL_ACCESS.call(self.files.embeddings.names)
        if not names:
            return ()
        find = partial(self.engine.find_embeddings, job.all_prompts, names)
        found = await asyncio.get_running_loop().run_in_executor(self.threads, find)
        return await concurrency.gather(*map(self._find_embedding, found))

    async def _find_embedding(self, name: str) -> Embedding:
        return Embedding(name, *await self.files.embeddings.resolve_hashed(name))


def requests_of(
    job: Job,
    size: Size,
    loras: tuple[Lora, ...],
    embeddings: tuple[Embedding, ...],
    images: Collection[int] | None = None,
    inputs: Inputs = NO_INPUTS,
) -> list[ImageRequest]:
    """A job's *images*, by default all, of *size* (width, height), with its prompts' files."""
    width, height = size
    if inputs.upscale is not None and inputs.init is not None:
        height, width = inputs.init.pixels.shape[:2]
    for name in differences.of_job(job, size):
        differences.warn(name)
    return [
        ImageRequest(
            prompt=job.parsed_prompt,
            negative_prompt=job.parsed_negative_prompt,
            loras=loras,
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
            stop=Event() if job.keep and job.keep.early else None,
            is_detailed=bool(job.details),
        )
        for index in (range(job.images_to_draw) if images is None else images)
    ]
