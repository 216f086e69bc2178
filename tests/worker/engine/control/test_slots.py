"""Jobs with ControlNets beside others: each image is what it is alone, whatever fails."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drawing import (
    ROUNDING,
    assert_alike,
    difference,
    draw,
    draw_alone,
    draw_prepared,
    make_request,
)
from imagefleet import errors
from sampling import alphas_cumprod
from worker.engine import contract
from worker.engine.control import network
from worker.engine.passes import begin
from worker.engine.samplers.schedule import make_schedule

pytestmark = pytest.mark.slow


@pytest.fixture
def mixed(make_control, styles: list[contract.Lora]) -> list[Any]:
    """Requests of three ControlNets in all ways."""
    pixels = make_control(image=9).pixels
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 32:] = 255
    long = "a castle on a hill, " * 12
    return [
        make_request(seed=1, controls=(make_control(0),)),
        make_request(seed=2, controls=(make_control(0, image=1, weight=0.4),), steps=7),
        make_request(seed=3, controls=(make_control(0, end=0.4),), loras=(styles[0],)),
        make_request(seed=4, controls=(make_control(1),), loras=(styles[1], styles[2])),
        make_request(seed=5, loras=(styles[1],)),
        make_request(
            seed=6, controls=(make_control(0, start=0.5), make_control(1, image=3))
        ),
        make_request(seed=7, controls=(make_control(1, image=2), make_control(0))),
        make_request(seed=8, controls=(make_control(0),), prompt=long),
        make_request(
            seed=9,
            controls=(make_control(0),),
            init=contract.InitImage(pixels, 0.7, mask),
        ),
        make_request(seed=10),
        make_request(seed=11, controls=(make_control(0),), sampler="plms", steps=5),
    ]


def test_an_image_beside_others_is_what_it_is_alone(make_slot_engine, mixed: list[Any]):
    engine = make_slot_engine(slots=3)
    alone = draw_alone(engine, mixed)
    assert_alike(draw(engine, *mixed), alone)
    keys = {len(engine.prepare(each).controls) for each in mixed}
    assert keys == {0, 1, 2}
    plain = [dataclasses.replace(request, controls=()) for request in mixed]
    for request, image, other in zip(mixed, alone, draw(engine, *plain), strict=True):
        assert (difference(image, other) > 20) == bool(request.controls)


def test_the_next_images_of_a_job_use_its_embedded_control_image(
    make_slot_engine,
    make_control,
    monkeypatch,
):
    engine = make_slot_engine(slots=2)
    requests = [
        make_request(seed=seed, controls=(make_control(),)) for seed in range(4)
    ]
    apart = draw_alone(engine, requests)
    embedded = []
    embed = network.SlotControlNet.embed
    monkeypatch.setattr(
        network.SlotControlNet,
        "embed",
        lambda self, pixels: embed(self, embedded.append(pixels) or pixels),
    )
    assert_alike(draw_prepared(engine, requests), apart)
    assert len(embedded) == 1


@pytest.mark.parametrize(
    ("sampler", "start", "end", "steered"),
    [
        ("euler", 0.0, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("euler", 0.0, 0.0, [0, 1]),
        ("euler", 0.25, 0.5, [3, 4, 5]),
        ("euler", 0.2, 0.55, [3, 4, 5]),
        ("euler", 1.0, 1.0, []),
        ("plms", 0.0, 0.0, [0, 1, 2]),
        ("plms", 0.25, 0.5, [4, 5, 6]),
        ("heun", 0.0, 0.0, [0, 1, 2]),
        ("heun", 0.25, 0.5, [5, 6, 7, 8, 9, 10]),
    ],
)
def test_the_steps_are_those_of_sd_webui_controlnet(
    sampler: str, start: float, end: float, steered: list[int], make_control
):
    """Calls with `start <= state.sampling_step / steps <= end`, that being set after each step."""
    control = make_control(weight=0.5, start=start, end=end)
    made = make_schedule(
        sampler, 9 if sampler == "plms" else 8, alphas_cumprod(), "epsilon"
    )
    weights = begin.control_weights(control, made.finished, 8)
    assert [at for at, weight in enumerate(weights) if weight == 0.5] == steered
    assert {weights[at] for at in range(len(weights)) if at not in steered} <= {0.0}


@pytest.mark.parametrize(
    ("sampler", "steered"), [("euler", [3, 4, 5]), ("ddim", [3, 4]), ("plms", [4, 5])]
)
def test_img2img_is_steered_in_the_steps_that_automatic1111_counts(
    sampler: str, steered: list[int], slot_engine, make_control
):
    """Of the steps that are taken: seven of eight; DDIM and PLMS end two earlier."""
    control = make_control(start=0.2, end=0.6)
    init = contract.InitImage(control.pixels, 0.8)
    request = make_request(sampler=sampler, steps=8, init=init, controls=(control,))
    (prepared,) = slot_engine.prepare(request).controls
    assert [at for at, weight in enumerate(prepared.weights) if weight] == steered


def test_controlnets_without_effect_take_no_lane_and_load_nothing_on_the_device(
    make_slot_engine,
    make_control,
):
    engine = make_slot_engine(slots=2)
    idle = [make_control(seed, weight=0.0) for seed in range(4)]
    image, plain = draw(engine, make_request(controls=tuple(idle)), make_request())
    assert difference(image, plain) <= ROUNDING
    assert engine._caches.control_nets.held_bytes == 0


def test_more_controlnets_than_work_at_once_are_refused(slot_engine, make_control):
    with pytest.raises(errors.JobError, match="has 4 ControlNets; at most 3"):
        slot_engine.prepare(make_request(controls=(make_control(),) * 4))


@pytest.mark.parametrize("when", ["copying", "drawing"])
def test_without_memory_unneeded_controlnets_are_dropped_before_slots(
    when: str,
    make_slot_engine,
    make_control,
    monkeypatch,
):
    engine = make_slot_engine(slots=4, blocks=2)
    requests = [make_request(seed=seed, controls=(make_control(1),)) for seed in (1, 2)]
    sound = draw(make_slot_engine(slots=4), *requests)
    draw(engine, make_request(controls=(make_control(0),)))
    nets = engine._caches.control_nets
    failures = iter([True])
    unneeded = set(nets._kept)
    (lane,) = engine._lanes
    lane.close()

    def fail_once(original: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if next(failures, False):
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return original(*arguments)

        return run

    where, name = (nets, "_copy") if when == "copying" else (engine._runner, "run")
    monkeypatch.setattr(where, name, fail_once(getattr(where, name)))
    assert_alike(draw(engine, *requests), sound)
    assert next(failures, None) is None, "or the test shows nothing"
    assert not unneeded & set(nets._alive)
    assert (engine._lanes.blocks, engine.slots) == (2, 4)


def test_a_controlnet_that_has_no_room_beside_the_slots_gets_theirs(
    make_slot_engine,
    make_control,
    monkeypatch,
):
    engine = make_slot_engine(slots=4, blocks=1)
    request = make_request(controls=(make_control(),))
    (sound,) = draw(make_slot_engine(slots=4), request)
    nets = engine._caches.control_nets
    copy = nets._copy

    def fail(identity: Any) -> Any:
        if engine.slots > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return copy(identity)

    monkeypatch.setattr(nets, "_copy", fail)
    beside = [make_request(seed=seed) for seed in (2, 3)]
    image, *_ = draw(engine, request, *beside)
    assert difference(image, sound) <= ROUNDING
    assert engine.slots == 2


def test_a_controlnet_that_fits_no_gpu_fails_its_own_jobs_alone(
    make_slot_engine,
    make_control,
    monkeypatch,
):
    engine = make_slot_engine(slots=2)

    def fail(identity: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._caches.control_nets, "_copy", fail)
    controls = (make_control(),)
    requests = [make_request(seed=seed) for seed in (1, 2)]
    requests[1:1] = [
        make_request(controls=controls),
        make_request(controls=controls, seed=9),
    ]
    first, failed, too, last = draw(engine, *requests)
    assert isinstance(failed, errors.TransientError)
    assert isinstance(too, errors.TransientError)
    assert "ran out of memory" in failed.message
    assert isinstance(first, np.ndarray)
    assert isinstance(last, np.ndarray)


def test_their_memory_is_taken_from_the_room_for_the_next_jobs_loras(
    make_slot_engine, make_control
):
    engine = make_slot_engine(slots=2)
    draw(engine, make_request(controls=(make_control(),)))
    taken = engine._caches.control_nets.held_bytes
    assert taken > 0
    jobs = [SimpleNamespace(prepared=SimpleNamespace(lora_bytes=taken))] * 4
    for room, fitting in ((3, 2), (0.5, 1)):
        engine._stager.room_bytes = room * taken
        assert len(engine._stager.first_with_room(jobs)) == fitting
