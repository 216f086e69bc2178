"""Reads what jobs are given: their images from the storage, and the files that they name.

One object reads them all for a worker's life.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from imagefleet import concurrency
from imagefleet.errors import JobError, MissingFileError, SetupError, UnusableFileError
from imagefleet.files import kinds
from imagefleet.job import sizes
from imagefleet.job.message import DEFAULT_CAMPAIGN, MAX_IMAGE_BYTES, Job
from imagefleet.job.passes import extras, hires
from imagefleet.job.passes import img2img as given
from imagefleet.job.sizes import Size
from imagefleet.records.pictures import read_packed
from imagefleet.signing import TrustedJobs, trusted_keys
from imagefleet.storage.open import Storage
from worker.accelerator import Accelerator
from worker.engine.contract import (
    Control,
    Engine,
    HiresPass,
    InitImage,
    Pixels,
    Refiner,
    Upscale,
    Vae,
)
from worker.engine.pixel import text_states
from worker.files.library import EmbeddingLibrary, FileLibrary, Source, read_whole
from worker.files.manifest import FileHashes
from worker.inputs import img2img, pictures
from worker.inputs.img2img import Overlay
from worker.judges.networks import Judges
from worker.models.checkpoints import OtherModels
from worker.settings import WorkerSettings

#: Images decoded and resized at once: one of the largest takes some 200 MB meanwhile.
DECODED_AT_ONCE = 2

#: Settings of a file that all jobs are drawn with.
OWN = ("accelerator", "vae")


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a job's requests beside its prompts, and the overlay of their images."""

    init: InitImage | None = None
    hires: HiresPass | None = None
    text_states: tuple[Path, Path] | None = None
    controls: tuple[Control, ...] = ()
    overlay: Overlay | None = None
    vae: Vae | None = None
    refiner: Refiner | None = None
    upscale: Upscale | None = None
    #: AUTOMATIC1111's text in the file of the image that is enlarged.
    parameters: str = ""


NO_INPUTS = Inputs()


