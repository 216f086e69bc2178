"""Prepares a pass' inputs beside noise, away from the GPU: images, masks, steps, ControlNets.

img2img and second passes take the end of a schedule, as in AUTOMATIC1111: `t_enc` is the number of
the step, from the end, whose noise the image gets (`samplers.schedule.make_schedule`). An upscaling
checkpoint's UNet sees an image beside its latents, in their size, as diffusers'
`StableDiffusionUpscalePipeline` prepares it: with noise of a level that the UNet is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from imagefleet.errors import JobError
from imagefleet.files.safetensors import Identity
from imagefleet.job.noise import Noise
from imagefleet.job.passes.controlnet import MOST_CONTROLS
from imagefleet.job.prompt import Prompt
from imagefleet.job.sizes import MAX_SIDE, MIN_SIDE
from worker.engine.contract import Control, ImageRequest, InitImage, Pixels
from worker.engine.families.reading import ImageNoise
from worker.engine.sampler import NoiseStream

#: AUTOMATIC1111's limit: at 1, img2img would take one step more than there are.
_MOST_STRENGTH = 0.999


class Steps(NamedTuple):
    """The end of a schedule."""

    #: The number of steps of the whole schedule.
    steps: int
    t_enc: int


def img2img(steps: int, denoising_strength: float) -> Steps:
    """A job's *steps* at full strength, fewer at less."""
    return Steps(steps, int(min(denoising_strength, _MOST_STRENGTH) * steps))


def second_pass(steps: int, denoising_strength: float) -> Steps:
    """A second pass of so many *steps* at any strength; none at 0."""
    if denoising_strength == 0:
        return Steps(0, 0)
    return Steps(int(steps / min(denoising_strength, _MOST_STRENGTH)), steps - 1)


#: AUTOMATIC1111's: the radii of the blurs that are laid upon each other, and how often each is.
_BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """Shared by all images of a job."""

    #: [height, width, 3]: to be encoded.
    pixels: Pixels
    #: [1, height, width] of the latents: 1 where they stay, else 0; None without a mask.
    kept: Tensor | None
    masked_content: Literal["fill", "original", "latent noise", "latent nothing"]
    #: [1, height, width] of the pixels: 1 where inpainting checkpoints' UNets do not see the image,
    #: else 0; None without a mask, when they see nothing of it.
    hidden: Tensor | None = None

    def with_content(self, latents: Tensor, request: ImageRequest) -> Tensor:
        """The image's latents [4, height, width] with noise or nothing below the mask, if so asked.

        The noise is the first of a seed, whatever its subseed.
        """
        if self.kept is None or self.masked_content in ("fill", "original"):
            return latents
        kept = self.kept.to(latents.device)
        if self.masked_content == "latent nothing":
            return latents * kept
        settings = Noise(source=request.noise.source)
        seed = request.seed if request.fill_seed is None else request.fill_seed
        stream = NoiseStream(seed, latents.shape, settings, factor=1, draws=0)
        return latents * kept + stream.first().to(latents.device) * (1 - kept)


def levels_of(pixels: Pixels, device: torch.device | None = None) -> Tensor:
    """An image's levels from 0 to 255, [1, 3, height, width] in float32; by default on the CPU."""
    return torch.from_numpy(pixels.copy()).to(device).permute(2, 0, 1)[None].float()


def prepare_image(init: InitImage, factor: int) -> PreparedImage:
    """Prepares the image of a request; *factor*: pixels for each of the latents' rows."""
    if init.mask is None:
        return PreparedImage(init.pixels, None, init.masked_content)
    mask = Image.fromarray(init.mask)
    pixels = init.pixels
    if init.masked_content != "original":
        # The colours around the mask come below it: ever finer blurs of what is outside.
        outside = Image.new("RGBa", mask.size)
        opaque = Image.fromarray(pixels).convert("RGBA").convert("RGBa")
        outside.paste(opaque, mask=ImageOps.invert(mask))
        filled = Image.new("RGBA", mask.size)
        for radius, times in _BLURS:
            layer = outside.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
            for _ in range(times):
                filled.alpha_composite(layer)
        pixels = np.asarray(filled.convert("RGB"))
    sides = mask.width // factor, mask.height // factor
    small = np.asarray(mask.resize(sides, Image.Resampling.BICUBIC))
    kept = torch.from_numpy(1 - np.around(small.astype(np.float32) / 255))
    hidden = torch.from_numpy(np.around(init.mask.astype(np.float32) / 255))
    return PreparedImage(pixels, kept[None], init.masked_content, hidden[None])


#: diffusers' default, and that of DeepFloyd IF's third stage there, as shares of all timesteps.
_USUAL = 0.02
_OF_CASCADE = 0.1


