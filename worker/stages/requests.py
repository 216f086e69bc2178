"""Reads the files that a job names and makes the engine's requests of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from imagefleet import concurrency, errors
from imagefleet.files import safetensors
from imagefleet.job import differences
from imagefleet.job.message import Job
from imagefleet.pricing import families
from worker.engine import contract
from worker.inputs.reader import NO_INPUTS, Inputs, JobFiles

#: Jobs prepared at once: one that waits for its LoRA's download must not hold up the others.
PREPARERS = 8


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
