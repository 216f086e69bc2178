"""Calls of event loops that threads do in batches: what came during the last one is the next."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


_Ended = tuple["asyncio.Future[Any]", object]


class _Call(NamedTuple, Generic[Item, Result]):
    item: Item
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Result]


class Batches(Generic[Item, Result]):
    """Does the items of many calls together, in the order of the calls.

    One that comes alone is done at once. Under load, calls share their way to the thread and back,
    and whatever *work* shares among its items: a transaction, or the sync of a folder.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result | Exception]],
        threads: Executor,
        *,
        most: int,
        at_once: int = 1,
    ) -> None:
        """*work* returns each item's result or error, or raises what all of them get.

        A batch has at most *most* items, and at most *at_once* batches are in the threads.
        """
        self._work = work
        self._threads = threads
        self._most = most
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: list[_Call[Item, Result]] = []
        self._running = 0

    async def __call__(self, item: Item) -> Result:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        with self._lock:
            if self._running < self._at_once:
                self._threads.submit(self._run)
                self._running += 1
            self._waiting.append(_Call(item, loop, done))
        return await done

    def _run(self) -> None:
        while batch := self._next():
            outcomes: Sequence[Result | Exception]
            try:
                outcomes = self._work([call.item for call in batch])
            except Exception as error:  # noqa: BLE001 - raised again by the calls
                outcomes = [error] * len(batch)
            by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Ended]] = defaultdict(list)
            for call, outcome in zip(batch, outcomes, strict=True):
                by_loop[call.loop].append((call.done, outcome))
            for loop, ended in by_loop.items():
                with contextlib.suppress(RuntimeError):  # it is closed: nobody waits
                    loop.call_soon_threadsafe(_end, ended)

    def _next(self) -> list[_Call[Item, Result]]:
        """The next batch; empty: nothing waits, and this thread is done."""
        with self._lock:
            self._waiting = [call for call in self._waiting if not call.done.cancelled()]
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            if not batch:
                self._running -= 1
            return batch


def _end(calls: Iterable[_Ended]) -> None:
    for done, outcome in calls:
        if done.done():  # its caller was cancelled
            continue
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)
