"""A short run of the fuzzer, the same each time; `make fuzz` is the long one."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mutations
import targets


@pytest.mark.parametrize("name", targets.TARGETS)
def test_valid_examples_are_judged_within_bounds(name: str):
    target = targets.TARGETS[name]

    judged = [target.check(seed) for seed in target.seeds]

    assert any(judged), "at least one example is accepted"


@pytest.mark.parametrize("name", targets.TARGETS)
def test_damaged_examples_raise_declared_errors_alone(name: str):
    target = targets.TARGETS[name]
    is_slow = target.max_seconds > targets.MAX_SECONDS

    @settings(
        derandomize=True,
        deadline=None,
        max_examples=8 if is_slow else 60,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(number=st.integers(0, 2**64 - 1))
    def check(number: int) -> None:
        target.check(mutations.mutated(random.Random(number), target.seeds)[:20_000])

    check()


def test_a_target_that_breaks_its_promise_is_found():
    def read(data: bytes) -> None:
        if b"x" in data:
            raise KeyError(data)
        raise ValueError("y" * 10_000)

    target = targets.Target(read, (ValueError,), (b"x",))

    for data, reason in ((b"x", "KeyError"), (b"", "a message of 10,000 characters")):
        with pytest.raises(targets.FoundError, match=reason):
            target.check(data)
