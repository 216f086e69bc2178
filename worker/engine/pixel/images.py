"""A pixel stage's finished images on their way to the host, copied asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from imagefleet import errors
from worker.engine import contract, decoder


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    tickets: Sequence[int]
    pixels: torch.Tensor
    """[images, height, width, 3]"""
    is_finite: torch.Tensor
    """[images]: false if an image has NaN or infinity."""
    copied: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class FinishedImages:
    """What has left the slots and is not collected yet."""

    def __init__(self) -> None:
        self._copies: deque[_PendingCopy] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._copies)

    @torch.no_grad()
    def add(self, tickets: Sequence[int], images: torch.Tensor) -> None:
        """Begins to copy images [images, 3, height, width], within -1 and 1, to the host."""
        pixels, is_finite = decoder.to_pixels(images)
        on_gpu = images.device.type == "cuda"
        host_pixels = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=on_gpu)
        host_finite = torch.empty(len(tickets), dtype=torch.bool, pin_memory=on_gpu)
        host_pixels.copy_(pixels, non_blocking=True)
        host_finite.copy_(is_finite, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        self._copies.append(_PendingCopy(tickets, host_pixels, host_finite, copied))

    def collect(self, *, wait: bool) -> list[contract.Finished]:
        """The images that have reached the host; *wait* blocks for some, if there are any."""
        finished: list[contract.Finished] = []
        while self._copies and (self._copies[0].is_done or (wait and not finished)):
            done = self._copies.popleft()
            if done.copied is not None:
                done.copied.synchronize()
            images = zip(done.tickets, done.pixels.numpy(), done.is_finite.tolist(), strict=True)
            for ticket, pixels, is_finite in images:
                outcome: contract.Outcome = pixels
                if not is_finite:
                    outcome = errors.TransientError("the image is NaN")
                finished.append(contract.Finished(ticket, outcome))
        return finished

    def clear(self) -> None:
        self._copies.clear()
