"""Parts of an engine for one stage of a cascade in pixels: preparer and stager.

All images of a stage have one size; it has no VAE, LoRAs or ControlNets.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from imagefleet.errors import JobError
from imagefleet.job.prompt import Prompt
from worker.engine.contract import ImageRequest, InitImage, Settings
from worker.engine.control.cache import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.files.safetensors import ReadOnce
from worker.engine.lora.shared import Merger
from worker.engine.passes import begin
from worker.engine.passes.begin import LowResolution, levels_of
from worker.engine.passes.checkpoints import Caches
from worker.engine.pixel import schedules, text_states
from worker.engine.pixel.checkpoint import PixelCheckpoint
from worker.engine.pixel.text_stage import TextStage
from worker.engine.pixel.unet import PixelUnet
from worker.engine.slots.parts import Parts
from worker.engine.slots.prepare import AssembledLoras, PreparedRequest, Preparer
from worker.engine.slots.queue import SlotJob, Staged
from worker.engine.slots.staging import Stager

#: Prompts whose states stay in memory: some 1.3 MB each.
_STATES_KEPT = 256


class StagePreparer(Preparer):
    def __init__(self, checkpoint: PixelCheckpoint) -> None:
        super().__init__(checkpoint.unet.device)
        self._checkpoint = checkpoint
        self._stage = ReadOnce[TextStage](1)
        self._states = ReadOnce[Tensor](_STATES_KEPT)

    def prepare(self, request: ImageRequest) -> PreparedRequest:
        self._refuse_unsupported(request)
        schedule = schedules.make_schedule(
            request.sampler,
            request.steps,
            self._checkpoint.noise,
            request.sampler_options,
        )
        weight = (
            request.prompt.weights[0] if isinstance(request.prompt, Prompt) else 1.0
        )
        if request.cfg_scale * weight < 1:  # as in diffusers: the prompt's output alone
            schedule = replace(schedule, unguided=(True,) * len(schedule.table))
        given = request.text_states or (None, None)
        prompts = str(request.prompt), str(request.negative_prompt)
        states = [self._find_states(*each) for each in zip(prompts, given, strict=True)]
        return PreparedRequest(
            request,
            self._checkpoint.family,
            schedule,
            prompts=prompts,
            states=torch.stack(states),
            enlarged=self._read_image(request.init),
        )

    def _refuse_unsupported(self, request: ImageRequest) -> None:
        size = self._checkpoint.default_size
        if (request.width, request.height) != size:
            raise JobError(
                f"{request.width}x{request.height} pixels cannot be drawn: this stage draws"
                f" {size[0]}x{size[1]} alone"
            )
        if request.loras:
            raise JobError("this model is a stage of IF: it does not support LoRAs")
        begin.refuse_unsupported(request, "is a stage of IF")
        upscales = self._checkpoint.image_noise is not None
        if upscales and request.init is None:
            raise JobError(
                "this model upscales the image of another stage: the job needs init_images"
            )
        if request.init is not None and not upscales:
            raise JobError(
                "this model does not support init_images: it is IF's first stage"
            )

    def _find_states(self, prompt: str, path: Path | None) -> Tensor:
        def read() -> Tensor:
            own = self._checkpoint
            if path is not None or own.states_encoder is not None:
                states = text_states.read(path, prompt, own.encoder, own.text_width)
                return states.to(own.unet.dtype)
            # The stage's own text encoder, on the CPU, from when it is needed.
            stage = self._stage.get(
                own.folder,
                lambda: TextStage(own.folder, torch.device("cpu"), torch.float32),
            )
            return stage.encode([prompt])[0].to(own.unet.dtype)

        return self._states.get(text_states.clean(prompt), read)

    def _read_image(self, init: InitImage | None) -> LowResolution | None:
        """The image that is upscaled, as `IFSuperResolutionPipeline` does it, and its noise level.

        The level is the denoising strength as a share of all timesteps: IF's own, 250, is 0.25.
        """
        noise = self._checkpoint.image_noise
        if init is None or noise is None:
            return None
        pixels = levels_of(init.pixels)
        pixels.div_(127.5).sub_(1)  # in place: the largest image takes 200 MB
        width, height = self._checkpoint.default_size
        upscaled = F.interpolate(
            pixels, (height, width), mode="bilinear", align_corners=True
        )
        level = round(init.denoising_strength * noise.timesteps)
        return LowResolution(upscaled[0], noise, max(0, min(noise.max_level, level)))


class PixelStager(Stager):
    """Draws the first noise, and copies text states and the image that is upscaled."""

    @torch.no_grad()
    def _load(self, job: SlotJob, _loras: AssembledLoras) -> Staged:
        prepared = job.prepared
        noise = prepared.noise(self._channels, self._factor)
        images = prepared.first_latents(noise)
        conditioning = added = None
        if prepared.enlarged is not None:
            drawn = torch.empty_like(images)
            noise.fill(drawn)
            conditioning, added = self._copy_enlarged(prepared.enlarged, drawn)
        if prepared.states is None:
            raise RuntimeError("a stage's requests have text states")
        return Staged(
            self._copy(images),
            self._copy(prepared.states),
            noise,
            added=added,
            conditioning=conditioning,
        )


def of_pixels(checkpoint: PixelCheckpoint, settings: Settings) -> Parts:
    """The parts of an engine for a stage; all of its images have one size."""
    limit = schedules.limit_of(checkpoint.noise)
    caches = Caches(ControlNets(checkpoint.unet, has_own_layers=False))
    return Parts(
        model=checkpoint,
        settings=replace(settings, blocks=1, compiled_modes=("shared",)),
        unet=PixelUnet(
            checkpoint.unet, limit, is_compiled=settings.packages is not None
        ),
        preparer=StagePreparer(checkpoint),
        caches=caches,
        stager=PixelStager(checkpoint, caches),
        merger=Merger(checkpoint.unet),
        decoder=Decoder(None),
    )
