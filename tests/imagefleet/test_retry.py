import dataclasses
from types import SimpleNamespace

import pytest

from imagefleet import concurrency, errors
from imagefleet.concurrency import RetryPolicy

FAST = RetryPolicy(tries=4, first_wait_seconds=0.001, longest_wait_seconds=0.002)


class Storage:
    """Fails with each of *outcomes* that is an error, then returns the last."""

    def __init__(self, *outcomes: Exception | str) -> None:
        self.outcomes = iter(outcomes)
        self.calls = 0

    async def call(self) -> str:
        self.calls += 1
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def test_a_transient_error_is_retried_and_reported():
    reported: list[errors.TransientError] = []
    busy = errors.TransientError("busy")
    storage = Storage(busy, busy, "done")
    policy = RetryPolicy(first_wait_seconds=0.001, on_retry=reported.append)
    assert await policy.call(storage.call) == "done"
    assert reported == [busy, busy]


@pytest.mark.parametrize(
    "error", [errors.LeaseLost(), errors.SetupError(), errors.JobError()]
)
async def test_a_permanent_error_is_not_retried(error: errors.FleetError):
    storage = Storage(error, "done")
    with pytest.raises(type(error)):
        await FAST.call(storage.call)
    assert storage.calls == 1


@pytest.mark.parametrize("closed", [errors.NoAccessError(), errors.StorageFullError()])
async def test_missing_access_or_space_counts_as_an_attempt_by_default(
    closed: errors.TransientError,
):
    storage = Storage(*[closed] * 9)
    with pytest.raises(type(closed)):
        await FAST.call(storage.call)
    assert storage.calls == FAST.tries


async def test_the_first_attempt_counts_towards_the_time_limit(
    monkeypatch,
):
    storage = Storage(errors.TransientError(), "done")
    now = iter([0.0, 60.0])
    monkeypatch.setattr(
        concurrency, "time", SimpleNamespace(monotonic=lambda: next(now))
    )

    async def slowly() -> str:
        return await storage.call()

    policy = RetryPolicy(first_wait_seconds=0.001, give_up_seconds=60)
    with pytest.raises(errors.TransientError):
        await policy.call(slowly)
    assert storage.calls == 1


def test_a_backoff_doubles_up_to_its_limit_and_is_jittered():
    pauses = [
        concurrency.backoff(retries, 1, 10) for retries in (0, 1, 2, 3, 4, 10_000)
    ]
    for pause, longest in zip(pauses, [1, 2, 4, 8, 10, 10], strict=True):
        assert longest / 2 <= pause <= longest
    assert len({concurrency.backoff(0, 1, 10) for _ in range(10)}) > 1


@pytest.mark.parametrize(
    ("kinds", "ends", "calls", "pauses"),
    [
        ("TTT", "done", 4, [1, 2, 4]),
        ("TTTTTTTTT", "T", 6, [1, 2, 4, 8, 8]),
        ("BBBBBBBBB", "done", 10, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8, 8]),
        # Each failure that counts makes the pauses for a busy storage short again.
        ("BTBTBT", "done", 7, [0.1, 1, 0.1, 2, 0.1, 4]),
        ("NFNF", "done", 5, [8, 8, 8, 8]),
    ],
)
async def test_each_kind_of_failure_is_counted_and_waited_for_as_the_policy_says(
    monkeypatch,
    kinds: str,
    ends: str,
    calls: int,
    pauses: list[float],
):
    """Transient (T), busy (B), no access (N) or full (F), by a policy that waits for the last."""
    raised = {
        "T": errors.TransientError("T"),
        "B": errors.BusyError("B"),
        "N": errors.NoAccessError("N"),
        "F": errors.StorageFullError("F"),
    }
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(
        concurrency, "jitter", lambda seconds, low=0.5, high=1.0: seconds
    )
    monkeypatch.setattr(concurrency.asyncio, "sleep", sleep)
    policy = RetryPolicy(
        first_wait_seconds=1, waits_for_access=True, waits_while_busy=True
    )
    storage = Storage(*(raised[kind] for kind in kinds), "done")
    try:
        outcome = await policy.call(storage.call)
    except errors.TransientError as error:
        outcome = error.message
    assert (outcome, storage.calls) == (ends, calls)
    assert slept == pytest.approx(pauses)


async def test_an_attempt_whose_reply_was_lost_puts_all_that_follow_in_doubt():
    lost = errors.TransientError("lost")
    lost.outcome_is_unknown = True
    failures = iter([errors.TransientError("before"), lost, errors.TransientError()])
    doubts: list[bool] = []

    async def operation(is_in_doubt: bool) -> None:
        doubts.append(is_in_doubt)
        raise next(failures)

    policy = dataclasses.replace(FAST, tries=3)
    with pytest.raises(errors.TransientError) as caught:
        await policy.call_in_doubt(operation)
    assert doubts == [False, False, True]
    assert caught.value.outcome_is_unknown
