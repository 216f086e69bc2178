"""Tasks: the first of several to end, and named side tasks that must not end at all."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


async def first_of(
    *works: Awaitable[Any], timeout_seconds: float | None = None
) -> set[asyncio.Future[Any]]:
    """Waits until one of *works* ends, cancels the others, and returns or raises what ended."""
    tasks: list[asyncio.Future[Any]] = list(map(asyncio.ensure_future, works))
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        await cancel(tasks)
    for task in done:
        task.result()
    return done


@contextlib.contextmanager
def on_signals(act: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Calls *act* in the loop for each SIGTERM and SIGINT during the block."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, act, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def run_until(stop: asyncio.Event, work: Awaitable[Any]) -> bool:
    """Runs *work*, cancelled once *stop* is set; returns whether it finished."""
    task = asyncio.ensure_future(work)
    return task in await first_of(task, stop.wait())


@contextlib.asynccontextmanager
async def background(
    work: Coroutine[Any, Any, Any], name: str
) -> AsyncIterator[asyncio.Future[Any]]:
    """A task that runs during the block and is cancelled at its end."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        await cancel([task])


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_daemon_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Runs *work* in a thread that the process does not wait for at its end."""
    asked: Future[Result] = question()
    threading.Thread(target=answer, args=(work, asked), name=name, daemon=True).start()
    return asked


def question() -> Future[Any]:
    """A future for another thread's answer; whoever is cancelled waits for it no longer."""
    asked: Future[Any] = Future()
    asked.set_running_or_notify_cancel()
    return asked


def answer(work: Callable[[], object], asked: Future[Any]) -> None:
    """Does *work*, and gives whoever has asked its result, or the error that it raised."""
    try:
        asked.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
        asked.set_exception(error)


class SideTasks:
    """Endless tasks; `watch` raises as soon as one of them ends, so that the worker stops."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def watch(self) -> NoReturn:
        """Raises what a task raised, or RuntimeError for one that returned."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError(
            f"the task {done.pop().get_name()!r} ended, which it must not"
        )

    async def cancel(self) -> None:
        await cancel(self._tasks)
