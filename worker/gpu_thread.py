"""The engine's thread: nothing that waits for a network or a disk ever runs on it.

The event loop submits prepared requests and takes finished images; both queues are bounded, so slow
uploads block the GPU before they fill the memory. The thread measures busy and idle time.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Condition, Semaphore, Thread
from typing import Any

from imagefleet.errors import FleetError, JobCancelled, NodeError
from imagefleet.storage.routing.route import FAIR_EVERY
from imagefleet.telemetry.logs import log
from worker import tasks
from worker.engine.contract import Engine, Finished, Pixels, PreparedRequest, Result
from worker.gpu_clock import GpuClock

#: How often an idle engine thread counts the time it has waited.
IDLE_TICK_SECONDS = 0.5

#: How often an engine thread that waits for room looks for calls.
CALL_SECONDS = 0.05

#: A worker that stops waits at most this long for the engine to return from a call.
STOP_SECONDS = 2.0

#: A call of the engine longer than this means a broken node: the largest batch on the slowest card
#: takes far less, and probes see the hang before a lease runs out more than twice.
STALL_SECONDS = 300.0

#: Python cannot end a thread that is inside torch, and torch crashes when Python exits around it:
#: if this thread is alive at exit, or one whose name begins the same, the process must leave by
#: `os._exit`.
THREAD_NAME = "engine"


@dataclass(frozen=True)
class Delivery:
    """The outcome of one ticket, and its times at the engine (monotonic seconds)."""

    finished: Finished
    admitted_at: float
    finished_at: float

    def pixels(self) -> Pixels:
        """The image; raises the error that it ended with."""
        outcome = self.finished.outcome
        if isinstance(outcome, FleetError):
            raise outcome
        return outcome


#: A function for the engine's thread, and the answer that its caller waits for.
_Call = tuple[Callable[[], object], Future[Any]]

#: Reads a model and gives its engine.
LoadEngine = Callable[[], Engine]

#: Gives the engine another model; False, with nothing changed, if it cannot.
Take = Callable[[], bool]


@dataclass
class _Wanted:
    """A model to draw with from now on."""

    load: LoadEngine
    take: Take | None
    loaded: Future[Engine]

    def is_taken(self) -> bool:
        """Gives the engine this model if it can take it; False: it has to be loaded anew."""
        take = self.take
        self.take = None
        try:
            return take is not None and take()
        except Exception:  # noqa: BLE001 - logged
            log.warning(
                "the engine is loaded anew", exc_info=True, action="weights_not_taken"
            )
            return False


class _Line:
    """Requests that wait for the engine in their order, and after them those who bring more."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, PreparedRequest]] = deque()
        self.in_order = asyncio.Lock()
        self.fewer_wait = asyncio.Event()


