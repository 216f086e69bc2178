import asyncio

import pytest

import polling
from imagefleet import concurrency, errors


async def test_the_results_are_in_the_order_of_the_calls():
    second_ended = asyncio.Event()

    async def slow() -> str:
        await second_ended.wait()
        return "slow"

    async def quick() -> int:
        second_ended.set()
        return 2

    assert await concurrency.gather(slow(), quick()) == ("slow", 2)
    assert await concurrency.gather() == ()


async def test_an_error_cancels_the_other_calls_before_it_is_raised():
    ended: list[str] = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fail() -> None:
        await polling.turn()
        raise errors.TransientError("no answer")

    with pytest.raises(errors.TransientError, match="no answer") as caught:
        await concurrency.gather(call(), fail(), call())

    assert ended == ["cancelled", "cancelled"]
    assert caught.value.__suppress_context__


async def test_a_task_that_is_cancelled_as_a_part_fails_ends():
    async def fail() -> None:
        await polling.turn()
        task.cancel()
        raise ValueError

    async def run() -> None:
        await concurrency.gather(fail(), asyncio.Event().wait())

    task = asyncio.create_task(run())

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_some_items_are_worked_on_at_the_same_time():
    running: list[int] = []
    most = 0

    async def work(item: int) -> None:
        nonlocal most
        running.append(item)
        most = max(most, len(running))
        await polling.turn()
        running.remove(item)
        done.append(item)

    done: list[int] = []
    await concurrency.for_each(range(10), work, 3)

    assert sorted(done) == list(range(10))
    assert most == 3


async def test_what_runs_beside_a_block_ends_with_it_and_its_error_is_raised():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fail() -> None:
        raise errors.TransientError("no answer")

    async with concurrency.beside(work()):
        await polling.turn()
    assert ended.is_set()
    with pytest.raises(errors.TransientError, match="no answer"):
        async with concurrency.beside(work(), fail()):
            await polling.turn()
