"""The figures of `benchmarks/gpus.py`, by which several GPUs are judged."""

from collections import Counter
from collections.abc import Mapping

import pytest

from one_machine import figures
from one_machine.workers import Sample

SLOTS = 16


def samples(rates: Mapping[str, float], idle: float = 0.0) -> list[Sample]:
    """A minute of GPUs whose images come a round of all slots at a time."""
    found = []
    for number in range(121):
        at = number / 2
        sample = Sample(at, busy_seconds=dict.fromkeys(rates, at * (1 - idle)))
        sample.stage_counts = Counter(upload=1 + number)
        sample.stage_seconds = Counter(upload=0.5 * (1 + number))  # type: ignore[arg-type]
        for gpu, rate in rates.items():
            sample.images[gpu] = int(at * rate / SLOTS + 0.37) * SLOTS
            sample.idle_seconds[gpu] = {"starved": at * idle}
        found.append(sample)
    return found


def test_rounds_of_slots_do_not_blur_a_rate():
    for rate in (13.1, 15.27, 16.0):
        assert figures.rate(samples({"0": rate}), "0") == pytest.approx(rate, rel=3e-3)


def test_what_is_missing_to_linear_is_idle_time_or_speed():
    one = figures.measured(samples({"0": 16.0}), ["0"], {"0": {"sm_megahertz": 1980}})
    clocks = {gpu: {"sm_megahertz": 1881} for gpu in "01"}
    slow = figures.measured(samples({"0": 15.2, "1": 15.2}), ["0", "1"], clocks)
    waits = figures.measured(samples({"0": 15.2, "1": 15.2}, idle=0.05), ["0", "1"], {})
    found = figures.compared(one, slow)
    assert found["linear_fraction"] == pytest.approx(0.95, abs=3e-3)
    assert found["speed_while_busy_over_one"] == pytest.approx(0.95, abs=3e-3)
    assert found["clock_over_one"] == pytest.approx(0.95)
    assert found["busy_time_over_one"] == 1
    found = figures.compared(one, waits)
    assert found["speed_while_busy_over_one"] == pytest.approx(1.0, abs=3e-3)
    assert found["busy_time_over_one"] == pytest.approx(0.95)
    assert found["idle_seconds"] == {"starved": pytest.approx(6.0)}
