"""Calls that share a batch: none waits for another's caller, or error."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import polling
from imagefleet.concurrency import Batches


class Doubler:
    """Doubles numbers; a negative one is an error; `batches` are what came together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, numbers: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(numbers))
        self.began.set()
        assert self.may_end.wait()
        if 13 in numbers:
            raise OSError("all of them")
        return [ValueError(f"{each} < 0") if each < 0 else 2 * each for each in numbers]


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


async def waiting(
    batches: Batches[int, int], doubler: Doubler, numbers: Sequence[int]
) -> list[asyncio.Task[int]]:
    """Calls that have come while the first of them is in its thread."""
    doubler.may_end.clear()
    first, *others = numbers
    calls = [asyncio.create_task(batches(first))]
    await asyncio.to_thread(doubler.began.wait)
    calls += [asyncio.create_task(batches(each)) for each in others]
    await polling.turn()
    return calls


async def test_what_comes_during_a_batch_is_done_together_and_in_order(
    doubler: Doubler, threads: ThreadPoolExecutor
):
    batches = Batches(doubler, threads, most=3)
    calls = await waiting(batches, doubler, range(6))
    doubler.may_end.set()
    assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8, 10]
    assert doubler.batches == [[0], [1, 2, 3], [4, 5]]


async def test_calls_that_come_one_after_the_other_without_a_wait_wake_one_thread_together(
    doubler: Doubler, threads: ThreadPoolExecutor
):
    batches = Batches(doubler, threads, most=8)
    assert await asyncio.gather(*map(batches, range(5))) == [0, 2, 4, 6, 8]
    assert doubler.batches == [[0, 1, 2, 3, 4]]


async def test_calls_after_a_shutdown_raise_instead_of_waiting(
    doubler: Doubler, threads: ThreadPoolExecutor
):
    batches = Batches(doubler, threads, most=8)
    threads.shutdown()
    for _ in range(2):
        results = await asyncio.gather(batches(1), batches(2), return_exceptions=True)
        assert [type(each) for each in results] == [RuntimeError, RuntimeError]


async def test_an_error_of_one_item_is_that_calls_alone_and_one_of_the_batch_everybodys(
    doubler: Doubler, threads: ThreadPoolExecutor
):
    batches = Batches(doubler, threads, most=3)
    calls = await waiting(batches, doubler, [1, 2, -3, 4, 13, 5])
    doubler.may_end.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [each for each in results if isinstance(each, int)] == [2, 4, 8]
    assert [type(each) for each in results[2:]] == [ValueError, int, OSError, OSError]


async def test_a_call_that_was_cancelled_is_not_done_and_holds_up_no_other(
    doubler: Doubler, threads: ThreadPoolExecutor
):
    batches = Batches(doubler, threads, most=8)
    first, cancelled, last = await waiting(batches, doubler, [1, 2, 3])
    for call in (first, cancelled):
        call.cancel()
    await polling.turn()
    doubler.may_end.set()
    assert await last == 6
    assert doubler.batches == [[1], [3]]
    assert await batches(4) == 8


def test_event_loops_one_after_the_other_may_call(
    doubler: Doubler, threads: ThreadPoolExecutor
):
    batches = Batches(doubler, threads, most=8)

    async def double(number: int) -> int:
        return sum(await asyncio.gather(*(batches(number) for _ in range(50))))

    async def leave() -> None:
        """Ends its loop while its call is in a thread."""
        await waiting(batches, doubler, [0, 0])

    asyncio.run(leave())
    doubler.may_end.set()
    assert [asyncio.run(double(number)) for number in range(1, 5)] == [
        100,
        200,
        300,
        400,
    ]
