"""The parent of several workers, with real processes that are quicker to start than workers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polling
from cli import console
from imagefleet import errors
from worker.gpus import parent
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings

#: What a worker does of the parent's signals, in place of the last line.
WORKER = """
import json, os, pathlib, signal, sys, threading, time
signals = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
def word(): return signal.sigwait(signals)
gpu, changes = json.loads(os.environ["_IMAGEFLEET_GPU"])
runs = pathlib.Path("runs-" + gpu)
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
pathlib.Path("pid-" + gpu).write_text(str(os.getpid()))
PAUSE = 0.01
def until(look):
    while not look(): time.sleep(PAUSE)
def hang(): threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parent, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(parent, "MAX_CRASHES", 2)


@pytest.fixture
def run(tmp_path) -> Callable[..., Any]:
    """Runs two workers of that Python; returns the parent's exit code."""

    async def start(worker: str, **changes: Any) -> int:
        fields = {"model": "m", "storage": f"local:{tmp_path}", "name": "m", **changes}
        settings = MachineSettings(**fields)
        command = [sys.executable, "-I", "-S", "-c", WORKER + worker]
        return await parent.run_workers(settings, [Gpu("0"), Gpu("1")], command)

    return start


def runs(folder: Path) -> tuple[int, ...]:
    """How often each worker was started."""
    return tuple(len((folder / f"runs-{gpu}").read_text()) for gpu in "01")


@pytest.mark.parametrize(
    ("worker", "code", "times"),
    [
        ("", 0, (1, 1)),
        ("sys.exit(3)", 3, (1, 1)),
        ("sys.exit(2)", 2, (1, 1)),
        ("sys.exit(2 + int(gpu))", 3, (1, 1)),
        ("sys.exit(3 * int(gpu))", 0, (1, 1)),
        ("sys.exit(4 * int(gpu))", 4, (1, 1)),
        ("sys.exit(1)", 1, (3, 3)),
        ("os.kill(os.getpid(), 9)", 1, (3, 3)),
        ("sys.exit(1 if len(runs.read_text()) < 3 else 0)", 0, (3, 3)),
    ],
)
async def test_what_ends_the_workers_decides_who_starts_again_and_the_exit_code(
    run,
    tmp_path,
    worker: str,
    code: int,
    times: tuple[int, int],
):
    assert await run(worker) == code
    assert runs(tmp_path) == times


async def test_a_broken_gpu_is_left_out_and_the_others_draw_on(run, tmp_path, caplog):
    worker = """
if gpu == "1":
    until(pathlib.Path("runs-0").exists)
    sys.exit(3)
other = pathlib.Path("pid-1")
until(lambda: other.exists() and other.read_text())
until(lambda: not pathlib.Path("/proc", other.read_text()).exists())
sys.exit(1 if len(runs.read_text()) == 1 else 0)
"""
    assert await run(worker) == 0
    assert runs(tmp_path) == (2, 1)
    assert "GPU 1 is left out, others go on" in caplog.text
    assert "starting it again" in caplog.text


@pytest.mark.parametrize(
    ("number", "until_empty", "codes", "code"),
    [
        (signal.SIGTERM, False, "0, 0", 0),
        (signal.SIGINT, False, "0, 0", 0),
        (signal.SIGTERM, False, "0, 4", 4),
        (signal.SIGTERM, True, "143, 143", 143),
        (signal.SIGINT, True, "143, 143", 143),
        (signal.SIGTERM, True, "0, 143", 143),
        (signal.SIGTERM, True, "0, -9", 143),
        (signal.SIGTERM, True, "0, 0", 0),
        (signal.SIGTERM, False, "-15, -15", 0),
    ],
)
async def test_a_signal_ends_both_and_says_whether_the_queue_is_empty(
    run,
    tmp_path,
    number: signal.Signals,
    until_empty: bool,
    codes: str,
    code: int,
):
    worker = f"""
pathlib.Path("ready-" + gpu).touch()
assert word() == signal.SIGTERM
code = ({codes})[int(gpu)]
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
    running = asyncio.create_task(run(worker, until_empty=until_empty))
    await both_are(tmp_path, running, "ready")
    os.kill(os.getpid(), number)
    assert await running == code
    assert runs(tmp_path) == (1, 1)


async def test_a_second_signal_hurries_the_workers(run, tmp_path):
    worker = """
pathlib.Path("ready-" + gpu).touch()
assert word() == signal.SIGTERM
pathlib.Path("stopping-" + gpu).touch()
assert word() == signal.SIGINT
pathlib.Path("hurrying-" + gpu).touch()
"""
    running = asyncio.create_task(run(worker, grace_seconds=0))
    await both_are(tmp_path, running, "ready")
    os.kill(os.getpid(), signal.SIGTERM)
    await both_are(tmp_path, running, "stopping")
    assert not count(tmp_path, "hurrying")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert count(tmp_path, "hurrying") == 2


async def test_each_worker_has_a_name_a_port_and_a_share_of_the_price(run, tmp_path):
    worker = """
pathlib.Path("settings-" + gpu).write_text(json.dumps(changes))
"""
    assert await run(worker, price_per_hour=3.0, device="cpu") == 0
    found = [json.loads((tmp_path / f"settings-{gpu}").read_text()) for gpu in "01"]
    assert found == [
        {"name": f"m-gpu{gpu}", "port": 0, "price_per_hour": 1.5, "device": "cpu"}
        for gpu in "01"
    ]


def test_ports_follow_the_machines_and_names_stay_within_their_limit():
    settings = MachineSettings(model="m", name="m" * 128, port=8080)
    first, second = [
        parent._changes(settings, Gpu(str(number)), number, 2) for number in (0, 1)
    ]
    assert (first["port"], second["port"]) == (8081, 8082)
    assert second["name"] == "m" * 123 + "-gpu1"
    assert (first["price_per_hour"], first["device"]) == (None, "cuda")


async def test_a_port_in_use_starts_no_worker(run, tmp_path, serve_probes):
    async with serve_probes(True) as port:
        with pytest.raises(errors.SetupError, match="--port"):
            await run("", port=port)
    assert not count(tmp_path, "runs")


def test_the_exit_codes_are_those_of_the_console():
    assert (
        parent.DONE,
        parent.UNEXPECTED,
        parent.SETUP,
        parent.NODE,
        parent.JOBS_FAILED,
        parent.INTERRUPTED,
        parent.TERMINATED,
    ) == (
        console.EXIT_DONE,
        console.EXIT_UNEXPECTED,
        console.EXIT_OPERATOR_MUST_ACT,
        console.EXIT_REPLACE_THIS_NODE,
        console.EXIT_JOBS_FAILED,
        console.EXIT_INTERRUPTED,
        console.EXIT_TERMINATED,
    )


def count(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


async def both_are(folder: Path, running: asyncio.Task[int], what: str) -> None:
    await polling.until(lambda: count(folder, what) == 2 or running.done())
    assert not running.done()
