"""A simulated GPU: slots that take a card's time for an image, and the thread that feeds them."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.stand_in import StandInEngine
from imagefleet import errors
from simulation.account import IMAGE_BYTES, STEPS
from simulation.clock import SimulatedLoop
from worker.engine import contract
from worker.gpu_thread import Delivery, EngineThread
from worker.jobs.in_flight import EncodedImage
from worker.stages.encode import refuse_one_colour

#: As the worker chooses for a card with room for them.
SLOTS = 16

#: Of a PNG of 512x512 (worker/stages/encode.py).
ENCODE_SECONDS = 0.002

_PICTURE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
_BLACK = np.zeros((2, 2, 3), np.uint8)
_BYTES = bytes(IMAGE_BYTES)
_FILE = EncodedImage(
    _BYTES, "image/png", hashlib.sha256(_BYTES).hexdigest(), (512, 512)
)


def encode(pixels: contract.Pixels, *_: Any) -> EncodedImage:
    """Stand-in for the encoder; it still refuses images of one colour."""
    refuse_one_colour(pixels)
    loop = asyncio.get_running_loop()
    if isinstance(loop, SimulatedLoop):
        loop.takes(ENCODE_SECONDS)
    return _FILE


class SimulatedEngine(StandInEngine):
    """Each slot is an image on its way; a tick is one step of all of them, at the card's speed."""

    model_name = "simulated"

    def __init__(self, images_per_second: float, *, is_broken: bool = False) -> None:
        """A broken card's images are black."""
        super().__init__(
            capacity=SLOTS,
            tick_seconds=SLOTS / images_per_second / STEPS,
            size=(512, 512),
        )
        #: Images by the steps of all slots, unfinished ones by their share.
        self.images_drawn = 0.0
        self._pixels = _BLACK if is_broken else _PICTURE
        self._steps_left: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self.capacity - len(self._steps_left)

    @property
    def busy(self) -> bool:
        return bool(self._steps_left)

    def admit(
        self,
        ticket: int,
        prepared: contract.PreparedRequest,
        *,
        is_urgent: bool = False,  # noqa: ARG002 - it has a slot for each
    ) -> None:
        self._steps_left[ticket] = prepared.request.steps

    @property
    def tick_seconds(self) -> float:
        """Seconds of the next `tick`; with every slot busy it lasts until the first is done."""
        return self._tick_seconds * self._steps

    @property
    def _steps(self) -> int:
        return 1 if self.free else min(self._steps_left.values())

    @property
    def images_per_second(self) -> float:
        """Images/s of the present tick: only slots with an image draw."""
        return len(self._steps_left) / (self._tick_seconds * STEPS)

    def tick(self) -> list[contract.Finished]:
        steps = self._steps
        self.images_drawn += steps * len(self._steps_left) / STEPS
        self._steps_left = {
            each: left - steps for each, left in self._steps_left.items()
        }
        done = [ticket for ticket, left in self._steps_left.items() if left <= 0]
        for ticket in done:
            del self._steps_left[ticket]
        return [contract.Finished(ticket, self._pixels) for ticket in done]

    def close(self) -> None:
        self._steps_left.clear()


class _Nothing(Exception):  # noqa: N818 - no error: it leaves `_admit` where its thread would wait
    """There is no work."""


class SimulatedEngineThread(EngineThread):
    """The engine's thread as a task: where the thread waits, the task awaits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._wake.notify = lambda n=1: self._has_work.set()  # type: ignore[method-assign] # noqa: ARG005

    async def start(self, load: Callable[[], contract.Engine]) -> contract.Engine:
        engine = load()
        self._task = asyncio.create_task(self._draw(engine), name="engine")
        self.engine = engine
        self._let_in(engine.capacity)
        return engine

    async def stop(self) -> None:
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def finished(self) -> Delivery:
        delivery = await super().finished()
        self._has_room.set()
        return delivery

    async def _draw(self, engine: Any) -> None:
        """The loop of `EngineThread`, as a task."""
        try:
            while await self._filled(engine):
                began_at = self._loop.time()
                if self.clock.first_at is None and self._admitted_at:
                    self.clock.first_at = began_at
                self.tick_began_at = began_at
                await asyncio.sleep(engine.tick_seconds)
                outcomes = engine.tick()
                self.tick_began_at = None
                ended_at = self._loop.time()
                self.clock.busy_seconds += ended_at - began_at
                self.clock.images += len(outcomes)
                self.clock.last_at = ended_at
                for finished in outcomes:
                    await self._hand_over(engine, finished, ended_at)
        except errors.FleetError as error:
            self._ended.set_exception(error)

    async def _filled(self, engine: contract.Engine) -> bool:
        while True:
            self._has_work.clear()
            try:
                return self._admit(engine)
            except _Nothing:
                began_at = self._loop.time()
                await self._has_work.wait()
                if self.clock.first_at is not None:
                    self.clock.idle_seconds[self.why_idle()] += (
                        self._loop.time() - began_at
                    )

    def _wait_for_work(self) -> None:
        raise _Nothing

    async def _hand_over(
        self, engine: Any, finished: contract.Finished, ended_at: float
    ) -> None:
        if finished.ticket in self._drawing:
            self._deliver(engine, [finished], ended_at)
            return
        began_at = self._loop.time()
        while not self._room.acquire(blocking=False):
            self._has_room.clear()
            await self._has_room.wait()
        self.clock.idle_seconds["backpressure"] += self._loop.time() - began_at
        admitted_at = self._admitted_at.pop(finished.ticket)
        self._finished.put_nowait(Delivery(finished, admitted_at, ended_at))
