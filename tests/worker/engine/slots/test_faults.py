import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calls import OUT_OF_MEMORY, Call, watch_calls
from drawing import ROUNDING, assert_alike, difference, draw, finish, make_request
from imagefleet import errors
from packages import PlainPackages
from worker.engine import contract, decoder
from worker.engine.networks.linear import SlotLinear
from worker.engine.slots.weights import Weights


def draw_again(
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    requests: list[contract.ImageRequest],
    fails: Callable[[Call], bool],
    error: Exception = OUT_OF_MEMORY,
) -> list[Call]:
    """The calls of a second drawing in which some fail; its images are those of the first."""
    sound = draw(engine, *requests)
    calls = watch_calls(monkeypatch, engine, fails, error)
    assert_alike(draw(engine, *requests), sound)
    return calls


def limit_decoding(
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[torch.Tensor, bool], bool],
    name: str = "to_images",
) -> None:
    """Decoding has no memory if *fails* says so of the latents and whether in stripes."""
    original = getattr(decoder, name)

    def limited(vae: Any, latents: torch.Tensor, *, in_stripes: bool = False) -> Any:
        if fails(latents, in_stripes):
            raise OUT_OF_MEMORY
        return original(vae, latents, in_stripes=in_stripes)

    monkeypatch.setattr(decoder, name, limited)


def test_out_of_memory_in_a_tick_reduces_the_slots_and_fails_no_image(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=4)
    requests = [make_request(seed=seed, steps=2 + seed) for seed in range(5)]
    ticks = draw_again(monkeypatch, engine, requests, lambda call: len(call.seeds) > 2)
    assert engine.slots == 2
    assert engine.capacity == 4
    # One fewer at a time: whatever is given up is given up for good.
    assert [len(call.tickets) for call in ticks[:3]] == [4, 3, 2]
    assert max(len(call.tickets) for call in ticks[2:]) == 2


def test_a_judges_network_that_has_no_memory_beside_the_slots_takes_some_of_theirs(
    make_slot_engine,
):
    engine = make_slot_engine(slots=4)
    requests = [make_request(seed=seed, steps=3) for seed in range(4)]
    sound = draw(engine, *requests)
    for ticket, request in enumerate(requests):
        engine.admit(ticket, engine.prepare(request))
    engine.tick()

    def score() -> int:
        if engine.slots > 2:
            raise OUT_OF_MEMORY
        return 25

    assert engine.call(score) == 25
    assert engine.slots == 2
    drawn = finish(engine)
    assert_alike([drawn[ticket] for ticket in range(4)], sound)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OUT_OF_MEMORY, errors.TransientError),
        (RuntimeError("CUDA error: an illegal memory access"), errors.NodeError),
        (errors.JobError("no such network"), errors.JobError),
    ],
)
def test_a_call_beside_the_ticks_fails_by_the_class_of_its_error(
    make_slot_engine, error: Exception, raised: type[Exception]
):
    engine = make_slot_engine(slots=2)
    sound = draw(engine, make_request())

    def fail() -> None:
        raise error

    with pytest.raises(raised):
        engine.call(fail)
    assert_alike(draw(engine, make_request()), sound)


def test_slots_that_are_given_up_are_freed_before_fewer_are_allocated(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=2)
    draw(engine, make_request())
    former = [
        weakref.ref(layer.slots.untyped_storage())
        for layer in engine._unet.modules()
        if isinstance(layer, SlotLinear)
    ]
    resize = Weights.resize
    held = []

    def note(weights: Weights, slots: list[int]) -> None:
        if any(slots):
            held.extend(each() for each in former)
        resize(weights, slots)

    monkeypatch.setattr(Weights, "resize", note)
    watch_calls(monkeypatch, engine, lambda call: len(call.seeds) > 1)
    draw(engine, make_request(seed=1), make_request(seed=2))
    assert engine.slots == 1
    assert len(held) == len(former) > 0
    assert set(held) == {None}


@pytest.mark.parametrize(
    ("sampler", "steps"), [("euler_ancestral", 4), ("dpmpp_2m_sde", 11)]
)
def test_unfinished_images_restart_after_out_of_memory(
    make_slot_engine,
    monkeypatch,
    sampler: str,
    steps: int,
):
    engine = make_slot_engine(slots=2)
    requests = [
        make_request(seed=seed, sampler=sampler, steps=steps) for seed in (1, 2)
    ]
    count = itertools.count()
    draw_again(monkeypatch, engine, requests, lambda call: next(count) == steps - 2)
    assert engine.slots == 1


