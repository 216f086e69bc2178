from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from imagefleet import errors
from worker.salad import wait_for_operator


class Attempts:
    """Attempts that fail in turn with what they are told."""

    def __init__(self, *ends: Exception | str) -> None:
        self.ends = list(ends)
        self.waits: list[bool] = []
        self.stop = asyncio.Event()

    async def attempt(self) -> str:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    async def run(
        self, longest_seconds: float = 60, has_worked: Callable[[], bool] = lambda: False
    ) -> str | None:
        return await wait_for_operator.patiently(
            self.attempt,
            longest_seconds=longest_seconds,
            stop=self.stop,
            tell_waiting=self.waits.append,
            has_worked=has_worked,
        )


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The longest that each pause may take, with the jitter taken out and the time as well."""
    drawn: list[float] = []

    def uniform(_: float, longest: float) -> float:
        drawn.append(longest)
        return 0.0

    monkeypatch.setattr("worker.salad.wait_for_operator.random.uniform", uniform)
    return drawn


async def test_what_the_operator_mends_is_waited_for(pauses: list[float]) -> None:
    attempts = Attempts(errors.SetupError("no queue"), errors.TransientError("503"), "done")

    assert await attempts.run() == "done"
    assert pauses == [5, 10]
    assert attempts.waits == [True, False, True, False]


async def test_pauses_grow_to_five_minutes(pauses: list[float]) -> None:
    attempts = Attempts(*[errors.SetupError()] * 8, "done")
    await attempts.run(longest_seconds=3600)

    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]


async def test_a_worker_that_has_worked_waits_anew(pauses: list[float]) -> None:
    attempts = Attempts(*[errors.SetupError()] * 4, "done")
    await attempts.run(has_worked=lambda: True)

    assert pauses == [5, 5, 5, 5]


async def test_patience_ends(pauses: list[float]) -> None:
    attempts = Attempts(*[errors.SetupError()] * 9)

    assert await attempts.run(longest_seconds=30) is None
    assert pauses == [5, 10, 20]


async def test_a_broken_node_is_not_waited_out(pauses: list[float]) -> None:
    with pytest.raises(errors.NodeError):
        await Attempts(errors.NodeError()).run()
    assert pauses == []


async def test_a_signal_ends_the_waiting_at_once() -> None:
    attempts = Attempts(errors.SetupError(), "done")
    attempts.stop.set()

    assert await attempts.run() is None
