"""Compiling beside the ticks, by a stand-in: `test_compiled.py` has torch trace."""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from calls import watch_calls
from drawing import ROUNDING, assert_alike, difference, draw, finish, make_request
from packages import PlainPackages
from worker.engine import contract
from worker.engine.kernels.graph import Graph
from worker.engine.slots import compiling, step
from worker.node import start_up


@pytest.fixture
def compiler(monkeypatch) -> PlainPackages:
    monkeypatch.setattr(compiling, "_MOST_SECONDS_WITHOUT_JOBS", 0.0)
    return PlainPackages()


@pytest.fixture
def engine(make_slot_engine, compiler: PlainPackages) -> Any:
    return make_slot_engine(slots=2, packages=compiler)


def compiled_modes(engine: Any) -> list[str]:
    return [mode for each in engine._lanes if each.step for mode in each.step.compiled]


def write_locon(path: Path, engine: Any, rank: int = 2) -> contract.Lora:
    """A LoRA that changes one convolution, to be seen."""
    name = "lora_unet_mid_block_resnets_0_conv1"
    width = engine.checkpoint.unet.mid_block.resnets[0].conv1.in_channels
    tensors = {
        "down": torch.randn(rank, width, 3, 3) / 24,
        "up": torch.randn(width, rank, 1, 1),
    }
    save_file(
        {f"{name}.lora_{each}.weight": tensors[each] / 2 for each in tensors}, path
    )
    return contract.Lora(path.stem, path, 0.0, 1.0)


def take_up(engine: Any, compiler: PlainPackages) -> list[contract.Finished]:
    """Ends the graph that is being compiled, and runs the tick that takes it up."""
    compiler.may_end += 1
    return list(engine.tick())


def test_what_the_first_jobs_need_is_compiled_first_and_taken_up_at_once(
    engine,
    slot_engine,
    compiler: PlainPackages,
):
    engine.compile_in_background()
    engine.admit(0, engine.prepare(make_request(seed=5, steps=9)))
    engine.tick()
    expected = draw(slot_engine, make_request(seed=5, steps=9))[0]
    (lane,) = engine._lanes
    finished = take_up(engine, compiler)
    assert finished == []
    assert compiled_modes(engine) == ["per_slot"]
    assert lane.weight_mode == "per_slot", "any job can run with weights of its own"
    take_up(engine, compiler)
    while not finished:
        finished = engine.tick()
    assert difference(finished[0].outcome, expected) <= ROUNDING, (
        "in flight all the while"
    )
    assert compiled_modes(engine) == ["per_slot"], "another one does not pay"
    assert [name.split()[1] for name in compiler.began] == ["UNet", "VAE"]
    assert (engine.is_compiling, engine.graphs["compiled"]) == (False, 2)


def test_a_worker_with_an_accelerator_compiles_for_one_row_before_any_job(
    make_slot_engine, compiler: PlainPackages
):
    engine = make_slot_engine(slots=2, packages=compiler, is_unguided=True)
    assert engine.prepare(start_up.plain_request(engine, seed=0)).rows(0) == 1
    compiler.may_end += 5
    engine.warm_up()
    ticks = [name.split(",")[0] for name in compiler.began if "UNet" in name]
    assert ticks == [
        "the UNet for 4 rows of 4 slots",  # without LoRAs
        *["the UNet for 2 rows of 2 slots"]
        * 2,  # with: as many as there are weights for
    ]


def test_without_jobs_it_compiles_all_the_same(engine, compiler: PlainPackages):
    engine.compile_in_background()
    assert engine.busy
    engine.tick()
    compiler.may_end += 3
    engine._compilation.finish()
    assert not engine.is_compiling
    assert compiled_modes(engine) == ["per_slot"]


def test_a_lane_that_is_closed_meanwhile_is_compiled_anew(
    engine, compiler: PlainPackages
):
    engine.compile_in_background()
    engine.tick()
    (lane,) = engine._lanes
    assert lane.is_kept, "it would be compiled for nothing"
    stale = lane.step
    engine._recovery.restart_all()
    compiler.may_end += 4
    engine._compilation.finish()
    assert stale.compiled == {}
    assert stale.is_compiling is False
    assert compiled_modes(engine) == ["per_slot"]
    assert len(compiler.began) == 3