def test_out_of_memory_with_several_lanes_gives_up_their_weights_first_then_slots(
    make_slot_engine,
    styles: list[contract.Lora],
    monkeypatch,
):
    engine = make_slot_engine(slots=4, blocks=2)
    requests = [
        make_request(
            seed=seed, width=64 + 32 * (seed % 2), loras=(styles[seed % 3],), steps=2
        )
        for seed in range(8)
    ]
    assert engine._lanes.blocks == 2
    count = itertools.count()
    draw_again(monkeypatch, engine, requests, lambda call: next(count) in (2, 4))
    assert engine._lanes.blocks == 1
    assert engine.slots == 3


def test_a_large_image_that_has_no_memory_beside_others_is_drawn_alone(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=2)
    requests = [
        make_request(seed=seed, width=128 if seed == 1 else 64) for seed in (1, 2, 3)
    ]

    def is_too_much(call: Any) -> bool:
        drawing = sum(1 for lane in engine._lanes if lane.active)
        isolated = any(lane.batch_key.isolated == 0 for lane in engine._lanes)
        return drawing > 1 and 1 in call.seeds and not isolated

    draw_again(monkeypatch, engine, requests, is_too_much)
    assert engine.slots == 2


def test_a_failed_tick_restarts_no_image_of_another_lane(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=4, blocks=2)
    requests = [
        make_request(seed=seed, width=64 + 32 * (seed % 2), steps=3)
        for seed in range(6)
    ]
    count = itertools.count()
    once = RuntimeError("no kernel for this")
    ticks = draw_again(
        monkeypatch,
        engine,
        requests,
        lambda call: 1 in call.seeds and next(count) == 1,
        once,
    )
    assert [0 in call.seeds for call in ticks].count(True) == 3, "not restarted"
    assert [1 in call.seeds for call in ticks].count(True) == 2 + 3


def test_an_image_too_large_for_the_memory_is_a_transient_error(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=2)
    watch_calls(monkeypatch, engine, lambda call: True)
    (outcome,) = draw(engine, make_request())
    assert isinstance(outcome, errors.TransientError)
    assert "memory" in outcome.message
    assert engine.slots == 2, "a large image does not reduce the slots"


@pytest.mark.slow
@pytest.mark.parametrize("is_frequent", [True, False])
def test_a_large_image_without_memory_leaves_later_ones_compiled_once_that_pays(
    make_slot_engine,
    monkeypatch,
    small_model: Path,
    is_frequent: bool,
):
    lasts = math.inf
    engine = make_slot_engine(
        model=small_model,
        slots=1,
        packages=PlainPackages(may_end=math.inf),
        queue_seconds=lambda: lasts,
        compiled_modes=("shared",),
    )
    large = make_request(width=128)
    ordinary = make_request()
    (sound,) = draw(make_slot_engine(model=small_model, slots=1), large)
    native = engine._runner.native._replace(width=64, height=64)
    engine._compilation.run(native)
    draw(engine, *[ordinary] * 9)
    runner = engine._runner
    runner.costs = dataclasses.replace(runner.costs, graph_seconds=60.0)
    if is_frequent:  # else a large image comes as soon as it is compiled
        hour_later = runner.outlook._clock() + 3600
        monkeypatch.setattr(runner.outlook, "_clock", lambda: hour_later)

    def is_too_much(_: object) -> bool:
        return engine._runner.may_compile and any(
            lane.active for lane in engine._lanes if lane.batch_key.width == 128
        )

    watch_calls(monkeypatch, engine, is_too_much)
    (image,) = draw(engine, large)
    assert difference(image, sound) <= ROUNDING
    draw(engine, ordinary)
    assert engine._runner.may_compile
    engine._compilation.finish()
    assert (native in engine._runner._compiled) == is_frequent


def test_only_the_image_that_breaks_a_tick_fails_with_the_reason(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=3)
    requests = [make_request(seed=seed) for seed in (1, 666, 3, 4)]
    sound = draw(engine, *requests)
    ticks = watch_calls(
        monkeypatch,
        engine,
        lambda call: 666 in call.seeds,
        RuntimeError("no kernel for this"),
    )
    images = draw(engine, *requests)
    assert isinstance(images[1], errors.TransientError)
    assert "no kernel for this" in images[1].message
    for at in (0, 2, 3):
        assert difference(images[at], sound[at]) <= ROUNDING
    assert [666] in [call.seeds for call in ticks]


