"""A pixel stage's finished images on their way to the host, copied asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from imagefleet import errors
from worker.engine import contract
from worker.engine.decoder import HostCopy, to_pixels


class FinishedImages:
    """Images that have left the slots and are not collected yet."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Sequence[int], HostCopy]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._copies)

    @torch.no_grad()
    def add(self, tickets: Sequence[int], images: torch.Tensor) -> None:
        """Begins to copy images [images, 3, height, width], within -1 and 1, to the host."""
        self._copies.append((tickets, HostCopy.begin(*to_pixels(images), len(tickets))))

    def collect(self, *, wait: bool) -> list[contract.Finished]:
        """The images that have reached the host; *wait* blocks for some, if there are any."""
        finished: list[contract.Finished] = []
        while self._copies and (self._copies[0][1].is_done or (wait and not finished)):
            tickets, copy = self._copies.popleft()
            for ticket, pixels in zip(tickets, copy.wait(), strict=True):
                outcome = errors.TransientError("the image is NaN") if pixels is None else pixels
                finished.append(contract.Finished(ticket, outcome))
        return finished

    def clear(self) -> None:
        self._copies.clear()
