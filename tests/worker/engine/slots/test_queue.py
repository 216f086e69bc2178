from __future__ import annotations

from typing import Any

from worker.engine.slots import queue as slot_queue

A = slot_queue.BatchKey(512, 512, 160, None, None)
B = slot_queue.BatchKey(768, 512, 160, None, None)


class _Ready:
    def __init__(self, key: tuple[object, ...]) -> None:
        self.lora_key = key


def queue(*batch_keys: Any, max_overtakes: int = 2) -> slot_queue.SlotQueue:
    """Jobs with their position as ticket, by batch key or (batch key, LoRA key)."""
    pairs = [batch_key if type(batch_key) is tuple else (batch_key, ()) for batch_key in batch_keys]
    jobs: list[Any] = [
        slot_queue.SlotJob(at, _Ready(key), batch_key)  # type: ignore[arg-type]
        for at, (batch_key, key) in enumerate(pairs)
    ]
    return slot_queue.SlotQueue(max_overtakes, jobs)


def tickets(waiting: slot_queue.SlotQueue, batch_key: Any, preferred: Any = None) -> list[int]:
    taken = iter(lambda: waiting.take(batch_key, preferred), None)
    return [job.ticket for job in taken if job is not None]


def test_a_batch_key_takes_its_own_jobs_in_order() -> None:
    waiting = queue(A, A, B, A)
    assert waiting.next_batch_key() == A
    assert tickets(waiting, A) == [0, 1, 3]
    assert waiting.next_batch_key() == B
    assert tickets(waiting, B) == [2]
    assert waiting.next_batch_key() is None


def test_a_job_is_overtaken_at_most_max_overtakes_times() -> None:
    waiting = queue(B, A, A, A, A, max_overtakes=2)
    assert tickets(waiting, A) == [1, 2], "after two, the older one is next"
    assert waiting.next_batch_key() == B
    assert tickets(waiting, B) == [0]
    assert tickets(waiting, A) == [3, 4]


def test_a_job_at_its_limit_blocks_younger_jobs_only() -> None:
    waiting = queue(A, B, A, A, max_overtakes=0)
    assert tickets(waiting, A) == [0]


def test_preferred_loras_go_first_up_to_the_limit() -> None:
    one = ("one",)
    waiting = queue((A, ()), *[(A, one)] * 4, max_overtakes=3)
    assert tickets(waiting, A, one) == [1, 2, 3, 0, 4]


def test_jobs_put_back_come_first() -> None:
    waiting = queue(A, A)
    job = waiting.take(A)
    assert job is not None
    waiting.put_back([job])
    assert tickets(waiting, A) == [0, 1]


def test_the_cheaper_weight_mode_is_chosen() -> None:
    costs = slot_queue.Costs(per_slot_seconds=1.1, shared_seconds=1.0, merge_seconds=1.0)
    one, other = ("one",), ("other",)
    assert slot_queue.choose_mode([one, other], (), 100, costs) == ("per_slot", ())
    assert slot_queue.choose_mode([one, one], (), 100, costs) == ("shared", one)
    assert slot_queue.choose_mode([one, one], (), 5, costs) == ("per_slot", ()), (
        "a merge no longer pays"
    )
    assert slot_queue.choose_mode([one, one], one, 1, costs) == ("shared", one), "merged already"
    assert slot_queue.choose_mode([(), ()], one, 1, costs) == ("shared", ()), (
        "the checkpoint's own weights"
    )
    assert slot_queue.choose_mode([()], None, 1, costs) == ("shared", ())
    assert slot_queue.ticks_until_change([3, 7], [15, 15, 15], 2) == 7 + 23
