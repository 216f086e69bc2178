"""Images and steps without guidance take one row of a call, beside those with guidance."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calls import watch_calls
from drawing import assert_alike, draw, draw_alone, make_request
from imagefleet.job.samplers import Options
from rows.process import decibels
from worker.engine import contract

LONG = "a red house in a meadow, (under a blue sky:1.2), " * 5

EVERY_OTHER = Options(s_min_uncond=1000.0)

#: A level of 255 in every value; images in company are to be within 50 dB of those alone.
ROUNDING = 2
LEAST_DECIBELS = 50


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 10),
        ({"cfg_scale": 1.0}, 5),
        ({"sampler_options": EVERY_OTHER}, 8),
        ({"sampler_options": Options(s_min_uncond=0.1)}, 10),
    ],
)
def test_an_image_takes_a_row_less_of_each_call_without_guidance(
    make_slot_engine, changes, rows: int
):
    engine = make_slot_engine(slots=1)
    draw(engine, make_request(steps=5, **changes))
    assert engine.unet_rows == rows


@pytest.mark.parametrize(
    ("weights", "slots", "blocks"),
    [
        ("merged", 3, 2),
        pytest.param("merged", 2, 4, marks=pytest.mark.slow),
        pytest.param("reloaded", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_jobs_of_all_kinds_are_in_company_what_they_are_alone(
    make_slot_engine,
    mixed: list[Any],
    weights: str,
    slots: int,
    blocks: int,
):
    engine = make_slot_engine(slots=slots, blocks=blocks, slot_weights=weights)
    alone = draw_alone(engine, mixed)
    together = draw(engine, *mixed, *mixed[::-1])
    expected = [*alone, *alone[::-1]]
    assert_alike(together, expected)
    assert min(map(decibels, together, expected)) >= LEAST_DECIBELS


def test_a_scale_of_zero_is_the_negative_prompt_alone(make_slot_engine):
    engine = make_slot_engine(slots=1)
    request = make_request(steps=5, prompt="a house", negative_prompt="a blue fish")
    negative = replace(request, prompt="a blue fish", cfg_scale=1.0)
    drawn = draw_alone(engine, [replace(request, cfg_scale=0.0)])
    assert_alike(drawn, draw_alone(engine, [negative]))


def test_calls_are_full_of_either_kind(make_slot_engine, monkeypatch):
    """Neither waits for the other to end, no row is drawn for nothing, and calls are as large."""
    scales = [7.0, 1.0, 1.0, 7.0] * 2
    requests = [make_request(seed=at, cfg_scale=each) for at, each in enumerate(scales)]
    engine = make_slot_engine(slots=2)
    calls = watch_calls(monkeypatch, engine)
    draw(engine, *requests)
    counts = Counter((call.slots, call.slot_rows) for call in calls)
    assert counts == {(2, 2): 8, (4, 1): 4}


@pytest.mark.parametrize(("blocks", "slots"), [(3, 2), (4, 4)])
def test_images_of_one_row_with_loras_are_twice_as_many_if_weights_for_them_have_room(
    make_slot_engine,
    lora_paths: list[Path],
    monkeypatch,
    blocks: int,
    slots: int,
):
    engine = make_slot_engine(slots=2, blocks=blocks)
    requests = [
        make_request(
            seed=at, cfg_scale=1.0, loras=(contract.Lora("one", path, 1.0, scale),)
        )
        for at, (path, scale) in enumerate(
            zip(lora_paths[:2] * 2, (0.5, 1.0, 1.5, 2.0), strict=True)
        )
    ]
    alone = draw_alone(engine, requests)
    calls = watch_calls(monkeypatch, engine)
    images = draw(engine, *requests)
    assert {(call.slots, call.slot_rows) for call in calls} == {(slots, 1)}
    assert_alike(images, alone, within=ROUNDING)


def test_the_engine_asks_for_as_many_images_as_fill_its_calls(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=2)
    tickets = itertools.count()
    finished = 0
    prepared = engine.prepare(make_request(cfg_scale=1.0, steps=2))
    calls = watch_calls(monkeypatch, engine)
    while finished < 12:
        while engine.free:
            engine.admit(next(tickets), prepared)
        finished += len(engine.tick())
    assert engine.capacity == 8, "one more ready for each of four slots"
    assert {(call.slots, call.slot_rows) for call in calls} == {(4, 1)}


def test_an_image_between_two_kinds_of_steps_begins_again_with_the_first(
    make_slot_engine,
    monkeypatch,
):
    """The memory ends in a step without guidance: the first one has guidance."""
    engine = make_slot_engine(slots=2)
    requests = [
        make_request(seed=seed, sampler_options=EVERY_OTHER) for seed in range(3)
    ]
    sound = draw(engine, *requests)
    failures = iter([True])
    calls = watch_calls(
        monkeypatch, engine, lambda call: call.slot_rows == 1 and next(failures, False)
    )
    images = draw(engine, *requests)
    assert next(call.slots for call in calls if call.slot_rows == 1) == 3
    assert_alike(images, sound, within=ROUNDING)


def test_the_negative_prompt_of_an_unguided_image_is_not_encoded(
    make_slot_engine,
):
    engine = make_slot_engine(slots=2)
    request = make_request(cfg_scale=1.0, negative_prompt=LONG * 3)
    assert engine.prepare(request).tokens == engine.prepare(make_request()).tokens
    image, other = draw(
        engine, request, make_request(cfg_scale=1.0, negative_prompt="")
    )
    assert (image == other).all()