@dataclass(frozen=True, eq=False)
class LowResolution:
    """Shared by all images of a job."""

    #: [3, height, width] from -1 to 1.
    image: Tensor
    noise: ImageNoise
    #: The timestep of its noise.
    level: int

    def with_noise(self, drawn: Tensor) -> Tensor:
        """The image with noise of variance 1 that was *drawn*."""
        noisy: Tensor = self.noise.scheduler.add_noise(
            self.image[None], drawn[None], torch.tensor([self.level])
        )
        return noisy[0]


def refuse_unsupported(request: ImageRequest, what: str) -> None:
    """Raises JobError for what no model supports that is *what*, such as "enlarges an image"."""
    prompts = [
        p for p in (request.prompt, request.negative_prompt) if isinstance(p, Prompt)
    ]
    unsupported = {
        "AND or prompt editing": any(
            len(p.subprompts) * len(p.states) > 1 for p in prompts
        ),
        "a second pass (hires fix)": request.hires,
        "ControlNets": request.controls,
        "a VAE by name (sd_vae)": request.vae,
        "tiling": request.tiling,
        "a refiner": request.refiner,
        "ADetailer": request.is_detailed,
        "a mask": request.init is not None and request.init.mask is not None,
    }
    for name, value in unsupported.items():
        if value:
            raise JobError(f"this model {what}: it does not support {name}")


def prepare_enlarged(
    request: ImageRequest, noise: ImageNoise, factor: int
) -> LowResolution:
    """Checks and prepares the image of a request whose sides are *factor* times the image's.

    Its denoising strength is the level of the noise as a share of all timesteps. Raises JobError
    for a job without an image, of another size, or with what the model does not have.
    """
    init = request.init
    if init is None:
        raise JobError("this model enlarges an image: the job needs init_images")
    refuse_unsupported(request, "enlarges an image")
    height, width, _ = init.pixels.shape
    least = MIN_SIDE // factor
    most = MAX_SIDE // factor
    can_be_taken = all(
        least <= side <= most and side % factor == 0 for side in (width, height)
    )
    if not can_be_taken or (request.width, request.height) != (
        factor * width,
        factor * height,
    ):
        raise JobError(
            f"this model makes {factor} times the sides of an image, which are multiples of"
            f" {factor} from {least} to {most}; it has {width}x{height} pixels, the job asks for"
            f" {request.width}x{request.height}: leave width and height out, or give them as null"
            " in a stage, which has those of the stage before"
        )
    level = round(init.denoising_strength * noise.timesteps)
    if not 0 <= level <= noise.max_level:
        raise JobError(
            f"denoising_strength is {init.denoising_strength:g}, a noise of level {level} on the"
            f" image: this model knows levels up to {noise.max_level}, which is a"
            f" denoising_strength of {noise.max_level / noise.timesteps:g}; usual are {_USUAL:g}"
            f" and, after DeepFloyd IF, {_OF_CASCADE:g}"
        )
    return LowResolution(levels_of(init.pixels)[0] / 255 * 2 - 1, noise, level)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedControl:
    """A ControlNet of a request, ready for the engine."""

    identity: Identity
    pixels: Pixels = field(repr=False)
    #: The ControlNet's weight at each call of the UNet.
    weights: tuple[float, ...]


def prepare_controls(
    controls: Sequence[tuple[Identity, Control]],
    finished: Sequence[int],
    steps: int,
) -> tuple[PreparedControl, ...]:
    """A pass' ControlNets that have any effect, in an order that depends on their files alone.

    *finished*: steps at each call of the UNet, of so many *steps*. Raises JobError if there are too
    many.
    """
    prepared = [
        PreparedControl(
            identity, control.pixels, control_weights(control, finished, steps)
        )
        for identity, control in controls
    ]
    prepared = [each for each in prepared if any(each.weights)]
    if len(prepared) > MOST_CONTROLS:
        raise JobError(
            f"the job has {len(prepared)} ControlNets; at most {MOST_CONTROLS} work at once"
        )
    return tuple(sorted(prepared, key=lambda each: each.identity))


def control_weights(
    control: Control, finished: Sequence[int], steps: int
) -> tuple[float, ...]:
    """The weight at each of a pass' calls of the UNet; 0 outside of its steps.

    It works in the steps that sd-webui-controlnet gives it: where the number of *finished* steps,
    as AUTOMATIC1111's `state.sampling_step` counts them (0 in the first two, 1 in the third), is
    between *start* and *end* times all steps of the pass, both included. diffusers compares other
    numbers, and so may differ by a step.
    """
    most = max(1, steps)
    return tuple(
        control.weight if control.start <= done / most <= control.end else 0.0
        for done in finished
    )
