"""What the engine is told of random payloads is what AUTOMATIC1111 would be told."""

import oracle
import pytest


def check(count: int, begin: int) -> None:
    found = oracle.compare(count, begin)
    assert found.different == [], found.different[:3]
    assert found.counts["same"] > 0.8 * count, found.refused


def test_two_hundred_payloads_are_told_the_same():
    check(200, begin=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_payloads_are_told_the_same():
    check(5_000, begin=1_000)
