"""Images to latents and back between passes: on the stager's thread and stream, beside the ticks.

AUTOMATIC1111 draws an encoded image's latents from the VAE's distribution, with whatever state
torch's generator is in. Here they are its mean, so that the same job gives the same image.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from cachetools import LRUCache
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderTiny
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from torch import Tensor, nn

from imagefleet.errors import TransientError
from imagefleet.files.safetensors import Identity, UnusableError, identify
from imagefleet.telemetry.logs import log
from worker.engine import checkpoint, decoder
from worker.engine import errors as engine_errors
from worker.engine.contract import Pixels
from worker.engine.families import reading
from worker.engine.files import safetensors
from worker.engine.files.network_cache import NetworkCache, assign
from worker.engine.kernels import layers
from worker.engine.passes.begin import PreparedImage, levels_of

#: What is remembered of images, latents and conditioning: those of a job begin with the same one.
_REMEMBERED = 32


class ImageCoder:
    """The VAE between passes; for one thread."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self.vae = vae
        #: Network that computes: the VAE, or a copy of it in float32.
        self._vae = vae
        self.size_bytes = sum(each.nbytes for each in vae.parameters())
        self._known = LRUCache[object, Tensor](_REMEMBERED)

    @functools.cached_property
    def tiling(self) -> ImageCoder:
        """Coder for images that tile."""
        return ImageCoder(layers.tiling(self.vae))

    def encode_init(self, image: PreparedImage) -> Tensor:
        """The latents [4, height, width] of an image to begin with; remembered."""
        if (latents := self._known.get(image)) is None:
            latents = self._known[image] = self.encode(image.pixels)
        return latents

    def encode(self, pixels: Pixels) -> Tensor:
        """Latents [4, height, width] in float32 on the device; raises TransientError for NaN."""
        return self._to_latents(self._images_of(pixels))

    def condition(self, image: PreparedImage | None, width: int, height: int) -> Tensor:
        """Extra inputs of an inpainting checkpoint's UNet [5, height, width]; cached.

        As AUTOMATIC1111 (`inpainting_image_conditioning` with `inpainting_mask_weight` 1): the
        mask, and the latents of the image with grey below it. Without a mask all is below it, in
        txt2img as well. *width* and *height* in pixels. Raises TransientError for NaN.
        """
        hidden = None if image is None else image.hidden
        key = (width, height) if hidden is None else ("hidden", image)
        if (known := self._known.get(key)) is not None:
            return known
        device = self._vae.device
        if image is None or hidden is None:
            hidden = torch.ones((1, height, width), device=device)
            seen = torch.zeros((1, 3, height, width), device=device)
        else:
            hidden = hidden.to(device)
            seen = self._images_of(image.pixels) * (1 - hidden)
        latents = self._to_latents(seen)
        mask = F.interpolate(hidden[None], latents.shape[1:])[0]
        conditioning = self._known[key] = torch.cat([mask, latents])
        return conditioning

    def _images_of(self, pixels: Pixels) -> Tensor:
        """[1, 3, height, width] on the device, from -1 to 1."""
        return levels_of(pixels, self._vae.device) / 255 * 2 - 1

    def _to_latents(self, images: Tensor) -> Tensor:
        return self._finite(
            lambda vae: _encode(vae, images), "the latents of an image are"
        )

    def decode(self, latents: Tensor, tiny: AutoencoderTiny | None = None) -> Pixels:
        """The pixels of latents [4, height, width], rounded down as AUTOMATIC1111 does here.

        By the VAE, or by *tiny*. Raises TransientError if they are NaN.
        """
        images = self._finite(lambda vae: _decode(tiny or vae, latents), "the image is")
        levels = ((images / 2 + 0.5).clamp(0, 1) * 255).to(torch.uint8)
        pixels: Pixels = levels[0].permute(1, 2, 0).cpu().numpy()
        return pixels

    def clear(self) -> None:
        self._known.clear()
        self._vae = self.vae
        self.__dict__.pop("tiling", None)

    def _finite(self, compute: Callable[[AutoencoderKL], Tensor], what: str) -> Tensor:
        """Runs the VAE; in float32 from the first time on that its output is not finite."""
        found = compute(self._vae)
        if not found.isfinite().all() and self._vae.dtype != torch.float32:
            log.warning(
                f"the VAE overflows in {self._vae.dtype}: between passes it computes in float32"
                " from now on",
                action="vae_widened",
            )
            self._vae = copy.deepcopy(self.vae).float()
            found = compute(self._vae)
        if not found.isfinite().all():
            raise TransientError(f"{what} NaN")
        return found


#: Prefixes of tensors of a VAE's training, which have no use.
_OF_TRAINING = ("loss.", "model_ema.")


class Vaes(NetworkCache[ImageCoder]):
    """VAEs of files, in diffusers' names or in those of the original release."""

    def __init__(
        self, vae: AutoencoderKL, *, overflows: bool, has_own_layers: bool
    ) -> None:
        """*vae* is the checkpoint's, whose architecture they have to have.

        *overflows*: its activations exceed float16 (`checkpoint.scale_down`).
        """
        super().__init__("VAE", vae.device, vae.dtype)
        self._config = dict(vae.config)
        self._overflows = overflows
        self._has_own_layers = has_own_layers

    def load(self, identity: Identity) -> AutoencoderKL:
        found = {  # in whole checkpoints, with a prefix
            name.removeprefix("first_stage_model.").removeprefix("vae."): tensor
            for name, tensor in safetensors.tensors_of(identity).items()
            if not name.startswith(_OF_TRAINING)
        }
        network = reading.build(AutoencoderKL, self._config)
        if not any(name.startswith("decoder.up_blocks.") for name in found):
            try:
                found = convert_ldm_vae_checkpoint(found, self._config)
            except reading.LOADING_ERRORS as error:
                raise UnusableError(
                    f"is no VAE of this model: {reading.brief(error)}"
                ) from error
        assign(network, found, torch.float32 if self._overflows else self._dtype)
        if self._overflows:
            checkpoint.scale_down(network)
        loaded: AutoencoderKL = nn.Module.to(network, dtype=self._dtype)
        return loaded

    def finish(self, network: AutoencoderKL, _path: Path) -> ImageCoder:
        if self._has_own_layers:
            layers.replace_modules(network, layers.group_norm, layers.upsampler)
        return ImageCoder(network)


def load_for_good(path: Path, vae: AutoencoderKL, *, overflows: bool) -> None:
    """Gives a checkpoint's VAE, just read and not summed yet, a file's weights."""
    with safetensors.named(f"the VAE {path.name!r}"):
        read = Vaes(vae, overflows=overflows, has_own_layers=False).load(identify(path))
    vae.load_state_dict(read.state_dict(), assign=True)  # their memory may be a file's


def _decode(vae: decoder.Vae, latents: Tensor) -> Tensor:
    try:
        return decoder.to_images(vae, latents[None])
    except Exception as error:
        if not engine_errors.is_out_of_memory(error):
            raise
    # Outside the handler, where the error's traceback no longer holds any tensors.
    return decoder.to_images(vae, latents[None], in_stripes=True)


def _encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    moments = vae.encoder(layers.channels_last(images.to(vae.dtype)))
    if vae.quant_conv is not None:
        moments = vae.quant_conv(moments)
    mean, _ = moments.float().chunk(2, dim=1)
    if isinstance(vae, AutoencoderKLFlux2):
        return decoder.to_patches(vae, mean)[0]
    if vae.config.shift_factor:
        mean = mean - vae.config.shift_factor
    latents: Tensor = (mean * vae.config.scaling_factor)[0]
    return latents
