"""Slots whose texts change between calls, and those with rows for what AND joins."""

import dataclasses

import pytest

from drawing import ROUNDING, assert_alike, difference, draw, make_request
from imagefleet import errors
from imagefleet.job.prompt import read_negative_prompt, read_prompt
from imagefleet.job.samplers import Options
from worker.engine import contract

LONG = "a red house in a meadow, (under a blue sky:1.2), " * 5

EVERY_OTHER = Options(s_min_uncond=1000.0)


def changing(request: contract.ImageRequest) -> contract.ImageRequest:
    """The same words in texts that differ by a space, and as two prompts of half the weight."""
    words = request.prompt
    negative = request.negative_prompt
    edited = f"[{words}|{words} ]"
    prompt = read_prompt(f"{edited}:0.5 AND {edited}:0.5", steps=request.steps)
    if request.controls or request.sampler_options.s_min_uncond:
        prompt = read_prompt(edited, steps=request.steps)
    negative_prompt = read_negative_prompt(
        f"[{negative}:{negative} :2]", steps=request.steps
    )
    return dataclasses.replace(request, prompt=prompt, negative_prompt=negative_prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "slots"), [("merged", 3), ("reloaded", 1)])
def test_texts_that_say_the_same_change_nothing_whatever_the_job(
    make_slot_engine,
    mixed: list[contract.ImageRequest],
    weights: str,
    slots: int,
):
    """LoRAs of the text's layers, masks, ControlNets and both passes among it."""
    engine = make_slot_engine(slots=slots, slot_weights=weights)
    expected = draw(engine, *mixed)
    edited = [changing(each) for each in mixed]
    assert all(engine.prepare(each).is_edited for each in edited)
    assert_alike(draw(engine, *edited, *mixed), expected * 2)


@pytest.mark.parametrize(
    ("words", "rows"), [("a AND b", [3, 3, 3, 3]), ("a AND b AND c", [4] * 4)]
)
def test_what_and_joins_takes_rows_and_slots_become_fewer(
    make_slot_engine, words: str, rows: list[int]
):
    engine = make_slot_engine(slots=6)
    request = make_request(prompt=read_prompt(words, steps=4))
    prepared = engine.prepare(request)
    assert [prepared.rows(call) for call in range(4)] == rows
    assert engine.slots_for(request) == 12 // rows[0]
    draw(engine, request)
    assert engine.unet_rows == sum(rows)


def test_a_second_pass_has_a_schedule_of_its_own(make_slot_engine):
    engine = make_slot_engine(slots=2)
    hires = contract.HiresPass(
        64, 64, denoising_strength=0.7, steps=4, upscaler="Latent"
    )
    first = {"prompt": read_prompt("a cat", steps=4)}

    def request(words: str) -> contract.ImageRequest:
        second = read_prompt(words, steps=4, first_steps=4)
        return make_request(**first, hires=dataclasses.replace(hires, prompt=second))

    words = [
        "[a cat:a hut:6]",
        "[a cat:a hut:1.5]",
        "[a cat:a hut:7]",
        "[a cat:a hut:3]",
        "a hut",
    ]
    images = draw(engine, *map(request, words))
    assert difference(images[0], images[1]) <= ROUNDING
    assert difference(images[3], images[4]) <= ROUNDING
    assert len({images[at].tobytes() for at in (0, 2, 4)}) == 3


def test_what_cannot_be_drawn_is_refused_by_name(make_slot_engine, make_control):
    engine = make_slot_engine(slots=2)
    joined = read_prompt("a AND b", steps=4)
    controlled = make_request(
        prompt=joined, controls=(make_control(),), sampler_options=EVERY_OTHER
    )
    with pytest.raises(errors.JobError, match="AND with s_min_uncond and ControlNets"):
        engine.prepare(controlled)
    many = "|".join(f"{LONG * 3}{at}" for at in range(60))
    with pytest.raises(
        errors.JobError, match=r"in all its steps \d+ chunks .* 256 at most"
    ):
        engine.prepare(
            make_request(prompt=read_prompt(f"[{many}]", steps=60), steps=60)
        )