class InputReader:
    """Reads the inputs of jobs; those of a job's images are read once."""

    def __init__(
        self,
        source: Source,
        storage: Storage,
        models: OtherModels,
        campaigns: str,
    ) -> None:
        """*campaigns* is the setting `input_campaigns`."""
        self._models = models
        # A campaign may be called "own".
        opened = "" if campaigns == "own" else campaigns
        self._campaigns = {name.strip() for name in opened.split(",")}
        self._storage = storage
        self._containers = {"files": source.blobs, "images": storage.blobs}
        self._upscalers = FileLibrary(source, kinds.UPSCALER)
        self._controlnets = FileLibrary(source, kinds.CONTROLNET)
        self.vaes = FileLibrary(source, kinds.VAE)
        self._text_states = FileLibrary(source, kinds.TEXT)
        self._room = asyncio.Semaphore(DECODED_AT_ONCE)

    async def read(
        self,
        job: Job,
        size: Size,
        engine: Engine,
        *,
        is_enlarged: bool = False,
    ) -> Inputs:
        """The inputs of a job whose first pass has *size*, (width, height) in pixels.

        *is_enlarged*: the engine itself brings the image that the job begins with to this size.
        Raises JobError if an image or a file does not exist or cannot be used, or a size is
        refused; else as `FileLibrary.resolve`.
        """
        # First: they are what a job lacks most easily, and small.
        encoder = engine.text_encoder
        texts = None if encoder is None else await self._find_texts(job, encoder)
        init, overlay = await self._begin(job, None if is_enlarged else size)
        controls = []
        for at, unit in enumerate(job.controls):
            what = f"alwayson_scripts.controlnet.args[{at}].image"
            path = await self._controlnets.resolve(unit.model)
            image = await self._file(job, what, unit.image)
            async with self._room:
                read = await asyncio.to_thread(
                    pictures.read, f"{what}: the image", image
                )
                pixels = await asyncio.to_thread(
                    pictures.control, read, unit.resize_mode, sizes.whole_cells(*size)
                )
            controls.append(
                Control(
                    unit.model,
                    path,
                    pixels,
                    unit.weight,
                    unit.guidance_start,
                    unit.guidance_end,
                )
            )
        return Inputs(
            init=init,
            hires=await self._hires(job, size, engine.model_name),
            text_states=texts,
            controls=tuple(controls),
            overlay=overlay,
            vae=Vae(job.sd_vae, await self.vaes.resolve(job.sd_vae))
            if job.sd_vae
            else None,
            refiner=Refiner(
                await self._models.find(job.refiner_checkpoint, engine.model_name),
                job.refiner_switch_at,
                job.refiner_switch_by_sample_steps,
            )
            if job.refiner_checkpoint
            else None,
        )

    async def read_upscale(self, job: Job) -> Inputs:
        """The image of a job that only enlarges it, and how; raises as `read`."""
        data = await self._file(job, "init_images", job.init_images[0])

        def prepare() -> tuple[Pixels, str]:
            image = pictures.read("init_images: the image", data).convert("RGB")
            pixels: Pixels = np.asarray(image)
            if (
                pixels == pixels[0, 0]
            ).all():  # which would look like an engine's failure
                raise JobError("init_images: the image is all one colour")
            return pixels, pictures.parameters(data)

        async with self._room:
            pixels, parameters = await asyncio.to_thread(prepare)
        size = pixels.shape[1], pixels.shape[0]
        whole, (width, height) = extras.sizes_after(job, size)
        paths = [
            await self._upscalers.resolve(name) if name in job.upscaler_files else None
            for name in job.upscalers
        ]
        upscale = Upscale(
            width,
            height,
            whole,
            extras.scale(job, size),
            tuple(zip(job.upscalers, paths, strict=True)),
            job.extras_upscaler_2_visibility,
        )
        init = InitImage(pixels, denoising_strength=0.0)
        return Inputs(init=init, upscale=upscale, parameters=parameters)

    async def _begin(
        self, job: Job, size: Size | None
    ) -> tuple[InitImage | None, Overlay | None]:
        if not job.init_images:
            return None, None
        image = await self._file(job, "init_images", job.init_images[0])
        mask = None if job.mask is None else await self._file(job, "mask", job.mask)

        def prepare() -> tuple[InitImage, Overlay | None]:
            return img2img.begin(
                job,
                pictures.read("init_images: the image", image),
                None if mask is None else pictures.read("mask: the image", mask),
                size,
            )

        async with self._room:
            return await asyncio.to_thread(prepare)

    async def _hires(self, job: Job, size: Size, own_model: str) -> HiresPass | None:
        if not job.enable_hr:
            return None
        whole, (width, height) = hires.sizes_after(job, size)
        path = None
        if job.upscaler_file is not None:
            path = await self._upscalers.resolve(job.upscaler_file)
        checkpoint = await self._models.find(job.hr_checkpoint_name, own_model)
        prompt, negative_prompt = job.hires_prompts
        sampler = hires.sampler(job)
        return HiresPass(
            width,
            height,
            job.denoising_strength,
            hires.steps(job),
            job.upscaler,
            path,
            prompt,
            negative_prompt,
            None if sampler == job.sampler else sampler,
            job.options_of(sampler),
            whole=whole,
            checkpoint=checkpoint,
        )

    async def _find_texts(self, job: Job, encoder: str) -> tuple[Path, Path]:
        """The files of the prompt's text states and the negative prompt's."""

        async def find(which: str, prompt: str) -> Path:
            try:
                return await self._text_states.resolve(
                    text_states.stem(prompt, encoder)
                )
            except MissingFileError as error:
                raise MissingFileError(
                    f"the text states of the {which} by {encoder!r} are not in the storage, and"
                    " this model has no text encoder of its own: `imagefleet files make text JOBS"
                    f" --model FOLDER` makes and stores those of a file of jobs ({error.message})"
                ) from None

        return await concurrency.gather(
            find("prompt", str(job.parsed_prompt)),
            find("negative prompt", str(job.parsed_negative_prompt)),
        )

    async def _file(self, job: Job, field: str, source: str) -> bytes:
        """The file of an image that a field of a job names, or has in it."""
        place = given.place(source)
        if place is None:
            return given.content(source)
        own = job.campaign or DEFAULT_CAMPAIGN
        campaign = place.campaign or own
        if campaign != own and self._campaigns.isdisjoint({campaign, "*"}):
            raise JobError(
                f"{field}: {source!r} is an image of the campaign {campaign!r}, and the job is of"
                f" {own!r}: give workers --input-campaigns {campaign}, or store the image in"
                f" {given.INPUTS} of the container of files"
            )
        blobs = self._containers[place.container]
        try:
            # Images are never overwritten; inputs may be half-copied.
            read = (
                blobs.read
                if place.container == "images"
                else partial(read_whole, blobs)
            )
            data = await concurrency.UNTIL_ACCESS.call(
                partial(read, place.blob, MAX_IMAGE_BYTES)
            )
            if data is None and place.container == "images":
                # Tokens that may not list records find none in a pack.
                with contextlib.suppress(SetupError):
                    data = await read_packed(self._storage, place.blob)
            if data is None:
                await blobs.check()  # without its container, the job is not at fault
        except UnusableFileError as error:
            raise UnusableFileError(f"{field}: {error.message}") from None
        except SetupError as error:
            if place.container == "files":
                raise
            # A worker's token allows to create images, not to read them.
            raise JobError(
                f"{field}: {source!r} cannot be read with this worker's credentials: give it tokens"
                f" of `imagefleet keys mint worker --chains`, or store the image in"
                f" {given.INPUTS} of the container of files ({error.message})"
            ) from None
        if data is None:
            raise MissingFileError(
                f"{field}: there is no {place.blob!r} in the container {blobs.name!r}"
            )
        return data


