"""An event loop whose time is simulated: it jumps to the next timer instead of waiting for it.

`looptime` does the same for tests, on a real loop with its sockets and threads. Here nothing may
take real time: 2,000 workers run on one thread, so that a run can be repeated by its seed.
"""

import asyncio
import contextlib
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from datetime import UTC, datetime
from types import CellType, FunctionType
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")

_PACKAGES = frozenset({"imagefleet", "worker", "simulation"})

#: The time of day at which every simulation begins.
_BEGAN_AT = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class StuckError(RuntimeError):
    """Every task waits for another: nothing will ever happen."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """One thread, no sockets, and a clock of its own, which begins at 0.

    What would run on another thread runs at once, and takes as long as it says (`takes`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._taken_seconds = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        # Tuples: the timers' own comparison took a twentieth of all time.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """It is dropped when its time comes."""

    def _run_once(self) -> None:
        """Runs what is ready; if nothing is, it is the next timer's time at once.

        Raises:
            StuckError: there is no timer either.
        """
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise StuckError(
                    "the simulation is stuck: every task waits for another"
                )
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - as every event loop

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def takes(self, seconds: float) -> None:
        """For what runs in place of another thread: how long it would take there."""
        self._taken_seconds += seconds

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        answer: asyncio.Future[Result] = self.create_future()
        self._taken_seconds = 0.0
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            answer.set_exception(error)
            return answer
        if self._taken_seconds:
            self.call_later(self._taken_seconds, _answer, answer, result)
        else:
            answer.set_result(result)
        return answer


def _answer(answer: asyncio.Future[Result], result: Result) -> None:
    if not answer.done():
        answer.set_result(result)


@contextlib.contextmanager
def simulated_time() -> Iterator[SimulatedLoop]:
    """A loop whose time is also that of `time.monotonic` and `time.time` during the block."""
    loop = SimulatedLoop()
    clocks = {"monotonic": loop.time, "time": lambda: _BEGAN_AT + loop.now}
    with contextlib.ExitStack() as stack:
        for name, clock in clocks.items():
            stack.enter_context(_default_clock(getattr(time, name), clock))
            stack.enter_context(mock.patch.object(time, name, clock))
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _default_clock(
    usual: Callable[[], float], clock: Callable[[], float]
) -> Iterator[None]:
    """*clock* wherever the *usual* one is a default, which was bound with its class."""
    initialisers = {
        init
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _PACKAGES
        for each in list(vars(module).values())
        if isinstance(each, type)
        and isinstance(init := each.__dict__.get("__init__"), FunctionType)
    }

    def bind(old: Callable[[], float], new: Callable[[], float]) -> None:
        for init in initialisers:
            defaults, named = init.__defaults__ or (), init.__kwdefaults__ or {}
            init.__defaults__ = tuple(new if each is old else each for each in defaults)
            init.__kwdefaults__ = {
                key: new if named[key] is old else named[key] for key in named
            }
            for cell in init.__closure__ or ():
                if _holds(cell, old):
                    cell.cell_contents = new

    bind(usual, clock)
    try:
        yield
    finally:
        bind(clock, usual)


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def run(loop: SimulatedLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs *work* to its end, then cancels what is left."""
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