@pytest.mark.parametrize("full_at", ["per_slot", "shared"])
def test_out_of_memory_while_recording_costs_slots_or_that_mode_but_no_image(
    full_at: str,
    make_slot_engine,
    slot_engine,
    compiler: PlainPackages,
    monkeypatch,
):
    engine = make_slot_engine(slots=4, packages=compiler)
    take_up_graph = step.StepRunner.take_up
    attempts = iter(range(100))

    def fail_once(self: Any, used: step.Step, mode: Any, graph: Graph) -> None:
        if mode == full_at and next(attempts) == 0:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        take_up_graph(self, used, mode, graph)

    monkeypatch.setattr(step.StepRunner, "take_up", fail_once)
    engine._runner.request(engine._runner.native, in_all_modes=True)
    engine.compile_in_background()
    engine.admit(0, engine.prepare(make_request(steps=8)))
    engine.tick()
    compiler.may_end += 5
    engine._compilation.finish()
    (expected,) = draw(slot_engine, make_request(steps=8))
    assert difference(finish(engine)[0], expected) <= ROUNDING
    assert not engine.is_compiling
    if full_at == "per_slot":  # nothing runs compiled with so many
        assert engine.slots == 3
        assert compiled_modes(engine) == ["per_slot", "shared"]
    else:
        assert engine.slots == 4
        assert compiled_modes(engine) == ["per_slot"]


def test_what_cannot_be_compiled_is_drawn_uncompiled_and_not_tried_again(
    engine, slot_engine, compiler: PlainPackages
):
    compiler.breaks = True
    compiler.may_end = math.inf
    engine.compile_in_background()
    engine._compilation.finish()
    began = list(compiler.began)
    assert began
    assert not engine.is_compiling
    assert compiled_modes(engine) == []
    assert_alike(draw(engine, make_request()), draw(slot_engine, make_request()))
    assert compiler.began == began


def test_a_broken_compiler_ends_compiling_not_the_worker(
    engine,
    compiler: PlainPackages,
    monkeypatch,
):
    def break_down(*_: object) -> None:
        raise ValueError("no such stream")

    monkeypatch.setattr(step.StepRunner, "take_up", break_down)
    engine.compile_in_background()
    compiler.may_end += 9
    engine._compilation.finish()
    assert not engine.is_compiling
    assert compiled_modes(engine) == []
    assert len(draw(engine, make_request())) == 1


def test_jobs_that_would_run_uncompiled_do_not_hold_up_the_compiled_ones(
    engine,
    slot_engine,
    compiler: PlainPackages,
    monkeypatch,
    tmp_path,
):
    """Changes of convolutions would take all images of their calls along, until they compile."""
    locon = (write_locon(tmp_path / "locon.safetensors", engine),)
    requests = [
        make_request(
            seed=seed, steps=1 + seed % 3, loras=locon if seed % 3 == 1 else ()
        )
        for seed in range(6)
    ]
    expected = draw(slot_engine, *requests)
    calls = watch_calls(monkeypatch, engine)

    def changes() -> list[tuple[bool, set[bool]]]:
        return [(call.is_compiled, call.changes_convolutions) for call in calls]

    compiler.may_end += 3
    engine.warm_up(requests[0])
    assert_alike(draw(engine, *requests), expected)
    assert {(compiled, *found) for compiled, found in changes()} == {
        (True, False),
        (False, True),
    }
    compiler.may_end += 1
    engine.warm_up(requests[1])
    calls.clear()
    assert_alike(draw(engine, *requests), expected)
    assert all(call.is_compiled for call in calls)
    assert any(len(found) == 2 for _, found in changes()), "in one lane again"


def test_half_of_a_deep_queue_is_compiled_beside_the_ticks_and_a_rare_size_is_not(
    make_slot_engine, slot_engine, compiler: PlainPackages
):
    engine = make_slot_engine(
        slots=2, packages=compiler, queue_seconds=lambda: math.inf
    )
    engine.compile_in_background()
    compiler.may_end += 100
    widths = [96 if at % 2 else 64 for at in range(20)]
    widths[9] = widths[14] = 128
    draw(
        engine,
        *[
            make_request(seed=at, width=width, steps=2)
            for at, width in enumerate(widths)
        ],
    )
    draw(engine, *[make_request(seed=at, width=96, steps=1) for at in range(2)])
    engine._compilation.finish()
    compiled = {
        each.batch_key.width: each for each in engine._runner._compiled.values()
    }
    assert set(compiled) == {engine._runner.native.width, 64, 96}

    def break_down(*_: object) -> None:
        raise RuntimeError("no kernel for this")

    # What breaks as it runs is drawn uncompiled, and the other graphs stay.
    for graph in compiled[96].compiled.values():
        graph._function = break_down
    request = make_request(width=96, steps=2)
    assert_alike(draw(engine, request), draw(slot_engine, request))
    assert 96 not in {
        each.batch_key.width for each in engine._runner._compiled.values()
    }
    assert compiled[64].compiled


