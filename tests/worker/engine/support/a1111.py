"""AUTOMATIC1111's img2img, inpainting and hires fix, written down from its formulas.

The networks are those of a diffusers pipeline, the samplers k-diffusion's own for sigmas, and DDIM
and PLMS as AUTOMATIC1111 writes them. One image at a time, in float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers.models.upsampling import Upsample2D
from PIL import Image

from worker.engine import contract
from worker.engine.passes import begin

Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mask:
    """[1, 4, height, width] of the latents: 1 is drawn anew; and the latents that stay."""

    drawn: torch.Tensor
    init: torch.Tensor

    def blend(self, latents: torch.Tensor) -> torch.Tensor:
        return latents * self.drawn + self.init * (1 - self.drawn)


@dataclass(frozen=True, slots=True)
class Reference:
    """Draws on a diffusers pipeline's networks; *k_diffusion* is the package.

    *conditioning* [1, 5, height, width] is what an inpainting checkpoint's UNet takes beside the
    latents.
    """

    pipeline: Any
    k_diffusion: Any
    conditioning: torch.Tensor | None = None

    def predict_noise(
        self, request: contract.ImageRequest, size: tuple[int, int]
    ) -> Predict:
        """The UNet's noise with guidance; *size* is the width and height that SDXL is told."""
        pipeline = self.pipeline
        extra = {}
        # Without words, a negative prompt is zeros for SDXL.
        words = {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt or None,
        }
        if hasattr(pipeline, "text_encoder_2"):
            cond, uncond, *pooled = pipeline.encode_prompt(**words)
            width, height = size
            ids = torch.tensor(
                [[height, width, 0, 0, height, width]] * 2, dtype=torch.float32
            )
            if pipeline.config.get("requires_aesthetics_score"):
                ids = torch.cat(self._ids_with_scores(size))
            extra["added_cond_kwargs"] = {
                "text_embeds": torch.cat(pooled),
                "time_ids": ids,
            }
        else:
            cond, uncond = pipeline.encode_prompt(
                **words,
                device="cpu",
                num_images_per_prompt=1,
                do_classifier_free_guidance=True,
            )
        vectors = torch.cat([cond, uncond])

        def predict(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            if self.conditioning is not None:
                x = torch.cat([x, self.conditioning], dim=1)
            both = pipeline.unet(
                torch.cat([x, x]), timestep.expand(2), vectors, **extra
            ).sample
            cond, uncond = both.chunk(2)
            return uncond + request.cfg_scale * (cond - uncond)

        return predict

    def _ids_with_scores(self, size: tuple[int, int]) -> Any:
        """Those of SDXL's refiner, with AUTOMATIC1111's settings as installed."""
        sides = size[::-1]
        corner = (0, 0)
        return self.pipeline._get_add_time_ids(
            sides,
            corner,
            sides,
            6.0,
            2.5,
            sides,
            corner,
            sides,
            torch.float32,
            self.pipeline.text_encoder_2.config.projection_dim,
        )

    @torch.no_grad()
    def img2img(
        self,
        request: contract.ImageRequest,
        init: torch.Tensor,
        *,
        steps: int,
        t_enc: int,
        mask: Mask | None = None,
        told: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Latents drawn from those of an image [1, 4, height, width] and the request's seed."""
        generator = torch.Generator().manual_seed(request.seed)
        noise = torch.randn(init.shape, generator=generator)
        predict = self.predict_noise(request, told or (request.width, request.height))
        if request.sampler in ("ddim", "plms"):
            latents = self._by_timesteps(
                request, init, noise, predict, steps=steps, t_enc=t_enc, mask=mask
            )
        else:
            with pytest.MonkeyPatch.context() as patch:
                draws = lambda x: torch.randn(x.shape, generator=generator)  # noqa: E731
                patch.setattr(torch, "randn_like", draws)
                latents = self._by_sigmas(
                    request, init, noise, predict, steps=steps, t_enc=t_enc, mask=mask
                )
        return mask.blend(latents) if mask else latents

    def _by_sigmas(
        self,
        request: contract.ImageRequest,
        init: torch.Tensor,
        noise: torch.Tensor,
        predict: Predict,
        *,
        steps: int,
        t_enc: int,
        mask: Mask | None,
    ) -> torch.Tensor:
        alphas = self.pipeline.scheduler.alphas_cumprod
        wrapped = self.k_diffusion.external.DiscreteEpsDDPMDenoiser(
            predict, alphas, quantize=False
        )

        def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            denoised = wrapped(x, sigma)
            return mask.blend(denoised) if mask else denoised

        sampling = self.k_diffusion.sampling
        name = request.sampler.removesuffix("_karras")
        sigmas = wrapped.get_sigmas(steps)
        if name != request.sampler:
            sigmas = sampling.get_sigmas_karras(
                steps, float(wrapped.sigma_min), float(wrapped.sigma_max)
            )
        taken = sigmas[steps - t_enc - 1 :]
        sample = getattr(sampling, f"sample_{name}")
        return sample(denoise, init + noise * taken[0], taken, disable=True)

    def _by_timesteps(
        self,
        request: contract.ImageRequest,
        init: torch.Tensor,
        noise: torch.Tensor,
        predict: Predict,
        *,
        steps: int,
        t_enc: int,
        mask: Mask | None,
    ) -> torch.Tensor:
        alphas = self.pipeline.scheduler.alphas_cumprod.double()
        timesteps = (torch.arange(0, 1000, 1000 // steps) + 1).clip(0, 999)
        alpha = alphas[timesteps[t_enc]]
        x = (init * alpha.sqrt() + noise * (1 - alpha).sqrt()).float()
        timesteps = timesteps[:t_enc]
        earlier = []

        def model(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return predict(mask.blend(x) if mask else x, timestep.float())

        def move(x: torch.Tensor, noise: torch.Tensor, at: int) -> torch.Tensor:
            now = alphas[timesteps[at]]
            then = alphas[timesteps[at - 1]]
            image = (x - (1 - now).sqrt() * noise) / now.sqrt()
            return (then.sqrt() * image + (1 - then).sqrt() * noise).float()

        for at in range(len(timesteps) - 1, 0, -1):
            output = model(x, timesteps[at])
            if request.sampler == "ddim":
                used = output
            elif not earlier:
                used = (output + model(move(x, output, at), timesteps[at - 1])) / 2
            elif len(earlier) == 1:
                used = (3 * output - earlier[-1]) / 2
            elif len(earlier) == 2:
                used = (23 * output - 16 * earlier[-1] + 5 * earlier[-2]) / 12
            else:
                used = (
                    55 * output - 59 * earlier[-1] + 37 * earlier[-2] - 9 * earlier[-3]
                ) / 24
            x = move(x, used, at)
            earlier.append(output)
        return x

    @torch.no_grad()
    def txt2img_image_conditioning(self, width: int, height: int) -> torch.Tensor:
        """`modules/processing.py`'s, with the mean of the VAE's distribution."""
        grey = torch.ones(1, 3, height, width) * 0.5
        latents = self.pipeline.vae.encode(grey * 2 - 1).latent_dist.mode()
        latents = latents * self.pipeline.vae.config.scaling_factor
        return F.pad(latents, (0, 0, 0, 0, 1, 0), value=1.0)

    @torch.no_grad()
    def inpainting_image_conditioning(
        self, pixels: contract.Pixels, image_mask: np.ndarray[Any, Any] | None
    ) -> torch.Tensor:
        """The same, with its `inpainting_mask_weight` of 1 and a mask that is rounded."""
        source = torch.from_numpy(np.asarray(pixels, np.float32) / 255).permute(
            2, 0, 1
        )[None]
        source = source * 2 - 1
        if image_mask is None:
            mask = source.new_ones(1, 1, *source.shape[-2:])
        else:
            mask = torch.round(
                torch.from_numpy(image_mask.astype(np.float32) / 255)[None, None]
            )
        masked = torch.lerp(source, source * (1.0 - mask), 1.0)
        latents = self.pipeline.vae.encode(masked).latent_dist.mode()
        latents = latents * self.pipeline.vae.config.scaling_factor
        mask = F.interpolate(mask, size=latents.shape[-2:])
        return torch.cat([mask, latents], dim=1)

    @torch.no_grad()
    def encode(self, pixels: np.ndarray[Any, Any]) -> torch.Tensor:
        """The mean of the VAE's distribution [1, 4, height, width]."""
        vae = self.pipeline.vae
        images = torch.from_numpy(np.asarray(pixels, np.float32) / 255).permute(
            2, 0, 1
        )[None]
        latents = vae.encode(images * 2 - 1).latent_dist.mode()
        return latents * vae.config.scaling_factor

    def keep(self, init: contract.InitImage, seed: int) -> Mask:
        """The mask in cells of the latents, and the latents with what its content begins with.

        *seed* is that of the noise which is the content, if it is.
        """
        small = Image.fromarray(init.mask).convert("RGB").resize((8, 8))
        cells = np.around(np.asarray(small, np.float32)[..., 0] / 255)
        drawn = torch.from_numpy(cells).expand(1, 4, -1, -1)
        latents = self.encode(begin.prepare_image(init, 8).pixels)
        if init.masked_content == "latent noise":
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(latents.shape, generator=generator)
            latents = latents * (1 - drawn) + noise * drawn
        elif init.masked_content == "latent nothing":
            latents = latents * (1 - drawn)
        return Mask(drawn, latents)

    @torch.no_grad()
    def decode(
        self, latents: torch.Tensor, *, rounds: bool = True
    ) -> np.ndarray[Any, Any]:
        vae = self.pipeline.vae
        images = vae.decode(latents / vae.config.scaling_factor).sample
        levels = (images[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
        return (levels.round() if rounds else levels).numpy().astype(np.uint8)


def resize_last(unet: Any) -> None:
    """Has diffusers' UNet upsample sides that do not halve evenly as `TorchHijackForUnet.cat`.

    ldm's `Upsample` doubles and convolves; the result is resized to the skip's size by nearest.
    """
    for module in unet.modules():
        if isinstance(module, Upsample2D):
            module.forward = functools.partial(_double_and_resize, module.forward)


def _double_and_resize(
    double: Callable[..., torch.Tensor],
    x: torch.Tensor,
    output_size: Any = None,
    *_: Any,
) -> torch.Tensor:
    doubled = double(x)
    return (
        doubled
        if output_size is None
        else F.interpolate(doubled, output_size, mode="nearest")
    )


def interpolate(
    latents: torch.Tensor, width: int, height: int, **how: Any
) -> torch.Tensor:
    """Latents [1, 4, height, width] in a size in pixels."""
    return F.interpolate(latents, size=(height // 8, width // 8), **how)
