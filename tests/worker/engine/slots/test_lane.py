"""Whose turn it is, and how full the calls are: lanes without tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine.slots import lane as lanes_module
from worker.engine.slots.lane import PATIENCE_TICKS, SHARED_TURN_TICKS, Lane, Lanes
from worker.engine.slots.queue import BatchKey, SlotJob, WeightMode

CALLS = 5
SLOTS = 4

SIZES = [BatchKey(512 + 64 * at, 512, 154, None, None) for at in range(20)]

#: As the native size: all lanes have as many slots.
LARGEST = BatchKey(2048, 2048, 154, None, None)


class Job(SimpleNamespace):
    """A job of a number of calls, and the ticks at which it was admitted and drawn."""

    is_urgent = False


class Drawing:
    """Runs lanes as the engine does, with jobs of *batch_keys* in this order."""

    def __init__(
        self,
        batch_keys: Iterable[BatchKey],
        *,
        blocks: int = 20,
        weight_mode: WeightMode = "shared",
        calls: Iterator[int] | None = None,
    ) -> None:
        self.lanes = Lanes(SLOTS, blocks, LARGEST, 2)
        self.calls = calls
        self.weight_mode = weight_mode
        self.waiting = [
            Job(ticket=at, batch_key=key) for at, key in enumerate(batch_keys)
        ]
        self.ran: list[Lane] = []
        #: Of each call while jobs were waiting.
        self.fill: list[float] = []
        self.most_held = 0
        self.admitted_at: dict[int, int] = {}
        self.drawn_at: dict[int, int] = {}

    def run(self, ticks: int | None = None) -> Drawing:
        while (ticks is None or len(self.ran) < ticks) and self.tick():
            pass
        return self

    def tick(self) -> bool:
        self.admit()
        lane = self.lanes.next()
        if lane is None:
            return False
        if lane.step is None:
            lane.block = self.lanes.choose_block(lane)
            lane.step = SimpleNamespace(is_kept=False)  # type: ignore[assignment]
        assert sum(1 for each in self.lanes if each.step) <= self.lanes.max_open
        lane.weight_mode = self.weight_mode
        for slot in range(lane.slots if self.lanes.takes_jobs(lane) else 0):
            if slot not in lane.active and (job := lane.take()):
                lane.active[slot] = job
        self.ran.append(lane)
        if self.waiting:
            self.fill.append(len(lane.active) / lane.slots)
        for slot, drawn in list(lane.active.items()):
            drawn.call += 1
            if drawn.call == drawn.calls:
                self.drawn_at[drawn.ticket] = len(self.ran)
                del lane.active[slot]
        return True

    def admit(self) -> None:
        while self.waiting and self.lanes.free:
            job = self.waiting.pop(0)
            job.call = 0
            job.calls = next(self.calls) if self.calls else CALLS
            self.admitted_at[job.ticket] = len(self.ran)
            self.lanes.add(job.batch_key, [as_slot_job(job)])
        self.most_held = max(self.most_held, self.lanes.jobs)

    def waited(self, ticket: int) -> int:
        """Ticks from a job's admission to its image."""
        return self.drawn_at[ticket] - self.admitted_at[ticket]


def as_slot_job(job: Any) -> SlotJob:
    class Fake:
        lora_key = ()
        schedule = SimpleNamespace(table=range(job.calls))
        ends = None

    return SlotJob(job.ticket, Fake(), job.batch_key, job.is_urgent)  # type: ignore[arg-type]


def mixed(sizes: int, jobs: int, seed: int = 1) -> list[BatchKey]:
    chosen = random.Random(seed)
    return [chosen.choice(SIZES[:sizes]) for _ in range(jobs)]


def various_calls() -> Iterator[int]:
    chosen = random.Random(2)
    while True:
        yield chosen.randint(2, 9)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("sizes", [1, 2, 3, 6])
def test_mixed_sizes_leave_hardly_any_slot_empty(sizes: int):
    drawing = Drawing(mixed(sizes, 600), calls=various_calls()).run()
    assert len(drawing.drawn_at) == 600
    assert mean(drawing.fill) > 0.96
    assert drawing.most_held <= SLOTS * (sizes + 1)