def test_a_weight_mode_that_is_not_compiled_is_not_used(
    make_slot_engine, compiler: PlainPackages
):
    engine = make_slot_engine(slots=2, packages=compiler, compiled_modes=("per_slot",))
    compiler.may_end += 9
    engine.warm_up()
    draw(engine, make_request())
    assert engine.weight_mode == "per_slot"


@pytest.fixture
def slow_compiler(compiler: PlainPackages, monkeypatch) -> PlainPackages:
    """Each graph seems to take 20 s or so, and none begins before there are jobs."""
    clock = itertools.count(0.0, 40.0)
    monkeypatch.setattr(compiling, "_MOST_SECONDS_WITHOUT_JOBS", math.inf)
    monkeypatch.setattr(compiling, "time", SimpleNamespace(monotonic=clock.__next__))
    compiler.may_end += 100
    return compiler


def graphs_of(compiler: PlainPackages) -> list[str]:
    """The compiled ticks: slots, rows and mode."""
    found = (
        re.search(r"for (\d+) rows of .* \((\w+) weights", each)
        for each in compiler.began
    )
    return sorted(f"{each[1]} {each[2]}" for each in found if each)


@pytest.mark.parametrize(
    ("changing", "mode"),
    [
        pytest.param((0, 3), "per_slot_convolutions", marks=pytest.mark.slow),
        pytest.param((1, 4), "per_slot_convolutions", marks=pytest.mark.slow),
        (None, "per_slot"),
    ],
    ids=["both_sizes", "second_size", "none"],
)
def test_a_bag_of_kinds_takes_one_graph_of_each_size_and_draws_what_each_job_draws_alone(
    make_slot_engine,
    slot_engine,
    slow_compiler: PlainPackages,
    styles: list[contract.Lora],
    tmp_path,
    changing: tuple[int, int] | None,
    mode: str,
):
    """Jobs that change convolutions are in it, and do not cost those a product that have none."""
    engine = make_slot_engine(
        slots=4, packages=slow_compiler, queue_seconds=lambda: math.inf
    )
    locons = [
        write_locon(tmp_path / f"{rank}.safetensors", engine, rank) for rank in (2, 20)
    ]
    first, every = changing or (24, 1)
    with_locon = range(first, 24, every)
    requests = []
    for at in range(24):
        loras = [(), styles[:1], styles[1:], styles[2:]][at // 2 % 4]
        loras = (
            *loras,
            *(locons[at // 3 % 2 :][:1] if at in with_locon else ()),
        )
        sizes = {"width": 96 if at % 2 else 64, "steps": 1 + at % 3}
        requests.append(make_request(seed=at, loras=loras, **sizes))
    engine.compile_in_background()
    images = draw(engine, *requests)
    engine._compilation.finish()
    assert graphs_of(slow_compiler) == [f"6 {mode}", f"8 {mode}"]
    names = [name.split()[1] for name in slow_compiler.began]
    assert names == ["UNet", "UNet", "VAE", "VAE"], "a tick is most of the work"
    for request, image in zip(requests[:8], images, strict=False):
        assert difference(image, draw(slot_engine, request)[0]) <= ROUNDING


def test_the_first_graph_waits_for_jobs_that_come_one_by_one(
    make_slot_engine,
    slow_compiler: PlainPackages,
    styles: list[contract.Lora],
    tmp_path,
):
    engine = make_slot_engine(
        slots=2, packages=slow_compiler, queue_seconds=lambda: math.inf
    )
    locon = write_locon(tmp_path / "locon.safetensors", engine)
    engine.compile_in_background()
    for at, lora in enumerate([*styles[:2], locon, locon]):
        request = make_request(seed=at, loras=(lora,), steps=8)
        engine.admit(at, engine.prepare(request))
        engine.tick()
    while engine.busy:
        engine.tick()
    engine._compilation.finish()
    assert compiled_modes(engine) == ["per_slot_convolutions"]


def test_a_first_job_unlike_the_others_does_not_have_its_graph_compiled_before_theirs(
    make_slot_engine, slow_compiler: PlainPackages
):
    engine = make_slot_engine(
        slots=2, packages=slow_compiler, queue_seconds=lambda: math.inf
    )
    engine.compile_in_background()
    wide = [make_request(seed=at, width=96, steps=4) for at in range(8)]
    draw(engine, make_request(cfg_scale=1.0, steps=1), *wide)
    engine._compilation.finish()
    first, *others = slow_compiler.began
    assert "96x64" in first
    assert all("64x64" not in each for each in others)


def test_a_graph_that_takes_fewer_seconds_is_compiled_once_its_own_ticks_pay_for_it(
    make_slot_engine,
    slot_engine,
    slow_compiler: PlainPackages,
    tmp_path,
):
    """LoCons come at first and then no more; then no LoRAs come at all, for long."""
    engine = make_slot_engine(
        slots=2, packages=slow_compiler, queue_seconds=lambda: math.inf
    )
    locon = write_locon(tmp_path / "locon.safetensors", engine)
    engine.compile_in_background()
    draw(
        engine,
        *[
            make_request(seed=at, loras=(locon,) * (at % 2), steps=1)
            for at in range(40)
        ],
    )
    engine._compilation.finish()
    assert compiled_modes(engine) == ["per_slot_convolutions"]
    (lane,) = (each for each in engine._lanes if each.step and each.step.compiled)
    for mode in ("per_slot", "shared"):
        lane.step.mode_usage[mode] = 0.1
        engine._compilation.finish()
        assert mode not in lane.step.compiled, "it saves a two-hundredth of the time"
        for _ in range(200):
            lane.step.mode_usage.note(mode)
        engine._compilation.finish()
        assert mode in lane.step.compiled
    slow_compiler.began.clear()
    image, expected = (
        draw(each, make_request(steps=3))[0] for each in (engine, slot_engine)
    )
    assert lane.weight_mode == "shared"
    assert difference(image, expected) <= ROUNDING
    # A higher rank needs other tensors.
    large = make_request(
        steps=2, loras=(write_locon(tmp_path / "large.safetensors", engine, 40),)
    )
    image, expected = (
        draw(each, large, make_request())[0] for each in (engine, slot_engine)
    )
    assert difference(image, expected) <= ROUNDING
    assert "per_slot" in lane.step.compiled, "others go on"


def test_modes_that_were_not_timed_are_taken_to_differ_as_guessed(engine, monkeypatch):
    """Else a guess of one GPU would be compared with what was measured on another."""
    runner = engine._runner
    held, _ = engine._open_lane(runner.native)
    step = held.step
    runner._note_seconds(step, "per_slot", 1.05)
    assert runner.costs.saved_share == pytest.approx(0.35), "it ran uncompiled"
    step.compiled["per_slot"] = step.compiled["shared"] = lambda: None
    runner._note_seconds(step, "per_slot", 0.525)
    found = runner.costs
    assert found.shared_seconds == pytest.approx(0.5)
    assert found.per_slot_convolutions_seconds == pytest.approx(0.55)
    assert found.saved_share == pytest.approx(0.5)
    runner._note_seconds(step, "shared", 0.45)
    assert runner.costs.per_slot_seconds == pytest.approx(0.525), "it was timed"
    step.compiled.clear()


def test_few_images_of_one_row_are_drawn_beside_those_of_two(
    monkeypatch, engine, slot_engine
):
    """A lane of their own would be almost empty, and another graph."""
    requests = [make_request(seed=seed, steps=12) for seed in range(6)]
    requests[3] = make_request(seed=3, steps=1, cfg_scale=1.0)
    calls = watch_calls(monkeypatch, engine)
    images = draw(engine, *requests)
    assert {call.slot_rows for call in calls} == {2}
    assert engine.unet_rows == 5 * 12 * 2 + 1, "its second row is no work"
    for image, request in zip(images, requests, strict=True):
        assert_alike(image, draw(slot_engine, request)[0], ROUNDING)


def test_images_of_one_row_have_lanes_of_their_own_once_they_are_many(
    monkeypatch, engine
):
    few = [make_request(seed=seed, steps=2, cfg_scale=1.0) for seed in range(6)]
    calls = watch_calls(monkeypatch, engine)
    draw(engine, make_request(steps=3), *few)
    rows = [call.slot_rows for call in calls]
    assert set(rows) == {1, 2}
    assert rows[0] == 2


def test_a_recorded_tick_serves_in_place_of_one_that_would_be_recorded_anew(
    engine,
):
    step = engine._open_lane(engine._runner.native)[1]
    version = step.unet.changes.version
    assert step.mode_for("shared") == "shared"
    step.recorded["per_slot_convolutions", version - 1] = None
    assert step.mode_for("per_slot") == "per_slot", "its tensors were replaced"
    step.recorded["per_slot_convolutions", version] = None
    assert step.mode_for("per_slot") == "per_slot_convolutions"
    step.compiled["per_slot"] = None
    assert step.mode_for("shared") == "per_slot", "a compiled one is faster"
    step.compiled.clear()
    step.recorded.clear()


@pytest.fixture
def two_sizes(make_slot_engine, compiler: PlainPackages) -> Any:
    """An engine that may compile several graphs at once, and its ticks with jobs of two sizes."""
    engine = make_slot_engine(
        slots=2, packages=compiler, queue_seconds=lambda: math.inf
    )
    engine.compile_in_background()
    compiler.may_compile_more = True
    tickets = itertools.count()

    def draw_ticks(count: int) -> None:
        for _ in range(count):
            while engine.free:
                ticket = next(tickets)
                size = {"width": 96} if ticket % 2 else {}
                request = make_request(seed=ticket, steps=6, **size)
                engine.admit(ticket, engine.prepare(request))
            engine.tick()

    return engine, draw_ticks


def test_what_is_compiled_already_does_not_wait_for_what_is_not(
    two_sizes, compiler: PlainPackages
):
    engine, draw_ticks = two_sizes
    compiler.there = "96x64", "VAE"
    draw_ticks(40)
    (wide,) = (each for each in engine._lanes if each.batch_key.width == 96)
    assert wide.step.compiled
    first, *_ = compiler.began
    assert "64x64" in first
    assert first in compiler.began[1:], "once the others have theirs it is waited for"
    began = len(compiler.began)
    draw_ticks(20)
    assert len(compiler.began) == began, "to describe it takes as long as some ticks"
    compiler.may_end = 2
    draw_ticks(5)
    assert all(each.step.compiled for each in engine._lanes)


def test_what_was_set_aside_is_taken_up_before_what_is_waited_for(
    two_sizes, compiler: PlainPackages
):
    engine, draw_ticks = two_sizes
    draw_ticks(40)
    began = list(dict.fromkeys(compiler.began))
    assert len(began) == 4, "each size's tick, and its VAE before that is compiled"
    tick, vae = (
        next(each for each in began if name in each) for name in ("UNet", "VAE")
    )
    assert compiler.began[-1] == began[-1], "it is waited for"
    compiler.there = tick, vae
    draw_ticks(3)
    assert len(compiled_modes(engine)) == 1
    assert len(engine._decoder._compiled) == 1, "it does not wait for the other's tick"


def test_few_images_that_change_convolutions_are_drawn_in_the_first_slots_alone(
    make_slot_engine, slot_engine, compiler: PlainPackages, tmp_path: Path
):
    """Changes of all slots take a tenth of each tick, whether images have any or not."""
    engine = make_slot_engine(slots=8, packages=compiler)
    locon = write_locon(tmp_path / "locon.safetensors", engine)
    requests = [
        make_request(seed=seed, steps=2 + seed % 3, loras=(locon,) * (seed % 7 == 3))
        for seed in range(28)
    ]
    images = draw(engine, *requests)
    assert engine._unet.changes.slots_of(0) == 2
    assert {len(each.down) for each in changing_layers(engine)} == {2}
    for image, request in list(zip(images, requests, strict=True))[::3]:
        assert_alike(image, draw(slot_engine, request)[0], ROUNDING)
    assert not engine._lanes.jobs


def test_all_slots_hold_changes_once_many_images_have_some(
    make_slot_engine, slot_engine, compiler: PlainPackages, tmp_path: Path
):
    engine = make_slot_engine(slots=8, packages=compiler)
    locons = [(write_locon(tmp_path / f"{name}.safetensors", engine),) for name in "ab"]
    few = [make_request(seed=seed, loras=locons[0] * (seed == 0)) for seed in range(9)]
    many = [
        make_request(seed=seed, steps=2, loras=locons[seed % 2]) for seed in range(40)
    ]
    draw(engine, *few)
    version = engine._unet.changes.version
    images = draw(engine, *many)
    assert engine._unet.changes.slots_of(0) == 8
    assert engine._unet.changes.version == version + 1, "others take their memory once"
    for image, request in list(zip(images, many, strict=True))[::9]:
        assert_alike(image, draw(slot_engine, request)[0], ROUNDING)


def changing_layers(engine: Any) -> list[Any]:
    found = [each for each in engine._unet.modules() if hasattr(each, "down")]
    return [each for each in found if isinstance(each.down, torch.Tensor)]
