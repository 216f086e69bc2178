"""What the engine is told of random payloads is what AUTOMATIC1111 would be told."""

import random

import formulas
import oracle
import payloads
import pytest

from imagefleet.job import editing


def check(count: int, begin: int) -> None:
    found = oracle.compare(count, begin)
    assert found.different == [], found.different[:3]
    assert found.counts["same"] > 0.8 * count, found.refused


def test_two_hundred_payloads_are_told_the_same():
    check(200, begin=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_thousand_payloads_are_told_the_same():
    check(5_000, begin=1_000)


def check_prompts(count: int) -> None:
    """Schedules of prompts that were made as trees, so that nothing had to read them.

    AUTOMATIC1111 reads them by a grammar for lark 1.1.2, which is its own code and not copied; and
    a grammar of ours would take what is ambiguous in its own way, and so show nothing.
    """
    different = []
    for number in range(count):
        chance = random.Random(number)
        text = payloads.text(chance)
        steps = chance.randint(1, 40)
        first_steps = chance.choice([None, 0, 12])
        found = editing.schedule(payloads.written(text), steps, first_steps or 0)
        expected = formulas.schedule(text, steps, first_steps or None)
        calls = range(steps)
        own = [formulas.words_at(found, call) for call in calls]
        if own != [formulas.words_at(expected, call) for call in calls]:
            different.append((payloads.written(text), steps, first_steps))
    assert different == []


def test_a_thousand_prompts_have_the_words_of_each_step():
    check_prompts(1_000)


@pytest.mark.slow
def test_twenty_thousand_prompts_have_the_words_of_each_step():
    check_prompts(20_000)
