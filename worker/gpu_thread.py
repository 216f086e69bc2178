"""The engine's thread: nothing that waits for a network or a disk ever runs on it.

The event loop submits prepared requests and takes finished images; both queues are bounded, so slow
uploads block the GPU before they fill the memory. The thread measures busy and idle time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from imagefleet import errors
from imagefleet.telemetry import logs
from worker.engine import contract

log = logs.EventLog(__name__)

Result = TypeVar("Result")

#: How often an idle engine thread counts the time it has waited.
IDLE_TICK_SECONDS = 0.5

#: A worker that stops waits at most this long for the engine to return from a call.
STOP_SECONDS = 2.0

#: A call of the engine longer than this means a broken node: the largest batch on the slowest card
#: takes far less, and probes see the hang before a lease runs out more than twice.
STALL_SECONDS = 300.0

#: Python cannot end a thread that is inside torch, and torch crashes when Python exits around it:
#: if this thread is alive at exit, or one whose name begins the same, the process must leave by
#: `os._exit`.
THREAD_NAME = "engine"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of one ticket, and its times at the engine (monotonic seconds)."""

    finished: contract.Finished
    admitted_at: float
    finished_at: float


@dataclass(slots=True)
class GpuClock:
    """The engine's busy and idle seconds, from its first image on."""

    busy_seconds: float = 0.0
    idle_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    images: int = 0
    first_at: float | None = None
    last_at: float | None = None
    first_image_seconds: float | None = None
    """Seconds to the first image from the worker's start, loading included."""

    @property
    def idle_fraction(self) -> float:
        """The share of time, between the first image and the last, that the engine waited."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return 0.0
        return max(0.0, 1 - self.busy_seconds / (self.last_at - self.first_at))


Take = Callable[[], bool]
"""Gives the engine another model; False, with nothing changed, if it cannot."""


@dataclass(slots=True)
class _Replacement:
    """What is to come in place of the engine."""

    load: Callable[[], contract.Engine]
    take: Take | None
    loaded: asyncio.Future[contract.Engine]


class EngineThread:
    """Feeds one engine from the event loop and returns what it finished.

    `submit` and `finished` belong to the event loop; everything of the engine but `prepare` runs on
    its thread alone, loading included.
    """

    def __init__(
        self, load: Callable[[], contract.Engine], *, why_idle: Callable[[], str], backlog: int
    ) -> None:
        """*backlog*: finished images that may wait to be encoded before the engine blocks."""
        self.clock = GpuClock()
        self.capacity = 0
        """What the engine holds at most; it follows the engine's."""
        self.engine: contract.Engine | None = None
        #: Called on the engine's thread for each job's ticket right before the engine begins it.
        self.is_cancelled: Callable[[int], bool] = lambda _ticket: False
        self.tick_began_at: float | None = None
        self._began_at = time.monotonic()
        self._load = load
        self._why_idle = why_idle
        self._waiting: deque[tuple[int, contract.PreparedRequest]] = deque()
        self._calls: deque[tuple[Callable[[], object], asyncio.Future[Any]]] = deque()
        self._urgent: deque[tuple[int, contract.PreparedRequest]] = deque()
        self._drawing: dict[int, asyncio.Future[Delivery | None]] = {}
        self._wake = threading.Condition()
        self._replacement: _Replacement | None = None
        self._accepting = True
        self._holds_jobs = False
        self._stopping = False
        self._room = threading.Semaphore(backlog)
        self._finished: asyncio.Queue[Delivery] = asyncio.Queue()
        self._admitted_at: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[contract.Engine] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._in_order = asyncio.Lock()
        self._fewer_wait = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    async def start(self) -> contract.Engine:
        """Loads the engine on its thread; raises what loading raised."""
        self._thread.start()
        return self._attach(await asyncio.shield(self._loaded))

    async def replace(
        self, load: Callable[[], contract.Engine], take: Take | None = None
    ) -> contract.Engine:
        """Closes the engine, then loads another on its thread; what the first held is lost.

        *take*, if given, is called before: if it returns True, the engine stays, and has another
        model. Until then, no request is accepted. After an error of *load*, which is raised here,
        there is no engine: call this again then.
        """
        loaded: asyncio.Future[contract.Engine] = self._loop.create_future()
        self.stop_accepting()
        self.engine = None  # its memory is the next one's
        with self._wake:
            self._replacement = _Replacement(load, take, loaded)
            self._wake.notify()
        engine = self._attach(await asyncio.shield(loaded))
        while self.finished_already():  # of jobs that were handed back
            pass
        with self._wake:
            self._accepting, self._holds_jobs = True, False
        return engine

    def _attach(self, engine: contract.Engine) -> contract.Engine:
        self.engine = engine
        self._let_in(engine.capacity)
        return engine

    @property
    def in_engine(self) -> int:
        """Images that the engine has begun or is about to begin."""
        return len(self._admitted_at)

    async def submit(self, ticket: int, prepared: contract.PreparedRequest) -> bool:
        """Queues a request, once fewer than the engine's capacity are waiting.

        Returns whether it was accepted: not after `stop_accepting`.
        """
        async with self._in_order:
            while self._accepting and len(self._waiting) >= self.capacity:
                self._fewer_wait.clear()
                await self._fewer_wait.wait()
        with self._wake:
            if self._accepting:
                self._waiting.append((ticket, prepared))
                self._wake.notify()
        return self._accepting

    async def draw(self, ticket: int, prepared: contract.PreparedRequest) -> Delivery | None:
        """Draws a request that is no job's before all that wait, however many they are.

        Its outcome does not wait for jobs' images to be encoded. None: the worker drains.
        """
        delivered: asyncio.Future[Delivery | None] = self._loop.create_future()
        with self._wake:
            if not self._accepting:
                return None
            self._urgent.append((ticket, prepared))
            self._drawing[ticket] = delivered
            self._wake.notify()
        return await delivered

    def hold_jobs(self, *, hold: bool) -> None:
        """Lets the engine begin no more jobs, but what `draw` asks for, or lets it go on."""
        with self._wake:
            self._holds_jobs = hold
            self._wake.notify()

    def stop_accepting(self) -> list[int]:
        """Accepts no more requests; returns the tickets that the engine has not begun."""
        with self._wake:
            self._accepting = False
            tickets = [ticket for ticket, _ in self._waiting]
            self._waiting.clear()
            for ticket, _ in self._urgent:
                self._call(_answer, self._drawing.pop(ticket))
            self._urgent.clear()
        self._fewer_wait.set()
        return tickets

    async def call(self, function: Callable[[], Result]) -> Result:
        """Calls *function* on the engine's thread, between two ticks; raises what it raised.

        Where the thread calls nothing any more, this never returns.
        """
        answer: asyncio.Future[Result] = self._loop.create_future()
        with self._wake:
            self._calls.append((function, answer))
            self._wake.notify()
        return await answer

    async def finished(self) -> Delivery:
        """The next outcome."""
        delivery = await self._finished.get()
        self._room.release()
        return delivery

    def finished_already(self) -> Delivery | None:
        """Takes what `finished` would, without a wait: None if there is no outcome yet."""
        if self._finished.empty():
            return None
        self._room.release()
        return self._finished.get_nowait()

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has been in one call for longer than any call takes."""
        began_at = self.tick_began_at
        return began_at is not None and time.monotonic() - began_at > STALL_SECONDS

    async def watch(self) -> None:
        """Side task: raises NodeError when the engine broke or one tick takes too long."""
        while True:
            await asyncio.wait({self._ended}, timeout=min(1.0, STALL_SECONDS / 4))
            if self._ended.done():
                self._ended.result()
                return
            if self.is_stalled:
                raise errors.NodeError(
                    f"the engine has been in one call for over {STALL_SECONDS:g} s: it hangs"
                )

    async def stop(self) -> None:
        """Ends the thread after its current call; one that hangs is left behind."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._ended.done():
            self._ended.exception()  # retrieved: `watch` has raised it

    def _run(self) -> None:
        try:
            engine = self._load()
        except Exception as error:  # noqa: BLE001 - raised again by start()
            self._call(self._loaded.set_exception, error)
            self._call(self._ended.set_result, None)
            return
        self._call(self._loaded.set_result, engine)
        try:
            while True:
                self._work(engine)
                # The requests that it has begun and will not finish.
                self._admitted_at.clear()
                for drawing in self._drawing.values():
                    self._call(_answer, drawing)
                self._drawing.clear()
                if self._has_taken(engine):
                    continue
                engine.close()
                del engine  # its memory is the next one's
                if (following := self._load_following()) is None:
                    break
                engine = following
                del following
        except errors.FleetError as error:
            self._call(self._ended.set_exception, error)
        except Exception as error:
            log.exception("the engine failed", action="engine_failed")
            self._call(self._ended.set_exception, errors.NodeError(f"the engine failed: {error!r}"))
        else:
            self._call(self._ended.set_result, None)

    def _has_taken(self, engine: contract.Engine) -> bool:
        """Whether the engine stays, with another model."""
        if self._stopping or self._replacement is None or self._replacement.take is None:
            return False
        began_at = time.monotonic()
        take, self._replacement.take = self._replacement.take, None
        try:
            if not take():
                return False
        except Exception:
            log.warning("the engine is loaded anew", exc_info=True, action="weights_not_taken")
            return False
        with self._wake:
            loaded, self._replacement = self._replacement.loaded, None
        self.clock.idle_seconds["switch"] += time.monotonic() - began_at
        self._call(_answer, loaded, engine)
        return True

    def _load_following(self) -> contract.Engine | None:
        """The engine in place of the one that was closed; None: stop."""
        began_at = time.monotonic()
        while not self._stopping:
            with self._wake:
                if self._replacement is None:
                    self._wake.wait(IDLE_TICK_SECONDS)
                    continue
                replacement, self._replacement = self._replacement, None
            loaded = replacement.loaded
            try:
                engine = replacement.load()
            except Exception as error:  # noqa: BLE001 - raised again by `replace`
                self._call(_answer, loaded, None, error)
                continue
            self.clock.idle_seconds["switch"] += time.monotonic() - began_at
            self._call(_answer, loaded, engine)
            return engine
        return None

    def _work(self, engine: contract.Engine) -> None:
        while self._admit(engine):
            self.tick_began_at = began_at = time.monotonic()
            if self.clock.first_at is None and self._admitted_at:
                self.clock.first_at = began_at
            outcomes = engine.tick()
            self.tick_began_at = None
            ended_at = time.monotonic()
            if self.clock.first_at is None:
                continue  # it only took up what it has compiled
            self.clock.busy_seconds += ended_at - began_at
            self.clock.images += len(outcomes)
            self.clock.last_at = ended_at
            if outcomes and self.clock.first_image_seconds is None:
                seconds = self.clock.first_image_seconds = ended_at - self._began_at
                log.info(f"first image {seconds:.1f} s after the start", action="first_image")
            self._deliver(
                Delivery(finished, self._admitted_at.pop(finished.ticket), ended_at)
                for finished in outcomes
            )

    def _admit(self, engine: contract.Engine) -> bool:
        """Fills the engine; waits while there is nothing to do. False: stop, or it is replaced."""
        while not (self._stopping or self._replacement):
            self._answer_calls()
            admitted: list[tuple[int, contract.PreparedRequest, bool]] = []
            cancelled: list[int] = []
            with self._wake:
                while len(admitted) < engine.free:
                    is_job = not (self._urgent or self._holds_jobs)
                    queue = self._waiting if is_job else self._urgent
                    if not queue:
                        break
                    ticket, prepared = queue.popleft()
                    if is_job and self.is_cancelled(ticket):
                        cancelled.append(ticket)
                        continue
                    admitted.append((ticket, prepared, not is_job))
                    self._admitted_at[ticket] = time.monotonic()
                if not (admitted or cancelled or engine.busy or self._calls or self._replacement):
                    self._wait_for_work()
            for ticket, prepared, urgent in admitted:
                engine.admit(ticket, prepared, urgent=urgent)
            if admitted or cancelled or engine.capacity != self.capacity:
                self._call(self._let_in, engine.capacity)
            now = time.monotonic()
            self._deliver(
                Delivery(contract.Finished(ticket, errors.JobCancelled()), now, now)
                for ticket in cancelled
            )
            if engine.busy:
                return True
        return False

    def _answer_calls(self) -> None:
        while self._calls:
            function, answer = self._calls.popleft()
            self.tick_began_at = time.monotonic()
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - raised again by `call`
                self._call(_answer, answer, None, error)
            else:
                self._call(_answer, answer, result)
            self.tick_began_at = None

    def _wait_for_work(self) -> None:
        began_at = time.monotonic()
        self._wake.wait(IDLE_TICK_SECONDS)
        if self.clock.first_at is not None:
            self.clock.idle_seconds[self._why_idle()] += time.monotonic() - began_at

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hands what is finished to the loop, as much as may wait there at once."""
        for_jobs: list[Delivery] = []
        for delivery in deliveries:
            if drawing := self._drawing.pop(delivery.finished.ticket, None):
                self._call(_answer, drawing, delivery)
                continue
            if not self._room.acquire(blocking=False):
                self._call(self._put_finished, for_jobs)
                for_jobs = []
                self._wait_for_room()
            for_jobs.append(delivery)
        if for_jobs:
            self._call(self._put_finished, for_jobs)

    def _wait_for_room(self) -> None:
        began_at = time.monotonic()
        # Once the thread stops, or the engine is replaced, nothing is taken any more.
        while not (self._stopping or self._replacement):
            if self._room.acquire(timeout=IDLE_TICK_SECONDS):
                break
        self.clock.idle_seconds["backpressure"] += time.monotonic() - began_at

    def _put_finished(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._finished.put_nowait(delivery)

    def _let_in(self, capacity: int) -> None:
        """Requests were admitted, or the engine holds more: others may wait."""
        self.capacity = capacity
        self._fewer_wait.set()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # The loop is closed when an error kills the worker: then nothing waits for this.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _answer(
    future: asyncio.Future[Any], result: object = None, error: Exception | None = None
) -> None:
    if future.done():  # its caller may have been cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
