"""A node's first minutes are measured row by row, and no figure is lost."""

import asyncio
import contextlib
import io
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.bench import work
from first_minute import drawing, measure, packages, processes, row, trace
from imagefleet.validation import JSONDict
from rows.groups import Figures

ROOT = Path(__file__).parents[2]

DOCUMENT = ROOT / "docs" / "engine.md"

WRITTEN = sorted((ROOT / "benchmarks" / "results").glob("first-minute-*.json"))


async def figures_here(told: Sequence[str], _: float) -> AsyncIterator[Figures]:
    """A row in this process: one of its own imports torch anew, and prints the same."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
        patched.setattr(sys, "argv", list(told[1:]))
        await asyncio.to_thread(row.main)
    for line in printed.getvalue().splitlines(keepends=True):
        if found := processes.read(line):
            yield found
    yield {"exit_code": 0}


@pytest.fixture
def rows_here(monkeypatch) -> None:
    monkeypatch.setattr(processes, "figures_of", figures_here)
    for name in packages.forget_compiled(Path()):
        monkeypatch.setenv(name, "")  # so that it is afterwards what it was before
    silent = SimpleNamespace(signal=lambda *_: None, SIGTERM=signal.SIGTERM)
    monkeypatch.setattr(row, "signal", silent)


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps", "groups_here", "rows_here")
def test_rows_run_with_little_to_do(run: Callable[..., str]):
    rows = "bag_few_steps,sdxl_cold,four_steps,worker_cold,endings"
    given = ("--tiny", "--device", "cpu", "--out", "out.json", "--folder", "models")

    printed = run("first_minute/measure.py", *given, "--rows", rows)

    figures = json.loads(printed.splitlines()[-1])
    names = ("bag_few_steps", "four_steps_over_engine", "worker_cold_90_seconds")
    assert all(figures[name] > 0 for name in names)
    assert figures["graphs_compiled_cold"] == figures["endings_failed"] == 0
    written = json.loads(Path("out.json").read_text())["rows"]
    assert written.keys() > {"models", "uniform", "uniform_again", *rows.split(",")}
    assert all(each["is_complete"] for each in written.values())


def test_rows_beside_the_compiler_and_at_full_speed_are_told_apart(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    for module in (work, drawing):
        monkeypatch.setattr(module, "time", clock)
    key = SimpleNamespace(width=8, height=8, slot_rows=2)
    state = SimpleNamespace(latents=range(4))
    step = SimpleNamespace(batch_key=key, state=state, compiled=())
    lanes = [SimpleNamespace(step=step, active=range(4))]

    def tick() -> list[Any]:
        engine._runner.run(step, "shared", 4)
        engine.unet_rows += 8
        clock.now += 4.0 if engine.is_compiling else 1.0
        return []

    runner = SimpleNamespace(run=lambda *_: None)
    engine = SimpleNamespace(
        unet_rows=0, is_compiling=True, _runner=runner, _lanes=lanes, tick=tick
    )
    counted = drawing.Counted(engine, 0.0, 6.0)  # type: ignore[arg-type]
    for number in range(8):
        engine.is_compiling = number < 3
        engine.tick()
        counted.note_tick(has_image=number == 0)

    found = counted.main_rates(0)
    assert found["compiling_rows_per_second"] == 2.0
    assert found["rows_per_second"] == 8.0
    assert found["row_pixels_per_second"] == 8.0 * 64
    assert found["step_pixels_per_second"] == 4.0 * 64
    assert (counted.ready_at, counted.quiet_seconds) == (12.0, 5.0)
    assert len(counted.minutes) == 2
    assert counted.figures()["tick_seconds"] == {"uncompiled_full": 17.0}
    assert counted.figures()["filled_fraction"] == 1.0


@pytest.fixture
def given(tmp_path) -> Any:
    return SimpleNamespace(out=tmp_path / "out.json")


@pytest.mark.parametrize(
    ("ending", "kept"),
    [
        ("kill -SEGV $$", {"exit_code": -11}),
        ("exec sleep 600", {"ended_after_seconds": 3.0, "exit_code": -15}),
        ("echo '{\"is_complete\": true}'; kill -ABRT $$", {"is_complete": True}),
    ],
)
async def test_a_row_that_is_killed_keeps_its_figures_and_those_of_others(
    given, monkeypatch, ending: str, kept: JSONDict
):
    measure.keep(given.out, "uniform_again", {"run": "a", "rows_per_second": 400.0})
    program = f"echo noise; echo '{{\"rows_per_second\": 200.0}}'; {ending}"
    monkeypatch.setattr(processes, "command", lambda *_: ["sh", "-c", program])

    is_whole = await measure.measure_row("bag_one_size", given, "a", 3.0)

    written = json.loads(given.out.read_text())
    assert written["bag_one_size"] == 0.5
    assert written["rows"]["uniform_again"]["rows_per_second"] == 400.0
    assert written["rows"]["bag_one_size"].items() >= kept.items()
    assert is_whole == ("is_complete" in kept)


async def test_a_row_that_measures_nothing_replaces_none_that_did(given, monkeypatch):
    measure.keep(given.out, "library", {"run": "a", "library_over_worker": 1.0})
    monkeypatch.setattr(processes, "command", lambda *_: ["false"])

    assert not await measure.measure_row("library", given, "b", 3.0)

    assert json.loads(given.out.read_text())["library_over_worker"] == 1.0


def test_what_is_measured_is_not_measured_again_but_what_it_is_compared_with():
    measured = {"is_complete": True, "run": "a"}
    done = ("models", "uniform", "uniform_again", "worker_cold", "company")
    rows = dict.fromkeys(done, measured)

    def asked(*names: str, run: str = "a", **more: Any) -> list[str]:
        return list(measure.to_measure(names, rows, run, **more))

    assert asked("models", "uniform", "worker_cold") == []
    assert asked("worker_cold", run="b") == []
    again, cold = "uniform_again", "bag_sizes_without_kernels"
    assert asked("bag_sizes") == [cold, "bag_sizes"]
    whole = ["models", cold, again, "bag_sizes"]
    assert asked("bag_sizes", run="b") == whole
    needed = ["models", again, "bag_sizes"]
    assert asked("bag_sizes", run="b", packages=["sizes"]) == needed
    assert asked("worker_cold", again=True) == ["worker_cold"]
    assert asked("company", again=True) == ["company"]


def test_a_share_of_two_runs_is_none_and_an_earlier_one_stays():
    def results(run: str, share: float | None) -> Figures:
        rows = {
            "uniform_again": {"run": "a", "rows_per_second": 400.0},
            "bag_one_size": {"run": run, "rows_per_second": 200.0},
        }
        return {"rows": rows, "bag_one_size": share}

    assert measure.summarise(results("a", None))["bag_one_size"] == 0.5
    assert measure.summarise(results("b", None))["bag_one_size"] is None
    assert measure.summarise(results("b", 0.75))["bag_one_size"] == 0.75


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_the_documents_figures_are_those_that_were_written(path: Path):
    results = json.loads(path.read_text())

    assert results.keys() >= measure.FIGURES.keys()
    assert measure.table(results) in DOCUMENT.read_text()


def test_what_a_gpu_runs_is_told_by_graphs_and_beside_them():
    def ran(name: str, start: int, microseconds: int, launch: int, stream: int = 7):
        on = {"correlation": launch, "stream": stream}
        return {
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": microseconds,
            "args": on,
        }

    events = [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 90}]
    events += [ran("conv", 0, 4000, 1), ran("norm", 5000, 1000, 1)]
    events += [ran("merge", 5500, 2500, 2), ran("text", 20_000, 2000, 3, stream=9)]

    found = trace.summarise(events)

    assert found["milliseconds"] == 22
    assert found["busy_milliseconds"] == 9
    assert found["longest"] == {
        "graph of 2 kernels": {"launches": 1, "milliseconds": 6.0},
        "merge on stream 7": {"launches": 1, "milliseconds": 2.5},
        "text on stream 9": {"launches": 1, "milliseconds": 2.0},
    }
