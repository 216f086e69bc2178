import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_model
from calls import watch_calls
from drawing import (
    ROUNDING,
    assert_alike,
    difference,
    draw,
    draw_alone,
    finish,
    make_request,
)
from imagefleet import errors
from worker.engine import contract
from worker.engine.sampler import NoiseStream
from worker.engine.slots import lane
from worker.engine.slots.prepare import PreparedRequest


def lora(
    path: Path, weight: float = 1.0, text_encoder_weight: float | None = None
) -> Any:
    text = weight if text_encoder_weight is None else text_encoder_weight
    return contract.Lora(path.stem, path, text, weight)


def test_a_slot_is_refilled_the_tick_after_its_image_is_done(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=2)
    calls = watch_calls(monkeypatch, engine)
    steps = [2, 5, 1, 3, 4, 2, 2]
    requests = [make_request(steps=count, seed=count) for count in steps]
    draw(engine, *requests)
    busy = [len(call.tickets) for call in calls]
    assert sum(busy) == sum(steps)
    assert busy[:-2] == [2] * (len(busy) - 2), "a slot may be empty only at the end"


def test_jobs_that_take_longer_to_start_than_a_tick_start_one_by_one(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=3)
    engine._start_seconds = 2 * engine._runner.costs.shared_seconds
    calls = watch_calls(monkeypatch, engine)
    draw(engine, *(make_request(steps=3, seed=number) for number in range(4)))
    assert [len(call.tickets) for call in calls] == [1, 2, 3, 3, 2, 1]


def test_a_lora_that_cannot_be_packed_is_merged_and_drawn_without_a_break(
    make_slot_engine,
    engine,
    checkpoint: Path,
    lora_paths: list[Path],
    monkeypatch,
    tmp_path,
):
    path = tiny_model.build_tiny_lora(
        tmp_path / "odd.safetensors", checkpoint, rank=12, seed=5
    )
    tensors = load_file(path)
    # A full difference of a 3x3 convolution: only linear layers' weights are held by slot.
    tensors["lora_unet_conv_in.diff"] = torch.randn(32, 4, 3, 3) / 10
    save_file(tensors, path)
    ours = make_slot_engine()
    calls = watch_calls(monkeypatch, ours)
    requests = [
        make_request(seed=1, loras=(lora(lora_paths[0]),)),
        make_request(seed=2, loras=(lora(path),)),
        make_request(seed=3),
        make_request(seed=4, loras=(lora(path),)),
    ]
    images = draw(ours, *requests)
    modes = [(call.mode, len(call.tickets)) for call in calls]
    first = modes.index(("shared", 2))
    assert modes[first : first + 4] == [("shared", 2)] * 4, "the others wait meanwhile"
    assert modes[:first] + modes[first + 4 :] == [("per_slot", 2)] * 4
    assert_alike(images, draw_alone(engine, requests))


def test_only_a_nan_image_fails_and_its_slot_recovers(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=2)
    sound = draw(engine, make_request(seed=1), make_request(seed=2))
    original = PreparedRequest.first_latents

    def first_latents(prepared: PreparedRequest, noise: NoiseStream) -> torch.Tensor:
        latents = original(prepared, noise)
        return latents * torch.nan if prepared.request.seed == 666 else latents

    monkeypatch.setattr(PreparedRequest, "first_latents", first_latents)
    seeds = [1, 666, 1, 2]
    images = draw(engine, *(make_request(seed=seed) for seed in seeds))
    failed = images.pop(1)
    assert isinstance(failed, errors.TransientError)
    assert "NaN" in failed.message
    assert_alike(images, [sound[0], *sound])


def test_only_a_job_that_cannot_start_fails(slot_engine, monkeypatch):
    original = slot_engine._stager._encode

    def encode(job: Any, *given: Any) -> Any:
        if job.ticket in {1, 5}:  # one starts at once, one is staged ahead
            raise errors.JobError("the weights in the prompt cancel each other out")
        return original(job, *given)

    monkeypatch.setattr(slot_engine._stager, "_encode", encode)
    images = draw(slot_engine, *(make_request(seed=seed) for seed in range(7)))
    failed = [
        at for at, image in enumerate(images) if isinstance(image, errors.JobError)
    ]
    assert failed == [1, 5]


SIZES = ((64, 64), (64, 96), (96, 64))


def test_images_of_mixed_sizes_match_each_drawn_alone(
    make_slot_engine,
    lora_paths: list[Path],
):
    engine = make_slot_engine(blocks=3)
    requests = [
        make_request(width=width, height=height, seed=at, steps=1 + at % 2, loras=loras)
        for at, ((width, height), loras) in enumerate(
            itertools.product(
                SIZES, [(lora(lora_paths[0]),), (lora(lora_paths[1], 2.0),)]
            )
        )
    ]
    together = draw(engine, *requests)
    assert engine._unet.changes.block[0] in range(3)
    assert_alike(together, draw_alone(engine, requests))


