from __future__ import annotations

import asyncio

import pytest

import polling
from imagefleet import errors
from imagefleet.storage.azure.queue import SendWindow


class Sends:
    """Sends that end when the test says so."""

    def __init__(self, window: SendWindow) -> None:
        self._window = window
        self._ends: list[asyncio.Future[None]] = []

    async def begin(self, count: int) -> list[asyncio.Task[None]]:
        async def send() -> None:
            end = asyncio.get_running_loop().create_future()
            self._ends.append(end)
            await end

        tasks = [asyncio.create_task(self._window.run(send)) for _ in range(count)]
        await self.settled()
        return tasks

    @property
    def in_flight(self) -> int:
        return sum(not end.done() for end in self._ends)

    async def end(self, count: int, error: Exception | None = None) -> None:
        for end in [each for each in self._ends if not each.done()][:count]:
            if error is None:
                end.set_result(None)
            else:
                end.set_exception(error)
        await self.settled()

    async def settled(self) -> None:
        await polling.turn(5)


async def test_no_more_sends_are_in_flight_than_the_window_holds() -> None:
    sends = Sends(SendWindow(first=4))
    tasks = await sends.begin(10)
    assert sends.in_flight == 4
    while sends.in_flight:
        await sends.end(1)
    await asyncio.gather(*tasks)


async def test_a_window_of_successes_makes_room_for_one_more_up_to_the_most() -> None:
    window = SendWindow(first=4, most=6)
    sends = Sends(window)
    for size in (5, 6, 6):
        tasks = await sends.begin(int(window.size) + 1)
        await sends.end(100)
        await sends.end(100)
        await asyncio.gather(*tasks)
        assert int(window.size) == size


async def test_refusals_of_one_round_halve_the_window_once() -> None:
    window = SendWindow(first=32)
    sends = Sends(window)
    tasks = await sends.begin(32)
    await sends.end(32, errors.BusyError())
    assert window.size == 16
    assert await asyncio.gather(*tasks, return_exceptions=True)

    tasks = await sends.begin(32)
    assert sends.in_flight == 16
    await sends.end(16, errors.BusyError())
    assert sends.in_flight == 8, "those that waited, in the window halved again"
    await sends.end(8)
    await sends.end(8)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_window_never_closes() -> None:
    window = SendWindow(first=2)
    sends = Sends(window)
    for _ in range(5):
        tasks = await sends.begin(1)
        await sends.end(1, errors.BusyError())
        assert await asyncio.gather(*tasks, return_exceptions=True)
    assert window.size == 1
    tasks = await sends.begin(1)
    assert sends.in_flight == 1
    await sends.end(1)
    await asyncio.gather(*tasks)


async def test_faults_that_are_no_refusal_leave_the_window_as_it_is() -> None:
    window = SendWindow(first=4)
    sends = Sends(window)
    tasks = await sends.begin(4)
    await sends.end(4, errors.TransientError())
    assert await asyncio.gather(*tasks, return_exceptions=True)
    assert window.size == 4


@pytest.mark.parametrize("cancelled", [0, 1], ids=["in flight", "waiting"])
async def test_a_cancelled_send_leaves_its_room_to_the_next(cancelled: int) -> None:
    sends = Sends(SendWindow(first=1))
    tasks = await sends.begin(3)
    tasks[cancelled].cancel()
    await sends.settled()
    while sends.in_flight:
        await sends.end(1)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in ended].count(asyncio.CancelledError) == 1


async def test_room_given_to_a_send_that_is_cancelled_at_that_moment_is_not_lost() -> None:
    sends = Sends(SendWindow(first=1))
    first, second = await sends.begin(2)
    (end,) = [each for each in sends._ends if not each.done()]
    end.set_result(None)
    await polling.until(first.done)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    (third,) = await sends.begin(1)
    assert sends.in_flight == 1
    await sends.end(1)
    await third