def test_a_broken_gpu_is_a_node_error(make_slot_engine, monkeypatch):
    engine = make_slot_engine()
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    watch_calls(monkeypatch, engine, lambda call: True, broken)
    with pytest.raises(errors.NodeError, match="illegal memory access"):
        draw(engine, make_request())


def test_a_failed_merge_affects_no_other_image(
    make_slot_engine,
    styles: list[contract.Lora],
    monkeypatch,
):
    from worker.engine.lora import shared as lora

    engine = make_slot_engine()
    (plain,) = draw(engine, make_request())
    original = lora.Merger._merge
    count = iter(range(1000))

    def merge(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if next(count) == 5:
            raise RuntimeError("half way")

    monkeypatch.setattr(lora.Merger, "_merge", merge)
    outcomes = draw(engine, make_request(loras=styles[:1], steps=9), make_request())
    assert isinstance(outcomes[0], np.ndarray | errors.TransientError)
    assert difference(outcomes[1], plain) <= ROUNDING
    assert difference(draw(engine, make_request())[0], plain) == 0


def test_out_of_memory_while_decoding_reduces_the_slices(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=3)
    requests = [make_request(seed=seed) for seed in range(3)]
    sound = draw(engine, *requests)
    sizes = []

    def fails(latents: torch.Tensor, _in_stripes: bool) -> bool:
        sizes.append(len(latents))
        return len(latents) > 1

    limit_decoding(monkeypatch, fails, "decode")
    images = draw(engine, *requests)
    assert_alike(images, sound)
    assert sizes[0] == 3
    draw(engine, *requests)
    assert sizes[-3:] == [1, 1, 1]


def test_a_vae_that_overflows_in_float16_decodes_in_float32_from_then_on(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(precision="float16")
    sound = draw(engine, make_request())
    original = decoder.decode

    def decode(vae: Any, latents: torch.Tensor, **how: Any) -> Any:
        pixels, is_sound = original(vae, latents, **how)
        return pixels, is_sound & (vae.dtype == torch.float32)

    monkeypatch.setattr(decoder, "decode", decode)
    outcomes = draw(engine, make_request(), make_request(seed=2))
    assert difference(outcomes[0], sound[0]) <= 8, "float16 rounds at 1/2048"
    assert engine.checkpoint.vae.dtype == torch.float32


def test_an_image_without_memory_to_decode_it_whole_is_decoded_in_stripes(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=2)
    requests = [make_request(seed=1, height=96), make_request(seed=2)]
    sound = draw(engine, *requests)
    limit_decoding(
        monkeypatch,
        lambda latents, in_stripes: (
            latents.shape[2] > latents.shape[3] and not in_stripes
        ),
    )
    images = draw(engine, *requests)
    assert_alike(images, sound)
    assert not engine._decoder.is_striped, "other sizes are decoded whole"


def test_an_image_without_memory_for_its_stripes_takes_it_from_the_slots(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=4)
    requests = [make_request(seed=seed, steps=2 + seed % 3) for seed in range(6)]
    sound = draw(engine, *requests)
    limit_decoding(
        monkeypatch, lambda _, in_stripes: engine.slots > 2 or not in_stripes
    )
    images = draw(engine, *requests)
    assert engine.slots == 2
    assert_alike(images, sound)


def test_a_single_slot_runs_uncompiled_before_an_image_fails_for_want_of_memory(
    make_slot_engine,
    monkeypatch,
):
    (sound,) = draw(make_slot_engine(slots=1), make_request())
    engine = make_slot_engine(slots=1, packages=PlainPackages(math.inf))
    limit_decoding(monkeypatch, lambda *_: engine._runner.may_compile)
    (image,) = draw(engine, make_request())
    assert not engine._runner.may_compile
    assert difference(image, sound) <= ROUNDING


def test_an_image_that_has_no_memory_with_one_slot_is_for_another_worker(
    make_slot_engine, monkeypatch
):
    engine = make_slot_engine(slots=2)

    limit_decoding(monkeypatch, lambda *_: True)
    engine.admit(0, engine.prepare(make_request()))
    assert isinstance(finish(engine)[0], errors.TransientError)
    assert engine.slots == 1
