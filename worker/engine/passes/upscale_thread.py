"""Requests that only enlarge an image: beside the ticks, one after the other.

They need no slot. Networks run on a thread and a stream of their own, as those of a second pass do
on the stager's, so that no tick waits for an image's many tiles.
"""

import functools
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from imagefleet import errors
from worker.engine import contract
from worker.engine import errors as engine_errors
from worker.engine.passes import upscaling
from worker.engine.passes.upscaling import UpscalerCache

#: An engine without other work waits so long in a tick: work that comes meanwhile waits as well.
_WAIT_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class PreparedUpscale:
    """A request that needs no more files."""

    request: contract.ImageRequest
    enlarge: Callable[[], contract.Pixels]


class UpscaleThread:
    """Enlarges images; all but `prepare` is for the engine's thread."""

    def __init__(self, upscalers: UpscalerCache, device: torch.device) -> None:
        self._upscalers = upscalers
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "upscaler")
        self.begun: deque[tuple[int, Future[contract.Pixels]]] = deque()
        """The tickets that were added and are not collected."""

    def prepare(self, request: contract.ImageRequest) -> PreparedUpscale:
        """Reads a request's networks; without any, it is the processor's work, and done here.

        Raises JobError if an upscaler's file cannot be used, or one colour is left, and
        TransientError if a file could not be read.
        """
        upscale = request.upscale
        init = request.init
        if upscale is None or init is None:
            raise RuntimeError("only requests with an image to enlarge")
        found = tuple(
            self._upscalers.get(path).enlarge
            if path
            else upscaling.IMAGE_UPSCALERS[name]
            for name, path in upscale.upscalers
        )
        enlarge = functools.partial(upscaling.enlarge, init.pixels, upscale, found)
        if any(path is not None for _, path in upscale.upscalers):
            return PreparedUpscale(request, enlarge)
        finished = enlarge()
        if (finished == finished[0, 0]).all():
            # As it always will be: the engine is not at fault.
            raise errors.JobError("what is left of the image is all one colour")
        return PreparedUpscale(request, lambda: finished)

    def add(self, ticket: int, prepared: PreparedUpscale) -> None:
        """Begins a request, after those that were added before."""
        self.begun.append((ticket, self._thread.submit(self._enlarge, prepared)))

    def collect(self, *, wait: bool) -> list[contract.Finished]:
        """Images that are done; *wait*: for one, briefly. Raises NodeError if the GPU is broken."""
        if wait and self.begun:
            futures.wait([self.begun[0][1]], _WAIT_SECONDS)
        finished = []
        while self.begun and self.begun[0][1].done():
            ticket, future = self.begun.popleft()
            outcome: contract.Outcome
            try:
                outcome = future.result()
            except Exception as error:  # noqa: BLE001 - any is the image's outcome
                outcome = engine_errors.classify(error)
            finished.append(contract.Finished(ticket, outcome))
        return finished

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self.begun.clear()

    def _enlarge(self, prepared: PreparedUpscale) -> contract.Pixels:
        with torch.cuda.stream(self._stream):
            return prepared.enlarge()
