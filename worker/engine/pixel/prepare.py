"""The work on a pixel stage's request away from the GPU: checks, schedule, text states, pixels."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from imagefleet import errors
from worker.engine import contract, sampler
from worker.engine.noise import NoiseStream
from worker.engine.pixel import schedules, text_stage, text_states
from worker.engine.pixel.checkpoint import PixelCheckpoint
from worker.engine.pixel.step import CHANNELS

#: Prompts whose states stay in memory: some 1.3 MB each.
_STATES_KEPT = 256


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine can start at once."""

    request: contract.ImageRequest
    schedule: sampler.Schedule
    states: torch.Tensor
    """Encoded text of the prompt and the negative prompt [2, tokens, width]."""
    upscaled: torch.Tensor | None
    """The image of the stage before [3, height, width] at this one's size, within -1 and 1."""
    noise_level: int | None
    """The timestep of the noise that it gets."""

    @property
    def calls(self) -> int:
        """UNet calls from noise to image."""
        return len(self.schedule.table)

    def guidance(self, call: int) -> float:
        """The guidance scale; up to 1 there is none, as in diffusers: the prompt's output alone."""
        is_unguided = any(self.schedule.unguided[call : call + 1])
        return 1.0 if is_unguided else max(1.0, self.request.cfg_scale)

    def noise(self) -> NoiseStream:
        """The image's noise: its own, then that of the upscaled image, then that of the steps."""
        request = self.request
        shape = (CHANNELS, request.height, request.width)
        draws = sum(self.schedule.noisy) + (self.upscaled is not None)
        draws += self.schedule.initial_churn is not None
        return NoiseStream(request.seed, shape, request.noise, factor=1, draws=draws)


class RequestPreparer:
    """Prepares requests for one stage; called from several threads."""

    def __init__(self, checkpoint: PixelCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._stage: text_stage.TextStage | None = None
        self._states: OrderedDict[str, torch.Tensor] = OrderedDict()

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest:
        """Checks a request and finds its text states.

        Raises:
            JobError: this stage cannot draw it.
            TransientError: its text states could not be read.
        """
        self._refuse_unsupported(request)
        noise = self._checkpoint.noise
        schedule = schedules.make_schedule(
            request.sampler, request.steps, noise, request.sampler_options
        )
        given = request.text_states or (None, None)
        prompts = str(request.prompt), str(request.negative_prompt)
        states = [self._find_states(*each) for each in zip(prompts, given, strict=True)]
        upscaled, level = self._read_image(request.init)
        return PreparedRequest(request, schedule, torch.stack(states), upscaled, level)

    def _refuse_unsupported(self, request: contract.ImageRequest) -> None:
        size = self._checkpoint.default_size
        if (request.width, request.height) != size:
            raise errors.JobError(
                f"{request.width}x{request.height} pixels cannot be drawn: this stage draws"
                f" {size[0]}x{size[1]} alone"
            )
        unsupported = {
            "LoRAs": request.loras,
            "a second pass (hires fix)": request.hires,
            "ControlNets": request.controls,
            "a mask": request.init is not None and request.init.mask is not None,
        }
        for name, value in unsupported.items():
            if value:
                raise errors.JobError(f"this model does not support {name}: it is a stage of IF")
        upscales = self._checkpoint.image_noise is not None
        if upscales and request.init is None:
            raise errors.JobError(
                "this model upscales the image of another stage: the job needs init_images"
            )
        if request.init is not None and not upscales:
            raise errors.JobError("this model does not support init_images: it is IF's first stage")

    def _find_states(self, prompt: str, path: Path | None) -> torch.Tensor:
        key = text_states.clean(prompt)
        with self._lock:
            if key in self._states:
                self._states.move_to_end(key)
                return self._states[key]
        own = self._checkpoint
        if path is None:
            states = self._text_stage().encode([prompt])[0]
        else:
            states = text_states.read(path, prompt, own.encoder, own.text_width)
        dtype: torch.dtype = own.unet.dtype
        states = states.to(dtype)
        with self._lock:
            self._states[key] = states
            if len(self._states) > _STATES_KEPT:
                self._states.popitem(last=False)
        return states

    def _text_stage(self) -> text_stage.TextStage:
        """The stage's own text encoder, on the CPU, from when it is needed."""
        folder = self._checkpoint.folder
        with self._lock:
            if self._stage is None:
                if not text_stage.has_encoder(folder):
                    raise errors.JobError(
                        "the prompt's text states are missing, and this stage has no text encoder:"
                        " `imagefleet files make text` makes them (docs/cascade.md)"
                    )
                self._stage = text_stage.TextStage(folder, torch.device("cpu"), torch.float32)
            return self._stage

    def _read_image(
        self, init: contract.InitImage | None
    ) -> tuple[torch.Tensor, int] | tuple[None, None]:
        """The image that is upscaled, as `IFSuperResolutionPipeline` does it, and its noise level.

        The level is the denoising strength as a share of all timesteps: IF's own, 250 of 1000, is a
        strength of 0.25.
        """
        noise = self._checkpoint.image_noise
        if init is None or noise is None:
            return None, None
        pixels = torch.from_numpy(init.pixels.copy()).permute(2, 0, 1)[None].float()
        pixels.div_(127.5).sub_(1)  # in place: the largest image takes 200 MB
        width, height = self._checkpoint.default_size
        upscaled = F.interpolate(pixels, (height, width), mode="bilinear", align_corners=True)
        timesteps = len(noise.alphas_cumprod)
        level = round(init.denoising_strength * timesteps)
        return upscaled[0], max(0, min(timesteps - 1, level))
