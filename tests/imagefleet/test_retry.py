"""The policy of retries."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from imagefleet import errors, retry
from imagefleet.retry import RetryPolicy

FAST = RetryPolicy(tries=4, first_wait_seconds=0.001, longest_wait_seconds=0.002)


class Storage:
    """Fails as it is told, then answers."""

    def __init__(self, *outcomes: Exception | str) -> None:
        self.outcomes = iter(outcomes)
        self.calls = 0

    async def call(self) -> str:
        self.calls += 1
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def test_a_fault_that_passes_is_not_seen_but_counted() -> None:
    told: list[errors.TransientError] = []
    busy = errors.TransientError("busy")
    storage = Storage(busy, busy, "done")
    policy = RetryPolicy(first_wait_seconds=0.001, on_retry=told.append)
    assert await policy.call(storage.call) == "done"
    assert told == [busy, busy]


async def test_a_fault_that_stays_surfaces_after_the_last_try() -> None:
    storage = Storage(*itertools.repeat(errors.TransientError("busy"), 9))
    with pytest.raises(errors.TransientError, match="busy"):
        await FAST.call(storage.call)
    assert storage.calls == FAST.tries


@pytest.mark.parametrize("error", [errors.LeaseLost(), errors.SetupError(), errors.JobError()])
async def test_what_will_not_pass_is_not_tried_again(error: errors.FleetError) -> None:
    storage = Storage(error, "done")
    with pytest.raises(type(error)):
        await FAST.call(storage.call)
    assert storage.calls == 1


async def test_retries_can_be_switched_off() -> None:
    storage = Storage(errors.TransientError(), "done")
    with pytest.raises(errors.TransientError):
        await retry.NEVER.call(storage.call)
    assert storage.calls == 1


async def test_tries_that_take_long_are_not_repeated_for_ever() -> None:
    storage = Storage(errors.TransientError(), "done")
    policy = RetryPolicy(first_wait_seconds=0.001, give_up_seconds=0)
    with pytest.raises(errors.TransientError):
        await policy.call(storage.call)
    assert storage.calls == 1


async def test_waiting_for_access_is_no_try() -> None:
    busy, closed = errors.TransientError("busy"), errors.NoAccessError()
    storage = Storage(*[closed] * 20, busy, *[closed] * 20, "done")
    policy = dataclasses.replace(FAST, tries=2, waits_for_access=True)
    assert await policy.call(storage.call) == "done"


async def test_access_is_not_waited_for_where_the_caller_has_other_things_to_do() -> None:
    storage = Storage(*[errors.NoAccessError()] * 9)
    with pytest.raises(errors.NoAccessError):
        await FAST.call(storage.call)
    assert storage.calls == FAST.tries