def test_lanes_of_unlike_slots_are_drawn_by_their_share_of_the_images():
    native = SIZES[0]
    sizes = [native, native._replace(width=768), native._replace(height=768)]
    chosen = random.Random(3)
    keys = chosen.choices(sizes, [2, 1, 1], k=1500)
    drawing = Drawing(keys, calls=iter(lambda: chosen.randint(10, 30), 0))
    drawing.lanes = Lanes(16, 20, native, 2)
    assert mean(drawing.run().fill) > 0.99


def test_lanes_that_share_weights_take_long_turns_and_stay_nearly_full():
    drawing = Drawing(mixed(3, 900), blocks=1, weight_mode="per_slot").run()
    assert mean(drawing.fill) > 0.93
    changes = sum(
        1 for one, following in itertools.pairwise(drawing.ran) if one != following
    )
    assert changes <= len(drawing.ran) / SHARED_TURN_TICKS + 20, (
        "turns end early at the end only"
    )
    assert drawing.most_held <= SLOTS * 6


@pytest.mark.parametrize("size", [SIZES[0], SIZES[1]])
def test_an_urgent_image_has_the_next_free_slot_also_where_no_other_has_its_size(
    size: BatchKey,
):
    drawing = Drawing([SIZES[0]] * 400).run(10)
    urgent = [Job(ticket=1000 + at, batch_key=size, is_urgent=True) for at in range(2)]
    drawing.waiting[:0] = urgent
    drawing.run()
    begun_at = {each.ticket: drawing.drawn_at[each.ticket] for each in urgent}
    assert [*begun_at] == sorted(begun_at, key=lambda ticket: begun_at[ticket])
    for each in urgent:
        # One image's calls until a slot is free, then its own by turns with the full lane.
        assert drawing.waited(each.ticket) <= 3 * CALLS + 2
    assert len(drawing.drawn_at) == 402


def test_urgent_images_without_end_leave_others_their_turns():
    drawing = Drawing([SIZES[0]] * 50)
    stream = itertools.count(1000)
    while len(drawing.drawn_at) < 1000:
        urgent = [each for each in drawing.waiting if each.is_urgent]
        if len(urgent) < SLOTS:
            job = Job(ticket=next(stream), batch_key=SIZES[0], is_urgent=True)
            drawing.waiting.insert(len(urgent), job)
            continue
        drawing.waiting.sort(key=lambda job: (-job.is_urgent, job.ticket))
        drawing.tick()
    held = [each for each in range(50) if each in drawing.admitted_at]
    assert held
    assert all(each in drawing.drawn_at for each in held)


def test_guided_and_unguided_jobs_fill_calls_as_large():
    chosen = random.Random(3)
    guided = SIZES[0]
    unguided = guided._replace(slot_rows=1, is_plain=True)
    keys = [chosen.choice([guided, unguided]) for _ in range(600)]
    drawing = Drawing(keys, calls=various_calls()).run()
    assert {lane.slots * lane.batch_key.slot_rows for lane in drawing.ran} == {
        2 * SLOTS
    }
    assert mean(drawing.fill) > 0.96
    assert drawing.most_held <= 5 * SLOTS, (
        "those in slots, and one for each slot of the larger"
    )


@pytest.mark.parametrize(("blocks", "slots"), [(1, SLOTS), (3, SLOTS), (4, 2 * SLOTS)])
def test_slots_of_one_row_are_as_many_as_there_are_weights_for(blocks: int, slots: int):
    lanes = Lanes(SLOTS, blocks, LARGEST, 2)
    with_loras = SIZES[0]._replace(slot_rows=1)
    plain = with_loras._replace(is_plain=True)
    assert [lanes.slots_of(each) for each in (with_loras, plain)] == [slots, 2 * SLOTS]
    assert sum(lanes.block_slots) == blocks * SLOTS, "no more memory than for two rows"
    lanes.slots = 1
    assert lanes.slots_of(plain) == 1, (
        "the last slot has no more images that could fail"
    )
    lane = Lane(with_loras, slots, max_overtakes=2)
    lanes.slots = SLOTS
    assert lanes.block_slots[lanes.choose_block(lane)] >= slots


