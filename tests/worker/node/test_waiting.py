import asyncio
from collections.abc import Callable

import pytest

from imagefleet import errors
from worker.node import salad


class Attempts:
    """Attempts that end in turn with *ends*."""

    def __init__(self, *ends: Exception | str) -> None:
        self.ends = list(ends)
        self.waits: list[bool] = []
        self.stop = asyncio.Event()

    async def attempt(self) -> str:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    async def run(self, has_worked: Callable[[], bool] = lambda: False) -> str | None:
        return await salad.retry_until_fixed(
            self.attempt,
            stop=self.stop,
            set_waiting=self.waits.append,
            has_worked=has_worked,
        )


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The longest duration of each pause, which takes no time here."""
    pauses: list[float] = []

    def jitter(seconds: float, _low: float) -> float:
        pauses.append(seconds)
        return 0.0

    monkeypatch.setattr("imagefleet.concurrency.jitter", jitter)
    return pauses


async def test_a_worker_waits_for_what_the_operator_fixes(pauses: list[float]):
    attempts = Attempts(
        errors.SetupError("no queue"), errors.TransientError("503"), "done"
    )

    assert await attempts.run() == "done"
    assert pauses == [5, 10]
    assert attempts.waits == [True, False, True, False]


@pytest.mark.parametrize(
    ("has_worked", "waited"),
    [(False, [5, 10, 20, 40, 80, 160, 300, 300]), (True, [5] * 8)],
)
async def test_pauses_grow_to_five_minutes_and_begin_anew_once_it_has_worked(
    pauses: list[float], has_worked: bool, waited: list[int]
):
    attempts = Attempts(*[errors.SetupError()] * 8, "done")
    await attempts.run(has_worked=lambda: has_worked)
    assert pauses == waited


async def test_the_waiting_ends(pauses: list[float], monkeypatch):
    monkeypatch.setattr(salad, "GIVE_UP_SECONDS", 30)
    attempts = Attempts(*[errors.SetupError()] * 9)

    assert await attempts.run() is None
    assert pauses == [5, 10, 20]


async def test_a_broken_node_is_not_waited_out(pauses: list[float]):
    with pytest.raises(errors.NodeError):
        await Attempts(errors.NodeError()).run()
    assert pauses == []


async def test_a_signal_ends_the_waiting_at_once():
    attempts = Attempts(errors.SetupError(), "done")
    attempts.stop.set()

    assert await attempts.run() is None
