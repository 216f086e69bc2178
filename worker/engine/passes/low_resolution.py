"""The image that an upscaling checkpoint's UNet sees beside its latents, in their size.

As diffusers' `StableDiffusionUpscalePipeline` prepares it: with noise of a level that the UNet is
told, from the image's own seed and drawn before the noise of the latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from imagefleet import errors
from imagefleet.job.samplers import MAX_SIDE, MIN_SIDE
from worker.engine import contract
from worker.engine.families.noise import ImageNoise

#: diffusers' default, and that of DeepFloyd IF's third stage there, as shares of all timesteps.
_USUAL, _OF_CASCADE = 0.02, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LowResolution:
    """Shared by all images of a job."""

    image: torch.Tensor
    """[3, height, width] from -1 to 1."""
    noise: ImageNoise
    level: int
    """The timestep of its noise."""

    def with_noise(self, drawn: torch.Tensor) -> torch.Tensor:
        """The image with noise of variance 1 that was *drawn*."""
        levels = torch.tensor([self.level])
        noisy: torch.Tensor = self.noise.scheduler.add_noise(self.image[None], drawn[None], levels)
        return noisy[0]


def prepare(request: contract.ImageRequest, noise: ImageNoise, factor: int) -> LowResolution:
    """Checks and prepares the image of a request whose sides are *factor* times the image's.

    Its denoising strength is the level of the noise as a share of all timesteps.

    Raises:
        JobError: a job without an image, of another size, or with what the model does not have.
    """
    init = request.init
    if init is None:
        raise errors.JobError("this model enlarges an image: the job needs init_images")
    unsupported = {
        "a second pass (hires fix)": request.hires,
        "ControlNets": request.controls,
        "a mask": init.mask is not None,
    }
    for name, value in unsupported.items():
        if value:
            raise errors.JobError(f"this model enlarges an image: it does not support {name}")
    height, width, _ = init.pixels.shape
    least, most = MIN_SIDE // factor, MAX_SIDE // factor
    if any(side % factor or not least <= side <= most for side in (width, height)):
        raise errors.JobError(
            f"init_images: an image of {width}x{height} pixels cannot be enlarged: this model takes"
            f" sides of {least} to {most} pixels that are multiples of {factor}"
        )
    if (request.width, request.height) != (factor * width, factor * height):
        raise errors.JobError(
            f"this model makes {factor * width}x{factor * height} pixels of an image of"
            f" {width}x{height}, and the job asks for {request.width}x{request.height}: leave width"
            " and height out, or give them as null in a stage, which has those of the stage before"
        )
    level = round(init.denoising_strength * noise.timesteps)
    if not 0 <= level <= noise.max_level:
        raise errors.JobError(
            f"denoising_strength is {init.denoising_strength:g}, a noise of level {level} on the"
            f" image: this model knows levels up to {noise.max_level}, which is a"
            f" denoising_strength of {noise.max_level / noise.timesteps:g}; usual are {_USUAL:g}"
            f" and, after DeepFloyd IF, {_OF_CASCADE:g}"
        )
    image = torch.from_numpy(init.pixels.copy()).permute(2, 0, 1).float() / 255 * 2 - 1
    return LowResolution(image, noise, level)