class JobFiles:
    """Libraries of LoRAs and embeddings, the reader of input images, and the files' hashes."""

    def __init__(
        self,
        storage: Storage,
        settings: WorkerSettings,
        detectors: Path | None = None,
        *,
        is_empty: bool = False,
    ) -> None:
        """The files of a storage, unless it *is_empty*, and of the settings' own folders.

        *detectors*: a folder of them, for the library.
        """
        trusted = trusted_keys(settings.trusted_key)
        source = Source(
            storage.files,
            settings.cache,
            settings.cache_megabytes * 2**20,
            trusted,
            is_empty,
        )
        self.loras = FileLibrary(source, kinds.LORA, settings.lora_directory)
        self.embeddings = EmbeddingLibrary(source, settings.embedding_directory)
        models = OtherModels(settings, storage.files)
        self.inputs = InputReader(source, storage, models, settings.input_campaigns)
        self.detectors = FileLibrary(source, kinds.DETECTOR, detectors)
        self.judges = Judges(source, settings.device)
        self.hashes = FileHashes()
        #: The jobs that are taken; None: they need no signature.
        self.trusted = TrustedJobs(trusted, storage.scope) if trusted else None
        self.accelerator = (
            Accelerator.of(settings.accelerator) if settings.accelerator else None
        )
        #: The files that all jobs are drawn with, or their names in the storage, by setting.
        self.own = {name: each for name in OWN if (each := getattr(settings, name))}

    async def own_paths(self) -> dict[str, Path]:
        """The files of `own`; raises SetupError if the storage has none that can be used."""
        libraries = {"accelerator": self.loras, "vae": self.inputs.vaes}
        paths = {}
        for name, source in self.own.items():
            try:
                is_file = source.endswith(".safetensors")
                paths[name] = (
                    Path(source) if is_file else await libraries[name].resolve(source)
                )
            except JobError as error:  # of which no job is to fail
                raise SetupError(f"--{name}: {error.message}") from None
        return paths
