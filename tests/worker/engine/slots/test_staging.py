"""What is staged while slots draw, and when its jobs start."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from drawing import assert_alike, draw, finish, make_request
from worker.engine import contract
from worker.engine.slots.staging import ClipStager


@pytest.fixture
def second_may_go_on(monkeypatch) -> threading.Event:
    """The second job's prompt is not encoded before this is set."""
    encode = ClipStager._encode
    may_go_on = threading.Event()

    def wait(self: ClipStager, job: Any, *given: Any) -> Any:
        assert job.ticket == 0 or may_go_on.wait()
        return encode(self, job, *given)

    monkeypatch.setattr(ClipStager, "_encode", wait)
    return may_go_on


def test_ticks_do_not_wait_for_a_job_that_is_staged_ahead(
    make_slot_engine, second_may_go_on: threading.Event
):
    engine = make_slot_engine(slots=1)
    for ticket in range(2):
        engine.admit(ticket, engine.prepare(make_request(steps=3, seed=ticket)))
    assert [each.ticket for _ in range(3) for each in engine.tick()] == [0]
    second_may_go_on.set()
    assert list(finish(engine)) == [1]


def test_a_lane_that_is_half_full_draws_while_the_next_job_is_still_being_staged(
    make_slot_engine, second_may_go_on: threading.Event
):
    engine = make_slot_engine(slots=2)
    engine._on_gpu = True
    engine.admit(0, engine.prepare(make_request(steps=4)))
    engine.tick()
    engine.admit(1, engine.prepare(make_request(steps=4, seed=1)))
    assert [each.ticket for _ in range(3) for each in engine.tick()] == [0]
    second_may_go_on.set()
    assert list(finish(engine)) == [1]


def test_loras_are_not_read_while_slots_are_filled(
    slot_engine,
    styles: list[contract.Lora],
    monkeypatch,
):
    start = slot_engine._start
    reading = []
    may_go_on = slot_engine._preparer._may_go_on
    wait = may_go_on.wait
    waits = queue.SimpleQueue[bool]()
    held = []
    lookups = []

    def wait_and_say_so() -> None:
        waits.put(not may_go_on.is_set())
        wait()

    def note_lookups() -> None:
        lookups.append(sum(slot_engine.lora_lookups.values()))

    def read_meanwhile(*arguments: Any) -> None:
        note_lookups()
        request = make_request(loras=styles[:1])
        reading.append(threads.submit(slot_engine.prepare, request))
        held.append(waits.get())
        note_lookups()
        start(*arguments)

    with ThreadPoolExecutor(1) as threads:
        slot_engine.admit(0, slot_engine.prepare(make_request(steps=1)))
        monkeypatch.setattr(may_go_on, "wait", wait_and_say_so)
        monkeypatch.setattr(slot_engine, "_start", read_meanwhile)
        slot_engine.tick()
        assert reading[0].result().lora_key
    note_lookups()
    before, meanwhile, after = lookups
    assert held == [True]
    assert before == meanwhile < after


@pytest.mark.parametrize(("room", "begun"), [(0, 1), (2.5, 2), (9, 4)])
def test_what_is_staged_ahead_takes_no_more_than_its_room(
    make_slot_engine,
    styles: list[contract.Lora],
    room: float,
    begun: int,
):
    engine = make_slot_engine(slots=4)
    requests = [make_request(seed=seed, loras=styles[:1]) for seed in range(8)]
    prepared = [engine.prepare(request) for request in requests]
    engine._stager.room_bytes = int(room * prepared[0].lora_bytes)
    for ticket, one in enumerate(prepared):
        engine.admit(ticket, one)
    engine.tick()
    (only,) = engine._lanes
    waiting = only.waiting
    assert sum(job.staging is not None for job in waiting) == begun
    # In host memory there is room for the next ones.
    assembled = [job.assembling is not None for job in waiting]
    assert assembled == [
        begun <= at < min(begun + 3, engine.slots) for at in range(len(waiting))
    ]


def test_all_lanes_next_jobs_are_staged_ahead(make_slot_engine):
    engine = make_slot_engine(slots=2)
    for ticket in range(8):
        request = make_request(seed=ticket, width=(64, 32)[ticket % 2])
        engine.admit(ticket, engine.prepare(request))
    engine.tick()
    waiting = {lane.batch_key.width: lane.waiting for lane in engine._lanes}
    assert [job.staging is not None for job in waiting[64]] == [True, True]
    assert [job.staging is not None for job in waiting[32]] == [
        True,
        True,
        False,
        False,
    ]


def test_loras_of_jobs_that_start_together_take_no_more_than_what_is_staged_ahead(
    make_slot_engine,
    styles: list[contract.Lora],
    monkeypatch,
):
    engine = make_slot_engine(slots=4)
    requests = [
        make_request(seed=seed, loras=(styles[seed % 3],), steps=3) for seed in range(8)
    ]
    expected = draw(engine, *requests)
    size_bytes = engine.prepare(requests[0]).lora_bytes
    engine._stager.room_bytes = int(2.5 * size_bytes)
    stage = engine._stager.try_to_stage
    at_once = []

    def count(job: Any) -> Any:
        failure = stage(job)
        active = [each for one in engine._lanes for each in one.active.values()]
        at_once.append(
            sum(
                each.staged is not None and each.staged.loras is not None
                for each in active
            )
        )
        return failure

    monkeypatch.setattr(engine._stager, "try_to_stage", count)
    images = draw(engine, *requests)
    assert len(at_once) == len(requests)
    assert max(at_once) == 2
    assert_alike(images, expected)