class EngineThread:
    """Feeds one engine from the event loop and returns what it finished.

    `submit` and `finished` belong to the event loop; everything of the engine but `prepare` runs on
    its thread alone, loading included.
    """

    def __init__(self, backlog: int, began_at: float | None = None) -> None:
        """*backlog*: finished images that may wait to be encoded before the engine blocks.

        *began_at*: the worker's start, in monotonic seconds; None: now.
        """
        self.clock = GpuClock(time.monotonic() if began_at is None else began_at)
        #: Most requests the engine holds at once; follows the engine's own.
        self.capacity = 0
        self.engine: Engine | None = None
        #: Called on the engine's thread for each job's ticket right before the engine begins it.
        self.is_cancelled: Callable[[int], bool] = lambda _ticket: False
        #: Called on the engine's thread after each wait for work: an idle engine's reason.
        self.why_idle: Callable[[], str] = lambda: "starved"
        self.tick_began_at: float | None = None
        self._urgent = _Line()
        self._ordinary = _Line()
        self._overtakes = 0
        self._calls: deque[_Call] = deque()
        self._drawing: dict[int, Future[Delivery | None]] = {}
        self._drawn_tickets = itertools.count(-1, -1)  # see `_is_jobs`
        self._wake = Condition()
        self._wanted: _Wanted | None = None
        self._accepting = True
        self._stopping = False
        self._room = Semaphore(backlog)
        self._finished: asyncio.Queue[Delivery] = asyncio.Queue()
        self._admitted_at: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = Thread(target=self._run, name=THREAD_NAME, daemon=True)

    async def start(self, load: LoadEngine) -> Engine:
        """Loads the engine on its thread; raises what loading raised."""
        self._thread.start()
        return await self._attach(load)

    async def replace(self, load: LoadEngine, take: Take | None = None) -> Engine:
        """Closes the engine, then loads another on its thread; what the first held is lost.

        *take*, if given, is called before: if it returns True, the engine stays, and has another
        model. Until then, no request is accepted. After an error of *load*, which is raised here,
        there is no engine: call this again then.
        """
        self.stop_accepting()
        self.engine = None  # its memory is the next one's
        engine = await self._attach(load, take)
        while not self._finished.empty():  # of jobs that were handed back
            await self.finished()
        with self._wake:
            self._accepting = True
        return engine

    async def _attach(self, load: LoadEngine, take: Take | None = None) -> Engine:
        wanted = _Wanted(load, take, tasks.question())
        with self._wake:
            self._wanted = wanted
            self._wake.notify()
        self.engine = engine = await asyncio.wrap_future(wanted.loaded)
        self._let_in(engine.capacity)
        return engine

    @property
    def in_engine(self) -> int:
        """Images that the engine has begun or is about to begin."""
        return len(self._admitted_at)

    async def submit(
        self,
        ticket: int,
        prepared: PreparedRequest,
        *,
        is_urgent: bool = False,
    ) -> bool:
        """Queues a request once fewer than `capacity` wait; False after `stop_accepting`.

        One that *is_urgent* goes before all that are not, those in the engine without a slot too.
        """
        line = self._urgent if is_urgent else self._ordinary
        async with line.in_order:
            while self._accepting and len(line.waiting) >= self.capacity:
                line.fewer_wait.clear()
                await line.fewer_wait.wait()
        with self._wake:
            if self._accepting:
                line.waiting.append((ticket, prepared))
                self._wake.notify()
        return self._accepting

    async def draw(self, prepared: PreparedRequest) -> Delivery | None:
        """Draws a request in its turn and returns its outcome; None: the worker drains.

        The outcome is not among those of `finished`.
        """
        ticket = next(self._drawn_tickets)
        delivered: Future[Delivery | None] = tasks.question()
        self._drawing[ticket] = delivered
        if not await self.submit(ticket, prepared):
            self._drawing.pop(ticket, None)  # the engine's thread may have answered it
            return None
        return await asyncio.wrap_future(delivered)

    def stop_accepting(self) -> list[int]:
        """Accepts no more requests; returns the tickets that the engine has not begun."""
        with self._wake:
            self._accepting = False
            waiting = []
            for line in (self._urgent, self._ordinary):
                waiting += [ticket for ticket, _ in line.waiting]
                line.waiting.clear()
        self._let_in(self.capacity)
        tickets = []
        for ticket in waiting:
            if drawing := self._drawing.pop(ticket, None):
                drawing.set_result(None)
            else:
                tickets.append(ticket)
        return tickets

    async def call(self, function: Callable[[], Result]) -> Result:
        """Calls *function* on the engine's thread, between two ticks; raises what it raised.

        Where the thread calls nothing any more, this never returns.
        """
        answer: Future[Result] = tasks.question()
        with self._wake:
            self._calls.append((function, answer))
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    async def finished(self) -> Delivery:
        delivery = await self._finished.get()
        self._room.release()
        return delivery

    @property
    def is_stalled(self) -> bool:
        """True once the engine has been in one call for longer than any call takes."""
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
                raise NodeError(
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
        engine: Engine | None = None
        ended_at: float | None = None  # of the work with the model before
        try:
            while (wanted := self._next_wanted()) is not None:
                if engine is not None and not wanted.is_taken():
                    engine.close()
                    engine = None  # its memory is the next one's
                if engine is None:
                    self.clock.paces = None  # another engine's speed is another
                    try:
                        engine = wanted.load()
                    except Exception as error:  # noqa: BLE001 - raised again by `_attach`
                        wanted.loaded.set_exception(error)
                        continue
                if ended_at is not None:
                    self.clock.idle_seconds["switch"] += time.monotonic() - ended_at
                wanted.loaded.set_result(engine)
                self._work(engine)
                ended_at = time.monotonic()
            if engine is not None:
                engine.close()
        except FleetError as error:
            self._call(self._ended.set_exception, error)
        except Exception as error:  # noqa: BLE001 - logged
            log.exception("the engine failed", action="engine_failed")
            self._call(
                self._ended.set_exception,
                NodeError(f"the engine failed: {error!r}"),
            )
        else:
            self._call(self._ended.set_result, None)

    def _next_wanted(self) -> _Wanted | None:
        """Waits for the next model to draw with; None: stop."""
        with self._wake:
            while not (self._stopping or self._wanted):
                self._wake.wait(IDLE_TICK_SECONDS)
            wanted = self._wanted
            self._wanted = None
        return None if self._stopping else wanted

    def _work(self, engine: Engine) -> None:
        while self._admit(engine):
            self.tick_began_at = began_at = time.monotonic()
            if self.clock.first_at is None and self._admitted_at:
                self.clock.first_at = began_at
            # Half of what it may hold fills its slots, the rest is ready for them.
            is_full = 2 * engine.free <= engine.capacity
            pixels_before = getattr(engine, "unet_row_pixels", 0)
            outcomes = engine.tick()
            self.tick_began_at = None
            ended_at = time.monotonic()
            row_pixels = getattr(engine, "unet_row_pixels", 0) - pixels_before
            if self.clock.first_at is None:
                continue  # it only took up what it has compiled
            self.clock.busy_seconds += ended_at - began_at
            images = [each for each in outcomes if not each.is_estimate]
            self.clock.images += len(images)
            self.clock.last_at = ended_at
            if is_full and row_pixels:
                self.clock.note_full_tick(engine, row_pixels, ended_at - began_at)
            if self.clock.full_speed_at is None and any(map(_is_jobs, images)):
                self.clock.note_image(engine, ended_at)
            self._deliver(engine, outcomes, ended_at)
        # The requests that it has begun and will not finish.
        self._admitted_at.clear()
        while self._drawing:
            self._drawing.popitem()[1].set_result(None)

    def _admit(self, engine: Engine) -> bool:
        """Fills the engine; waits while there is nothing to do. False: stop, or it is replaced."""
        while not (self._stopping or self._wanted):
            self._answer_calls(engine)
            admitted: list[tuple[int, PreparedRequest, bool]] = []
            cancelled: list[Finished] = []
            with self._wake:
                while len(admitted) < engine.free:
                    line = self._next_line()
                    if not line.waiting:
                        break
                    ticket, prepared = line.waiting.popleft()
                    self._admitted_at[ticket] = time.monotonic()
                    if self.is_cancelled(ticket):
                        cancelled.append(Finished(ticket, JobCancelled()))
                    else:
                        admitted.append((ticket, prepared, line is self._urgent))
                if not (
                    admitted or cancelled or engine.busy or self._calls or self._wanted
                ):
                    self._wait_for_work()
            for ticket, prepared, is_urgent in admitted:
                engine.admit(ticket, prepared, is_urgent=is_urgent)
            if admitted or cancelled or engine.capacity != self.capacity:
                self._call(self._let_in, engine.capacity)
            self._deliver(engine, cancelled, time.monotonic())
            if engine.busy:
                return True
        return False

    def _answer_calls(self, engine: Engine) -> None:
        while self._calls:
            function, answer = self._calls.popleft()
            self.tick_began_at = time.monotonic()
            tasks.answer(partial(engine.call, function), answer)
            self.tick_began_at = None

    def _next_line(self) -> _Line:
        """The line whose turn it is: the urgent one, and at times the other."""
        lines = [each for each in (self._urgent, self._ordinary) if each.waiting]
        if len(lines) > 1:
            self._overtakes = (self._overtakes + 1) % FAIR_EVERY
            return lines[not self._overtakes]
        return lines[0] if lines else self._ordinary

    def _wait_for_work(self) -> None:
        began_at = time.monotonic()
        self._wake.wait(IDLE_TICK_SECONDS)
        if self.clock.first_at is not None:
            self.clock.idle_seconds[self.why_idle()] += time.monotonic() - began_at

    def _deliver(self, engine: Engine, outcomes: Iterable[Finished], at: float) -> None:
        """Hands what is finished to the loop, as much as may wait there at once."""
        for_jobs: list[Delivery] = []
        for finished in outcomes:
            if finished.ticket not in self._admitted_at:
                continue  # the estimate of an image that has failed before it came
            admitted_at = self._admitted_at[finished.ticket]
            if not finished.is_estimate:
                del self._admitted_at[finished.ticket]
            delivery = Delivery(finished, admitted_at, at)
            if drawing := self._drawing.pop(finished.ticket, None):
                drawing.set_result(delivery)
                continue
            if not self._room.acquire(blocking=False):
                self._call(self._put_finished, for_jobs)
                for_jobs = []
                self._wait_for_room(engine)
            for_jobs.append(delivery)
        if for_jobs:
            self._call(self._put_finished, for_jobs)

    def _wait_for_room(self, engine: Engine) -> None:
        began_at = time.monotonic()
        # Once the thread stops, or the engine is replaced, nothing is taken any more.
        while not (self._stopping or self._wanted):
            if self._room.acquire(timeout=CALL_SECONDS):
                break
            self._answer_calls(engine)  # of judges, say, for which these images wait
        self.clock.idle_seconds["backpressure"] += time.monotonic() - began_at

    def _put_finished(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._finished.put_nowait(delivery)

    def _let_in(self, capacity: int) -> None:
        """Requests were admitted, or the engine holds more: others may wait."""
        self.capacity = capacity
        self._urgent.fewer_wait.set()
        self._ordinary.fewer_wait.set()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # The loop is closed when an error kills the worker: then nothing waits for this.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _is_jobs(finished: Finished) -> bool:
    """False for a failure, and for an image of `draw`, by which a node checks itself."""
    is_image = not isinstance(finished.outcome, FleetError)
    return is_image and finished.ticket >= 0
