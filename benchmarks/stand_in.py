"""A stand-in for the engine, for tests and measurements of everything around it, without torch."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from imagefleet.errors import FleetError, JobCancelled, JobError, TransientError
from imagefleet.job import sizes
from imagefleet.job.prompt import Prompt
from worker.engine.contract import (
    Finished,
    ImageRequest,
    Pixels,
    PreparedRequest,
    Result,
)


@dataclass(frozen=True, slots=True)
class StandInPrepared:
    """A stand-in for a prepared request: only the request."""

    request: ImageRequest


class StandInEngine:
    """Returns noise drawn from the request's seed, one batch per tick of *tick_seconds*.

    *draw* replaces the noise, to fail on some requests, say; its errors become outcomes as a real
    engine's do, and NodeError breaks it.
    """

    model_name = "stand-in"
    family = "sd1"
    is_unguided = False
    is_int8 = False
    text_encoder: str | None = None

    def __init__(
        self,
        *,
        capacity: int = 4,
        tick_seconds: float = 0.0,
        size: tuple[int, int] = (16, 16),
        draw: Callable[[ImageRequest], Pixels] | None = None,
    ) -> None:
        self.capacity = capacity
        self.default_size = size
        self.lora_lookups: Mapping[str, int] = {}
        self.self_check = None
        self._tick_seconds = tick_seconds
        self._draw = draw or draw_noise
        self._admitted = deque[tuple[int, ImageRequest]]()
        self._estimated = set[int]()

    @property
    def free(self) -> int:
        return self.capacity - len(self._admitted)

    @property
    def busy(self) -> bool:
        return bool(self._admitted)

    def find_embeddings(
        self, prompts: Iterable[Prompt | str], names: Collection[str]
    ) -> tuple[str, ...]:
        """Finds embeddings by the text alone."""
        text = " ".join(map(str, prompts)).lower()
        found = [name for name in names if name.lower() in text]
        return tuple(sorted(found, key=lambda name: text.index(name.lower())))

    def prepare(self, request: ImageRequest) -> StandInPrepared:
        return StandInPrepared(request)

    def admit(
        self,
        ticket: int,
        prepared: PreparedRequest,
        *,
        is_urgent: bool = False,  # noqa: ARG002 - all are drawn in the next tick
    ) -> None:
        self._admitted.append((ticket, prepared.request))

    def tick(self) -> list[Finished]:
        """Finishes all that is here; what is to be estimated in the tick after its estimate."""
        time.sleep(self._tick_seconds)
        finished = []
        for ticket, request in self._admitted:
            is_estimate = request.stop is not None and ticket not in self._estimated
            finished.append(Finished(ticket, self._outcome(request), is_estimate))
        self._estimated = {each.ticket for each in finished if each.is_estimate}
        left = [each for each in self._admitted if each[0] in self._estimated]
        self._admitted = deque(left)
        return finished

    def call(self, function: Callable[[], Result]) -> Result:
        return function()

    def close(self) -> None:
        self._admitted.clear()

    def _outcome(self, request: ImageRequest) -> Pixels | FleetError:
        if request.is_stopped:
            return JobCancelled()
        try:
            return self._draw(request)
        except (JobError, TransientError) as error:
            return error


def draw_noise(request: ImageRequest) -> Pixels:
    """Noise of the size of the request's last pass, determined by its seed."""
    last = request.upscale or request.hires or request
    width, height = last.width, last.height
    if request.upscale is None:
        width, height = sizes.whole_cells(width, height)
    random = np.random.default_rng(request.seed)
    return random.integers(0, 256, (height, width, 3), np.uint8)
