import dataclasses
from typing import Any

import pytest

from worker.engine.slots import queue as slot_queue
from worker.engine.slots.lane import Lane

ONE = ("one",)


class _Ready:
    def __init__(self, key: tuple[object, ...]) -> None:
        self.lora_key = key


def queue(*lora_keys: Any, max_overtakes: int = 2) -> Lane:
    """Jobs of one batch key with their position as ticket."""
    batch_key = slot_queue.BatchKey(512, 512, 160, None, None)
    jobs = [
        slot_queue.SlotJob(at, _Ready(key), batch_key)  # type: ignore[arg-type]
        for at, key in enumerate(lora_keys)
    ]
    return Lane(batch_key, 1, max_overtakes, waiting=jobs)


def tickets(waiting: Lane, preferred: Any = None) -> list[int]:
    taken = iter(lambda: waiting.take(preferred), None)
    return [job.ticket for job in taken if job is not None]


def test_jobs_are_taken_in_order():
    waiting = queue((), ONE, (), ONE)
    assert tickets(waiting) == [0, 1, 2, 3]
    assert waiting.take() is None


@pytest.mark.parametrize(
    ("most", "taken"), [(2, [1, 2, 0, 3, 4]), (0, [0, 1, 2, 3, 4])]
)
def test_a_job_is_overtaken_at_most_max_overtakes_times(most: int, taken: list[int]):
    waiting = queue((), *[ONE] * 4, max_overtakes=most)
    assert tickets(waiting, ONE) == taken


def test_the_cheaper_weight_mode_is_chosen():
    costs = slot_queue.Costs(
        per_slot_seconds=1.1, shared_seconds=1.0, merge_seconds=1.0
    )
    one = ("one",)
    other = ("other",)
    assert slot_queue.choose_mode([one, other], (), 100, costs) == ("per_slot", ())
    assert slot_queue.choose_mode([one, one], (), 100, costs) == ("shared", one)
    assert slot_queue.choose_mode([one, one], (), 5, costs) == ("per_slot", ()), (
        "a merge no longer pays"
    )
    assert slot_queue.choose_mode([one, one], one, 1, costs) == ("shared", one), (
        "merged already"
    )
    assert slot_queue.choose_mode([(), ()], one, 1, costs) == ("shared", ()), (
        "the checkpoint's own weights"
    )
    assert slot_queue.choose_mode([()], None, 1, costs) == ("shared", ())
    assert slot_queue.choose_mode([one, ()], (), 100, costs, convolutions=True) == (
        "per_slot_convolutions",
        (),
    )
    costs = dataclasses.replace(costs, per_slot_convolutions_seconds=2.0)
    assert slot_queue.choose_mode([one], (), 2, costs, convolutions=True) == (
        "shared",
        one,
    ), "a merge saves more where calls take longer"
    assert slot_queue.ticks_until_change([3, 7], [15, 15, 15], 2) == 7 + 23
