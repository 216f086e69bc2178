"""Finished latents to pixels: in slices between the ticks, and to the host without waiting."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL

from imagefleet import errors
from worker.engine import contract
from worker.engine import errors as engine_errors
from worker.engine.decode import to_pixels
from worker.engine.kernels.compile import Compiled, GraphPool

log = logging.getLogger(__name__)

#: Pixels decoded in one call: the VAE needs far more memory for each than the UNet does.
SLICE_PIXELS = 1024 * 1024

#: Images decoded in one call, however small: a compiled call decodes as many, wanted or not.
_MOST_IMAGES = 8

#: Ticks that a finished image waits for a compiled slice to fill up.
_PATIENCE_TICKS = 8


@dataclass(frozen=True, slots=True)
class _Drawn:
    ticket: int
    latents: torch.Tensor
    since_tick: int


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A slice whose pixels are being copied to the host."""

    images: Sequence[_Drawn]
    pixels: torch.Tensor
    """[images, height, width, 3]"""
    sound: torch.Tensor
    """[images]: whether all of it is finite."""
    copied: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class Decoder:
    """The VAE and what waits for it."""

    def __init__(
        self,
        vae: AutoencoderKL,
        *,
        slice_pixels: int = SLICE_PIXELS,
        backend: str | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self._vae = vae
        self.slice_pixels = slice_pixels
        self.most_images = _MOST_IMAGES
        self._backend = backend
        self._pool = pool
        self._queue: deque[_Drawn] = deque()
        self._on_their_way: deque[_OnItsWay] = deque()
        self._failed: list[contract.Finished] = []
        self._compiled: dict[torch.Size, tuple[torch.Tensor, Compiled]] = {}
        self._tick = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._on_their_way or self._failed)

    @property
    def recompiles(self) -> int:
        return sum(compiled.recompiles for _, compiled in self._compiled.values())

    def add(self, ticket: int, latents: torch.Tensor) -> None:
        """Takes an image's latents [4, height, width], which must not change any more."""
        self._queue.append(_Drawn(ticket, latents, self._tick))

    def warm_up(self, shape: torch.Size) -> None:
        """Compiles for latents of *shape* [4, height, width], where it compiles at all."""
        if self._backend is None or shape in self._compiled:
            return
        size = self._slice_size(shape)
        latents = torch.zeros((size, *shape), device=self._vae.device)
        compiled = Compiled(
            f"the VAE for {size} images of {shape[2]}x{shape[1]} latents",
            decode,
            (self._vae, latents),
            backend=self._backend,
            pool=self._pool,
        )
        try:
            compiled()
        except Exception as error:
            if not engine_errors.is_out_of_memory(error):
                raise
            log.warning(
                "there is not the memory to compile the VAE", extra={"action": "compile_failed"}
            )
        else:
            self._compiled[shape] = (latents, compiled)

    def run(self, *, flush: bool) -> None:
        """Decodes the slices that are full, or that have waited; with *flush* all there is."""
        self._tick += 1
        while self._queue:
            first = self._queue[0]
            shape = first.latents.shape
            alike = [drawn for drawn in self._queue if drawn.latents.shape == shape]
            part = alike[: self._slice_size(shape)]
            is_due = flush or shape not in self._compiled
            is_due = is_due or self._tick - first.since_tick >= _PATIENCE_TICKS
            if len(part) < self._slice_size(shape) and not is_due:
                return
            for drawn in part:
                self._queue.remove(drawn)
            self._decode_or_share(part)

    def collect(self, *, wait: bool) -> list[contract.Finished]:
        """The images that have come to the host; with *wait* at least one slice, if there is one.

        Raises:
            NodeError: the GPU itself is broken.
        """
        finished, self._failed = self._failed, []
        while self._on_their_way and (self._on_their_way[0].is_there or (wait and not finished)):
            done = self._on_their_way.popleft()
            if done.copied is not None:
                done.copied.synchronize()
            finished.extend(self._finish(done))
        return finished

    def clear(self) -> None:
        """Lets go of everything, half-done images included."""
        self._queue.clear()
        self._on_their_way.clear()
        self._failed.clear()
        self._compiled.clear()

    def _slice_size(self, shape: torch.Size) -> int:
        return max(1, min(self.most_images, _MOST_IMAGES, self.slice_pixels // self._pixels(shape)))

    def _pixels(self, shape: torch.Size) -> int:
        factor = 2 ** (len(self._vae.config.block_out_channels) - 1)
        return int(shape[1] * shape[2] * factor**2)

    def _decode_or_share(self, part: Sequence[_Drawn]) -> None:
        """Decodes a slice; where that fails, its images in smaller ones, down to each alone."""
        try:
            self._on_their_way.append(self._decode(part))
            return  # noqa: TRY300 - what follows is for failures alone
        except Exception as error:  # whatever it is, it is the outcome of this slice
            failure = engine_errors.classify(error)
            out_of_memory = engine_errors.is_out_of_memory(error)
            log.warning(
                "%d images could not be decoded at once: %s",
                len(part),
                failure.message,
                exc_info=True,
                extra={"action": "decode_failed"},
            )
        # Only past the handler are the error's traceback, and the tensors it holds, gone.
        self._compiled.clear()
        engine_errors.empty_cache(self._vae.device)
        if len(part) == 1:
            self._failed.append(contract.Finished(part[0].ticket, failure))
            return
        half = len(part) // 2
        if out_of_memory:
            limit = half * self._pixels(part[0].latents.shape)
            self.slice_pixels = min(self.slice_pixels, limit)
        self._decode_or_share(part[:half])
        self._decode_or_share(part[half:])

    @torch.no_grad()
    def _decode(self, part: Sequence[_Drawn]) -> _OnItsWay:
        shape = part[0].latents.shape
        latents = torch.stack([drawn.latents for drawn in part])
        if shape in self._compiled:
            held, compiled = self._compiled[shape]
            held[: len(part)].copy_(latents)
            pixels, sound = compiled()
        else:
            pixels, sound = decode(self._vae, latents)
        on_gpu = pixels.device.type == "cuda"
        host_pixels = torch.empty(
            (len(part), *pixels.shape[1:]), dtype=torch.uint8, pin_memory=on_gpu
        )
        host_sound = torch.empty(len(part), dtype=torch.bool, pin_memory=on_gpu)
        host_pixels.copy_(pixels[: len(part)], non_blocking=True)
        host_sound.copy_(sound[: len(part)], non_blocking=True)
        copied = None
        if on_gpu:
            copied = torch.cuda.current_stream().record_event()
        return _OnItsWay(part, host_pixels, host_sound, copied)

    def _finish(self, done: _OnItsWay) -> list[contract.Finished]:
        finished = []
        pixels = done.pixels.numpy()
        for at, (drawn, sound) in enumerate(zip(done.images, done.sound.tolist(), strict=True)):
            outcome: contract.Outcome = pixels[at] if sound else self._repeat_wider(drawn)
            finished.append(contract.Finished(drawn.ticket, outcome))
        return finished

    def _repeat_wider(self, drawn: _Drawn) -> contract.Outcome:
        """Some VAEs overflow in float16; then this one decodes in float32 from now on."""
        if self._vae.dtype == torch.float16 and drawn.latents.isfinite().all():
            log.warning(
                "the VAE overflows in float16: it decodes in float32 from now on",
                extra={"action": "vae_widened"},
            )
            self._vae.float()
            self._compiled.clear()
            self._backend = None
        if self._vae.dtype == torch.float32:
            again = self._decode([drawn])
            if again.copied is not None:
                again.copied.synchronize()
            if again.sound.item():
                image: contract.Pixels = again.pixels[0].numpy()
                return image
        return errors.TransientError("the image came out as NaN")


def decode(vae: AutoencoderKL, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [images, height, width, 3] in 8 bits, and for each image whether it is finite."""
    scaled = (latents / vae.config.scaling_factor).to(vae.dtype)
    if vae.post_quant_conv is not None:
        scaled = vae.post_quant_conv(scaled)
    return to_pixels(vae.decoder(scaled).float())
