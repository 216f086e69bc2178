"""The work on a pixel stage's request away from the GPU: checks, schedule, text states, pixels."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from cachetools import LRUCache

from imagefleet import errors
from worker.engine import contract
from worker.engine.passes.low_resolution import LowResolution
from worker.engine.pixel import schedules, text_stage, text_states
from worker.engine.pixel.checkpoint import PixelCheckpoint
from worker.engine.slots.prepare import PreparedRequest, Preparer

#: Prompts whose states stay in memory: some 1.3 MB each.
_STATES_KEPT = 256


class StagePreparer(Preparer):
    """Prepares requests for one stage."""

    def __init__(self, checkpoint: PixelCheckpoint) -> None:
        super().__init__(checkpoint.unet.device)
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._stage: text_stage.TextStage | None = None
        self._states: LRUCache[str, torch.Tensor] = LRUCache(_STATES_KEPT)

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest:
        self._refuse_unsupported(request)
        noise = self._checkpoint.noise
        schedule = schedules.make_schedule(
            request.sampler, request.steps, noise, request.sampler_options
        )
        if request.cfg_scale < 1:  # as in diffusers: the prompt's output alone
            schedule = replace(schedule, unguided=(True,) * len(schedule.table))
        given = request.text_states or (None, None)
        prompts = str(request.prompt), str(request.negative_prompt)
        states = [self._find_states(*each) for each in zip(prompts, given, strict=True)]
        return PreparedRequest(
            request, schedule, states=torch.stack(states), enlarged=self._read_image(request.init)
        )

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

    def _read_image(self, init: contract.InitImage | None) -> LowResolution | None:
        """The image that is upscaled, as `IFSuperResolutionPipeline` does it, and its noise level.

        The level is the denoising strength as a share of all timesteps: IF's own, 250 of 1000, is a
        strength of 0.25.
        """
        noise = self._checkpoint.image_noise
        if init is None or noise is None:
            return None
        pixels = torch.from_numpy(init.pixels.copy()).permute(2, 0, 1)[None].float()
        pixels.div_(127.5).sub_(1)  # in place: the largest image takes 200 MB
        width, height = self._checkpoint.default_size
        upscaled = F.interpolate(pixels, (height, width), mode="bilinear", align_corners=True)
        level = round(init.denoising_strength * noise.timesteps)
        return LowResolution(upscaled[0], noise, max(0, min(noise.max_level, level)))
