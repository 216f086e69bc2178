"""Calls at the same time that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, overload

First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")
Result = TypeVar("Result")


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
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in tasks)
