"""Stand-in for calls that share their way to a thread: they run at once, in simulated time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class SimulatedBatches(Generic[Item, Result]):
    """Stand-in for `concurrency.Batches`: no more calls at once than there are threads."""

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result | Exception]],
        _threads: Any,
        *,
        most: int,  # noqa: ARG002 - what shares its way here shares nothing else
        at_once: int = 1,
    ) -> None:
        self._work = work
        self._room = asyncio.Semaphore(at_once)

    async def __call__(self, item: Item) -> Result:
        async with self._room:
            return await asyncio.get_running_loop().run_in_executor(
                None, self._one, item
            )

    def _one(self, item: Item) -> Result:
        (outcome,) = self._work([item])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