@pytest.mark.parametrize("seed", range(12))
def test_a_lane_with_few_images_takes_ticks_by_its_images_not_by_turns(
    seed: int,
):
    """A compiled call computes all of its slots, so an empty one is lost."""
    chosen = random.Random(seed)
    share = chosen.uniform(0.005, 0.15)
    keys = [SIZES[chosen.random() < share] for _ in range(600)]
    drawing = Drawing(keys, calls=various_calls(), blocks=chosen.choice([1, 20])).run()
    of_rare = [lane for lane in drawing.ran if lane.batch_key == SIZES[1]]
    assert len(drawing.drawn_at) == 600
    own = keys.count(SIZES[1]) / len(keys)
    assert len(of_rare) / len(drawing.ran) <= own + 1 / PATIENCE_TICKS + 0.01
    assert max(map(drawing.waited, range(600))) <= 9 * (PATIENCE_TICKS + 4)


@pytest.mark.parametrize(("blocks", "turn"), [(20, 1), (1, SHARED_TURN_TICKS)])
def test_every_lane_runs_within_its_patience_and_a_turn_of_each_other(
    blocks: int, turn: int
):
    sizes = 4
    drawing = Drawing(mixed(sizes, 800), blocks=blocks, weight_mode="per_slot").run()
    for lane in {id(lane): lane for lane in drawing.ran}.values():
        at = [tick for tick, each in enumerate(drawing.ran) if each is lane]
        longest = max(later - one for one, later in itertools.pairwise(at))
        assert longest <= turn * (PATIENCE_TICKS + sizes)


def test_more_sizes_than_lanes_all_get_their_turn(
    monkeypatch,
):
    monkeypatch.setattr(lanes_module, "MAX_LANES", 3)
    drawing = Drawing(mixed(12, 600)).run()
    assert len(drawing.drawn_at) == 600
    assert max(drawing.waited(at) for at in range(600)) < 12 * (PATIENCE_TICKS + CALLS)


def test_jobs_that_change_the_shared_weights_have_the_unet_to_themselves():
    ordinary = SIZES[0]
    merged = ordinary._replace(merged_loras=("odd",))
    keys = [merged if at % 4 == 3 else ordinary for at in range(100)]
    drawing = Drawing(keys).run()
    assert len(drawing.drawn_at) == 100
    drawn_by_others = 0
    for one, following in itertools.pairwise(drawing.ran):
        if (
            one.batch_key.changes_shared_weights
            and not following.batch_key.changes_shared_weights
        ):
            assert not one.active
            drawn_by_others += 1
    assert drawn_by_others > 1


def test_an_endless_stream_of_them_lets_others_draw():
    ordinary = SIZES[0]
    merged = ordinary._replace(merged_loras=("odd",))
    keys = [merged] * 6 + [ordinary] + [merged] * 200
    drawing = Drawing(keys).run()
    assert drawing.waited(6) <= 2 * (PATIENCE_TICKS + CALLS) + CALLS * PATIENCE_TICKS


def test_a_compiled_lane_stays_open():
    drawing = Drawing([SIZES[0]]).run()
    (lane,) = drawing.lanes
    lane.step.is_kept = True  # type: ignore[misc,union-attr]
    drawing.waiting = [Job(ticket=at, batch_key=SIZES[at % 20]) for at in range(1, 100)]
    drawing.run()
    assert len(drawing.drawn_at) == 100
    assert lane.step is not None
    assert lane in list(drawing.lanes)


def test_each_lane_has_weights_of_its_own_while_there_are_enough():
    drawing = Drawing(mixed(3, 40), blocks=3).run(20)
    assert sorted(lane.block for lane in drawing.lanes) == [0, 1, 2]
    drawing = Drawing(mixed(4, 40), blocks=2).run(20)
    assert sorted(lane.block for lane in drawing.lanes) == [0, 0, 1, 1]