def test_lanes_that_share_weights_load_them_again_and_draw_the_same(
    make_slot_engine,
    lora_paths: list[Path],
    monkeypatch,
):
    monkeypatch.setattr(lane, "SHARED_TURN_TICKS", 1)
    requests = [
        make_request(width=width, height=height, seed=at, loras=(lora(path),), steps=2)
        for at, ((width, height), path) in enumerate(
            itertools.product(SIZES[:2], lora_paths[:2])
        )
    ]
    images = {}
    for blocks in (1, 2):
        engine = make_slot_engine(slots=2, blocks=blocks)
        loads = []
        load = engine._unet.load_slot

        def count(
            slot: int, changes: Any, load: Any = load, loads: Any = loads
        ) -> None:
            assert changes.stacked, "copied again from the host"
            loads.append(slot)
            load(slot, changes)

        monkeypatch.setattr(engine._unet, "load_slot", count)
        images[blocks] = draw(engine, *requests)
        assert (len(loads) > len(requests)) == (blocks == 1)
    assert_alike(images[1], images[2])


def test_lanes_with_equal_loras_share_them_and_others_do_not_merge_in_turns(
    make_slot_engine,
    lora_paths: list[Path],
    monkeypatch,
):
    engine = make_slot_engine(blocks=2)
    calls = watch_calls(monkeypatch, engine)
    merges = []
    activate = engine._merger.activate
    monkeypatch.setattr(
        engine._merger,
        "activate",
        lambda loras: activate(merges.append(loras) or loras),
    )
    one = lora(lora_paths[0])
    other = lora(lora_paths[1])
    draw(
        engine,
        *(
            make_request(width=64 + 32 * (at % 2), loras=(one,), steps=9)
            for at in range(6)
        ),
    )
    assert {call.mode for call in calls} == {"shared"}
    assert len(merges) == 1
    calls.clear()
    draw(
        engine,
        make_request(loras=(one,)),
        make_request(width=96, loras=(other,)),
        make_request(height=96),
    )
    assert len(merges) == 2, "the checkpoint's own weights, once"
    assert {call.mode for call in calls} == {"shared", "per_slot"}


def test_prompts_of_any_length_share_calls_with_their_like(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=8, blocks=4)
    requests = [
        make_request(
            prompt="a castle on a hill, " * 5 * (chunks - 1) + "a castle", steps=1
        )
        for chunks in range(1, 11)
    ]
    chunks = [engine.prepare(request).text_rows[0].length for request in requests]
    assert chunks == list(range(1, 11))
    calls = watch_calls(monkeypatch, engine)
    images = draw(engine, *requests)
    assert len(calls) == 3, "1 and 2, 3 and 4, and 5 to 10 chunks"
    for at in (1, 4):
        assert difference(images[at], draw(engine, requests[at])[0]) <= ROUNDING


def test_a_lane_of_large_images_has_fewer_slots(make_slot_engine):
    engine = make_slot_engine(slots=6)
    long = make_request(prompt="a castle on a hill, " * 11)
    for ticket, request in enumerate(
        [
            make_request(),
            make_request(width=96),
            make_request(width=128, height=128),
            long,
        ]
    ):
        engine.admit(ticket, engine.prepare(request))
    assert [each.slots for each in engine._lanes] == [6, 4, 2, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"negative_prompt": "word " * 5000}, "chunks"),
        ({"clip_skip": 5}, "clip_skip"),
        ({"sampler": "huen"}, "huen"),
    ],
)
def test_what_cannot_be_drawn_is_refused(slot_engine, changes, reason: str):
    with pytest.raises(errors.JobError, match=reason):
        slot_engine.prepare(make_request(**changes))


def test_prepare_is_thread_safe(slot_engine):
    requests = [
        make_request(prompt=f"photo number {number} " * 20) for number in range(40)
    ]
    expected = [slot_engine.prepare(request).texts for request in requests]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(slot_engine.prepare, requests))
    assert [prepared.texts for prepared in found] == expected


def test_an_urgent_image_is_drawn_before_those_that_wait_for_a_slot(
    make_slot_engine, slot_engine
):
    engine = make_slot_engine(slots=2)
    for ticket in range(4):
        engine.admit(
            ticket, engine.prepare(make_request(seed=ticket, steps=4 + ticket))
        )
    engine.tick()
    while not engine.free:
        finished = engine.tick()
    assert [each.ticket for each in finished] == [0]
    engine.admit(4, engine.prepare(make_request(seed=4, steps=2)), is_urgent=True)
    outcomes = finish(engine)
    assert [*outcomes][:2] == [1, 4]
    (expected,) = draw(slot_engine, make_request(seed=4, steps=2))
    assert difference(outcomes[4], expected) <= ROUNDING


def test_an_image_is_dropped_for_its_estimate_halfway_and_its_slot_goes_to_the_next(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=1)
    calls = watch_calls(monkeypatch, engine)
    stop = Event()
    for ticket, each in enumerate((stop, Event())):
        engine.admit(ticket, engine.prepare(make_request(stop=each)))
    found = []
    while engine.busy:
        found += engine.tick()
        if found:
            stop.set()
    assert [each.is_estimate for each in found] == [True, False, True, False]
    assert isinstance(found[1].outcome, errors.JobCancelled)
    assert 0 < difference(found[2].outcome, found[3].outcome) < 100
    assert [call.tickets for call in calls] == [[0]] * 2 + [[1]] * 4
    assert engine.unet_rows_saved == 4
