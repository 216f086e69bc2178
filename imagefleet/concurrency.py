"""Calls at the same time that end together, and the processor cores that there are."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

#: A container's limit of processor time: microseconds, of so many.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")
Result = TypeVar("Result")
Item = TypeVar("Item")


def cores() -> int:
    """Those of this process: by its affinity, and by its container's limit."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(found, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file here, or "max": no limit
        return found


@overload
async def gather(
    first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second], /
) -> tuple[First, Second]: ...


@overload
async def gather(
    first: Coroutine[Any, Any, First],
    second: Coroutine[Any, Any, Second],
    third: Coroutine[Any, Any, Third],
    /,
) -> tuple[First, Second, Third]: ...


@overload
async def gather(*works: Coroutine[Any, Any, Result]) -> tuple[Result, ...]: ...


async def gather(*works: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """The results of *works*; the first error cancels the others and is raised alone.

    After an error `asyncio.gather` leaves the others running: they then log that their connector
    is closed, before the error itself is printed.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    parts = [asyncio.ensure_future(work) for work in works]
    try:
        return tuple(await asyncio.gather(*parts))
    except BaseException as error:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        if task is not None and task.cancelling() > cancels:
            # An error at the same moment would hide that this task is to end. So would that of a
            # TaskGroup before Python 3.13, which also miscounts.
            raise asyncio.CancelledError from None
        raise error from None


async def for_each(
    items: Iterable[Item], work: Callable[[Item], Awaitable[None]], at_once: int
) -> None:
    """Awaits *work* for each item, some at the same time; the first error ends them all."""
    left = iter(items)

    async def run() -> None:
        for item in left:
            await work(item)

    await gather(*(run() for _ in range(at_once)))


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Runs *works* during the block, and then cancels them; raises the error of one that failed."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
