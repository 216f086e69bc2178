"""Latents to pixels: decoded in slices between the ticks, copied to the host asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderTiny
from torch import Tensor
from torch.nn import Conv2d, GroupNorm

from imagefleet.errors import TransientError
from imagefleet.job.passes.first import VaeDecoder
from imagefleet.telemetry.logs import log
from worker.engine import errors as engine_errors
from worker.engine.contract import Finished, Outcome, Pixels
from worker.engine.kernels.graph import Graph, GraphPool
from worker.engine.kernels.layers import time_convolutions

Vae: TypeAlias = AutoencoderKL | AutoencoderKLFlux2 | AutoencoderTiny

#: Pixels per VAE call: it needs far more memory per pixel than the UNet.
_SLICE_PIXELS = 1024 * 1024

#: Images per VAE call, however small: a compiled call always computes a full slice.
_MAX_IMAGES = 8

#: Rows of a layer's output in a stripe; even, for upsampling.
_ROWS = 32

#: Ticks of its lane that a finished image waits for a compiled slice to fill up.
_MAX_WAIT_TICKS = 8


#: Frees memory of the device; False if there is nothing to free.
FreeMemory = Callable[[], bool]

#: Pixels [images, height, width, 3] in uint8, and is-finite [images].
Decoded = tuple[Tensor, Tensor]

#: Key of images that are decoded together: their VAE and the shape of their latents.
_SliceKey = tuple[Vae | None, torch.Size]


class _FinishedLatents(NamedTuple):
    ticket: int
    latents: Tensor
    since_tick: int
    slice_key: _SliceKey
    is_estimate: bool


@dataclass(frozen=True)
class HostCopy:
    """Images whose pixels are being copied to the host."""

    #: [images, height, width, 3]
    pixels: Tensor
    #: [images]: false if an image has NaN or infinity.
    is_finite: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def begin(cls, pixels: Tensor, is_finite: Tensor, images: int) -> HostCopy:
        """Copies the first *images* of what `to_pixels` returns, once the stream is so far."""
        on_gpu = pixels.is_cuda

        def to_host(tensor: Tensor) -> Tensor:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            return host.copy_(tensor, non_blocking=True)

        copies = to_host(pixels[:images]), to_host(is_finite[:images])
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        return cls(*copies, copied)

    @property
    def is_done(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Pixels | None]:
        """The images, once they have reached the host; None for one with NaN or infinity."""
        if self.copied is not None:
            self.copied.synchronize()
        images: list[Pixels | None] = list(self.pixels.numpy())
        for at in (~self.is_finite).nonzero():
            images[at] = None
        return images


class Decoder:
    """The VAE, and the latents and pixels on their way through it; without one, of images."""

    def __init__(
        self,
        vae: Vae | None,
        factor: int = 1,
        tiny: AutoencoderTiny | None = None,
    ) -> None:
        """*factor*: pixels for each of the latents' rows. *tiny* decodes unless the VAE is to."""
        self._vae = vae
        self._usual = tiny or vae
        self.has_tiny = tiny is not None
        self._pixels_per_latent = factor**2
        self.slice_pixels = _SLICE_PIXELS
        self.max_images = _MAX_IMAGES
        #: True where the memory is too short for whole layers: see `decode_in_stripes`.
        self.is_striped = False

        #: Memory of the compiled calls' graphs; None without a GPU.
        self.pool: GraphPool | None = None
        self._may_compile = True
        self._queue: dict[_SliceKey, list[_FinishedLatents]] = {}
        self._copies = deque[tuple[Sequence[_FinishedLatents], HostCopy]]()
        self._failed: list[Finished] = []
        self._compiled: dict[_SliceKey, tuple[Tensor, Graph]] = {}
        #: What cannot be compiled, or failed once it was.
        self._refused: set[_SliceKey] = set()
        # Of single images for which the memory was too short.
        self._striped_shapes: set[torch.Size] = set()
        self._tick = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._copies or self._failed)

    def add(
        self,
        ticket: int,
        latents: Tensor,
        by: VaeDecoder | None = None,
        named: AutoencoderKL | None = None,
        *,
        is_estimate: bool = False,
    ) -> None:
        """Queues an image's latents [4, height, width], which must not change any more.

        *named* is what it asks for in place of the checkpoint's own VAE; it is not compiled. An
        estimate is decoded in the same tick, and so before its image, whatever decodes that.
        """
        vae = self._usual if self.has_tiny and by != "Full" else named or self._vae
        key = vae, latents.shape
        self._queue.setdefault(key, []).append(
            _FinishedLatents(ticket, latents, self._tick, key, is_estimate)
        )

    def uncompiled(self, shape: torch.Size) -> list[Vae]:
        """What may be compiled for latents of *shape* [4, height, width], and is not."""
        if not self._may_compile or self.is_striped:
            return []
        known = self._compiled.keys() | self._refused
        own = dict.fromkeys((self._usual, self._vae))
        return [vae for vae in own if vae is not None and (vae, shape) not in known]

    def compile(self, shape: torch.Size) -> Iterator[Graph]:
        """Compiles for latents of *shape* [4, height, width].

        Yields each graph before its first run, to be given its kernels.
        """
        for vae in self.uncompiled(shape):
            yield from self._compile(vae, shape)

    def _compile(self, vae: Vae, shape: torch.Size) -> Iterator[Graph]:
        size = self._slice_size(shape)
        latents = torch.zeros((size, *shape), device=vae.device)
        name = "the VAE" if vae is self._vae else "TAESD"
        graph = Graph(
            f"{name} for {size} images of {shape[2]}x{shape[1]} latents",
            f"vae-{shape[2]}x{shape[1]}-{size}",
            decode,
            (vae, latents),
            self.pool,
        )
        yield graph
        if not graph.is_compiled:
            self._refused.add((vae, shape))
            return
        if not self._may_compile or size != self._slice_size(shape):
            return  # given up meanwhile
        time_convolutions(lasting=True)
        try:
            graph()
        except Exception as error:
            if not engine_errors.is_out_of_memory(error):
                raise
            log.warning(
                f"{name} runs uncompiled: not enough memory to compile it",
                action="compile_failed",
            )
            self._refused.add((vae, shape))
        else:
            self._compiled[vae, shape] = (latents, graph)

    def run(
        self, *, flush: bool, lanes: int = 1, free_memory: FreeMemory | None = None
    ) -> None:
        """Decodes full slices and those that have waited long enough; with *flush*, all.

        *lanes* take turns, each with images of its own shape. *free_memory* is called where not
        even one image's stripes fit.
        """
        self._tick += 1
        for key, waiting in list(self._queue.items()):
            size = self._slice_size(key[1])
            has_estimate = any(each.is_estimate for each in waiting)
            is_urgent = flush or has_estimate or key not in self._compiled
            while waiting:
                oldest = waiting[0].since_tick
                is_overdue = self._tick - oldest >= lanes * _MAX_WAIT_TICKS
                if not (len(waiting) >= size or is_urgent or is_overdue):
                    break
                part = waiting[:size]
                del waiting[:size]
                self._decode_or_share(part, free_memory)
            if not waiting:
                del self._queue[key]

    def decode(self, latents: Tensor, vae: Vae | None = None) -> Decoded:
        """Decodes latents [images, 4, height, width] at once, uncompiled."""
        is_striped = self.is_striped or latents.shape[1:] in self._striped_shapes
        return decode(vae or self._usual, latents, in_stripes=is_striped)

    def collect(self, *, wait: bool) -> list[Finished]:
        """The images that have reached the host; *wait* blocks for at least one slice, if any.

        Raises NodeError if the GPU itself is broken.
        """
        finished = self._failed
        self._failed = []
        while self._copies and (self._copies[0][1].is_done or (wait and not finished)):
            part, copy = self._copies.popleft()
            for drawn, pixels in zip(part, copy.wait(), strict=True):
                outcome = self._retry_in_float32(drawn) if pixels is None else pixels
                finished.append(Finished(drawn.ticket, outcome, drawn.is_estimate))
        return finished

    def forget_compiled(self) -> None:
        """Frees what has been compiled; it may be compiled again."""
        for _, compiled in self._compiled.values():
            compiled.release()
        self._compiled.clear()

    def clear(self) -> None:
        """Drops everything, unfinished images included."""
        self._queue.clear()
        self._copies.clear()
        self._failed.clear()
        self.forget_compiled()

    def _slice_size(self, shape: torch.Size) -> int:
        return max(
            1,
            min(self.max_images, _MAX_IMAGES, self.slice_pixels // self._pixels(shape)),
        )

    def _pixels(self, shape: torch.Size) -> int:
        return int(shape[1] * shape[2]) * self._pixels_per_latent

    def _decode_or_share(
        self, part: Sequence[_FinishedLatents], free_memory: FreeMemory | None
    ) -> None:
        """Decodes a slice; if that fails, in halves, down to single images and their stripes.

        If these do not fit, memory is taken from the slots.
        """
        try:
            self._copies.append((part, self._decode(part)))
            return  # noqa: TRY300 - the rest handles the failure
        except Exception as error:  # noqa: BLE001 - this slice's outcome
            failure = engine_errors.classify(error)
            out_of_memory = engine_errors.is_out_of_memory(error)
            log.warning(
                f"decoding {len(part)} images at once failed: {failure.message}",
                exc_info=True,
                action="decode_failed",
            )
        # Outside the handler, where the error's traceback no longer holds any tensors.
        _, shape = key = part[0].slice_key
        if key in self._compiled:
            self._compiled.pop(key)[1].release()
            self._refused.add(key)
        torch.cuda.empty_cache()
        if half := len(part) // 2:
            if out_of_memory:
                self.slice_pixels = min(self.slice_pixels, half * self._pixels(shape))
            self._decode_or_share(part[:half], free_memory)
            self._decode_or_share(part[half:], free_memory)
            return
        can_retry = out_of_memory
        if can_retry and shape in self._striped_shapes:
            can_retry = free_memory is not None and free_memory()
        if can_retry:
            self._striped_shapes.add(shape)
            self._decode_or_share(part, free_memory)
        else:
            only = part[0]
            self._failed.append(Finished(only.ticket, failure, only.is_estimate))

    @torch.no_grad()
    def _decode(self, part: Sequence[_FinishedLatents]) -> HostCopy:
        vae, shape = key = part[0].slice_key
        latents = torch.stack([drawn.latents for drawn in part])
        if key in self._compiled:
            held, compiled = self._compiled[key]
            held[: len(part)].copy_(latents)
            pixels, is_finite = compiled()
        else:
            time_convolutions(lasting=len(part) == self._slice_size(shape))
            pixels, is_finite = self.decode(latents, vae)
        return HostCopy.begin(pixels, is_finite, len(part))

    def _retry_in_float32(self, drawn: _FinishedLatents) -> Outcome:
        """Decodes in float32, from then on, with a VAE that overflows in float16 as some do."""
        vae, _ = drawn.slice_key
        if vae is None:
            return TransientError("the image is NaN")
        if vae.dtype == torch.float16 and drawn.latents.isfinite().all():
            log.warning(
                "the VAE overflows in float16: it decodes in float32 from now on",
                action="vae_widened",
            )
            vae.float()
            if vae is self._usual or (self._vae and self._vae.dtype == torch.float32):
                self.forget_compiled()
                self._may_compile = False
        if vae.dtype == torch.float32:
            (again,) = self._decode([drawn]).wait()
            if again is not None:
                return again
        return TransientError("the image is NaN")


def decode(vae: Vae | None, latents: Tensor, *, in_stripes: bool = False) -> Decoded:
    """Decodes latents [images, 4, height, width]; see `to_pixels`."""
    return to_pixels(to_images(vae, latents, in_stripes=in_stripes))


def from_patches(vae: AutoencoderKLFlux2, patches: Tensor) -> Tensor:
    """FLUX.2's latents of what is drawn: patches of 2x2, normalised by the VAE's statistics."""
    deviation, mean = _statistics(vae)
    return F.pixel_shuffle(patches * deviation + mean, 2)


def to_patches(vae: AutoencoderKLFlux2, latents: Tensor) -> Tensor:
    """The reverse of `from_patches`; a last row or column that fills no patch is cut off."""
    deviation, mean = _statistics(vae)
    height, width = (side // 2 * 2 for side in latents.shape[-2:])
    return (F.pixel_unshuffle(latents[..., :height, :width], 2) - mean) / deviation


def _statistics(vae: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean of each channel of the patches."""
    own = vae.bn
    deviation = (own.running_var.float() + own.eps).sqrt()
    shape = (1, -1, 1, 1)
    return deviation.view(shape), own.running_mean.float().view(shape)


def to_images(vae: Vae | None, latents: Tensor, *, in_stripes: bool = False) -> Tensor:
    """The VAE's images of latents [images, 4, height, width], from -1 to 1, in float32."""
    if vae is None:
        return latents
    if isinstance(vae, AutoencoderKLFlux2):
        scaled = from_patches(vae, latents)
    else:
        scaled = latents / vae.config.scaling_factor
        if vae.config.shift_factor:
            scaled = scaled + vae.config.shift_factor
    scaled = scaled.to(vae.dtype)
    if getattr(vae, "post_quant_conv", None) is not None:
        scaled = vae.post_quant_conv(scaled)
    # A tiny one takes far less memory, and the rows of an image that tiles have no end.
    in_stripes = (
        in_stripes
        and not isinstance(vae, AutoencoderTiny)
        and vae.decoder.conv_in.padding_mode == "zeros"
    )
    images: Tensor = (
        decode_in_stripes(vae.decoder, scaled) if in_stripes else vae.decoder(scaled)
    )
    return images.float()


def to_pixels(images: Tensor) -> Decoded:
    """VAE output [images, 3, height, width] to pixels."""
    levels = ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 1).contiguous(), images.isfinite().flatten(1).all(
        dim=1
    )


#: Stripes [rows, channels, height, width], after the row of pixels that each begins at.
_Stripes = Iterator[tuple[int, Tensor]]


@dataclass(frozen=True)
class _Image:
    """A layer's input; with *conv*, each pixel of x twice in both directions, then convolved."""

    #: [rows, channels, height, width]
    x: Tensor
    conv: Conv2d | None = None

    @property
    def height(self) -> int:
        return self.x.shape[2] * (1 if self.conv is None else 2)

    def part(self, top: int, bottom: int) -> Tensor:
        """The image's rows of pixels from *top* to *bottom*, without the latter."""
        if self.conv is None:
            return self.x[:, :, top:bottom]
        above = max(0, top - 1)
        below = min(self.height, bottom + 1)
        first = above // 2
        last = (below + 1) // 2
        part = F.interpolate(self.x[:, :, first:last], scale_factor=2.0)
        part = part[:, :, above - 2 * first : below - 2 * first]
        return _convolve(self.conv, part, top == 0, bottom == self.height)


def decode_in_stripes(decoder: Any, latents: Tensor) -> Tensor:
    """Output of diffusers' decoder [rows, 3, height, width], computed in a third of the memory.

    Each layer is computed to its end before the next, its input a stripe at a time with the rows
    that a convolution needs beside it. Group norms take the whole image first, so no seams appear.
    Upsampled images are never held: their rows are computed each time they are needed, three times
    in all.
    """
    x: Tensor = decoder.mid_block(decoder.conv_in(latents))
    image = _Image(x)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = _add_resnet(resnet, image)
            image = _Image(x)
        for sampler in block.upsamplers or ():  # one at most
            image = _Image(x, sampler.conv)
    return _join(
        _normalise_and_convolve(decoder.conv_norm_out, decoder.conv_out, image), image
    )


def _add_resnet(resnet: Any, image: _Image) -> Tensor:
    """A residual block's output, in the place of its input where that has the same shape."""
    inner = _Image(
        _join(_normalise_and_convolve(resnet.norm1, resnet.conv1, image), image)
    )
    in_place = image.conv is None and resnet.conv_shortcut is None
    output = image.part(0, image.height) if in_place else torch.empty_like(inner.x)
    for top, changed in _normalise_and_convolve(resnet.norm2, resnet.conv2, inner):
        bottom = top + changed.shape[2]
        part = image.part(top, bottom)
        if resnet.conv_shortcut is not None:
            part = resnet.conv_shortcut(part)
        torch.add(changed, part, out=output[:, :, top:bottom])
    return output


def _join(parts: _Stripes, image: _Image) -> Tensor:
    """The whole of what is computed a stripe at a time, as high as *image*."""
    output = None
    for top, part in parts:
        if output is None:
            is_last = part.is_contiguous(memory_format=torch.channels_last)
            output = torch.empty(
                (*part.shape[:2], image.height, part.shape[3]),
                dtype=part.dtype,
                device=part.device,
                memory_format=torch.channels_last
                if is_last
                else torch.contiguous_format,
            )
        output[:, :, top : top + part.shape[2]] = part
    if output is None:
        raise ValueError("an image without rows")
    return output


def _normalise_and_convolve(norm: GroupNorm, conv: Conv2d, image: _Image) -> _Stripes:
    """A 3x3 convolution of the activated group norm."""
    scale, shift = _scale_and_shift(norm, image)
    for top, bottom in _stripes(image):
        above = max(0, top - 1)
        below = min(image.height, bottom + 1)
        normed = (
            image.part(above, below)
            .to(torch.float32, copy=True)
            .mul_(scale)
            .add_(shift)
        )
        activated = F.silu(normed.to(conv.weight.dtype), inplace=True)
        yield top, _convolve(conv, activated, top == 0, bottom == image.height)


def _stripes(image: _Image) -> Iterator[tuple[int, int]]:
    for top in range(0, image.height, _ROWS):
        yield top, min(top + _ROWS, image.height)


def _convolve(conv: Conv2d, part: Tensor, is_first: bool, is_last: bool) -> Tensor:
    """*part* has a row more at each end inside the image."""
    part = F.pad(part, (0, 0, int(is_first), int(is_last)))
    return F.conv2d(part, conv.weight, conv.bias, padding=(0, 1))


def _scale_and_shift(norm: GroupNorm, image: _Image) -> tuple[Tensor, Tensor]:
    """The norm of the whole image as a product and a sum in float32 [rows, channels, 1, 1].

    The sums of all stripes are in float64, in which the squares' mean less the mean's square has
    enough digits.
    """
    count = 0
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    for top, bottom in _stripes(image):
        part = image.part(top, bottom).float()
        grouped = part.view(len(part), norm.num_groups, -1, *part.shape[2:])
        count += grouped[0, 0].numel()
        total = total + grouped.sum((2, 3, 4), dtype=torch.float64)
        squares = squares + grouped.square().sum((2, 3, 4), dtype=torch.float64)
    mean = torch.as_tensor(total / count)
    deviation = (squares / count - mean.square() + norm.eps).rsqrt()
    per_group = norm.num_channels // norm.num_groups
    by_channel = torch.stack([mean, deviation]).float().repeat_interleave(per_group, 2)
    mean, deviation = by_channel[..., None, None]
    scale = deviation * norm.weight.float()[:, None, None]
    return scale, norm.bias.float()[:, None, None] - mean * scale
