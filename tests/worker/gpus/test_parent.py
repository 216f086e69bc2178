"""The parent of several workers, with real processes that are quicker to start than workers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polling
from cli import console
from imagefleet import errors
from worker.gpus import child, parent
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings

#: What a worker does of the parent's signals, in place of the last line.
WORKER = """
import json, os, pathlib, signal, socket, sys, threading, time
signals = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
def word(): return signal.sigwait(signals)
assigned = json.loads(os.environ["_IMAGEFLEET_GPU"])
gpu, control = assigned["gpu"], socket.socket(fileno=assigned["control"])
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
    monkeypatch.setattr(parent, "PROBE_SECONDS", 0.05)


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
    run: Callable[..., Any],
    tmp_path,
    worker: str,
    code: int,
    times: tuple[int, int],
):
    assert await run(worker) == code
    assert runs(tmp_path) == times


async def test_a_broken_gpu_is_left_out_and_the_others_draw_on(
    run: Callable[..., Any], tmp_path, caplog
):
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
    assert "GPU 1 is left out, 1 of 2 go on" in caplog.text
    assert "starting it again" in caplog.text


async def test_a_worker_that_crashed_is_not_started_for_a_queue_that_another_emptied(
    run: Callable[..., Any], tmp_path, monkeypatch
):
    monkeypatch.setattr(parent, "FIRST_PAUSE_SECONDS", 1.0)
    assert await run("sys.exit(int(gpu))", until_empty=True) == 0
    assert runs(tmp_path) == (1, 1)


@pytest.mark.parametrize(
    ("number", "until_empty", "codes", "code"),
    [
        (signal.SIGTERM, False, "0, 0", 0),
        (signal.SIGINT, False, "0, 0", 0),
        (signal.SIGTERM, False, "0, 4", 4),
        (signal.SIGTERM, True, "143, 143", 143),
        (signal.SIGINT, True, "143, 143", 130),
        (signal.SIGTERM, True, "0, 143", 143),
        (signal.SIGTERM, True, "0, -9", 143),
        (signal.SIGTERM, True, "0, 0", 0),
        (signal.SIGTERM, False, "-15, -15", 0),
    ],
)
async def test_a_signal_ends_both_and_says_whether_the_queue_is_empty(
    run: Callable[..., Any],
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


async def test_a_second_signal_and_the_end_of_the_grace_time_hurry_the_workers(
    run: Callable[..., Any], tmp_path, monkeypatch
):
    worker = """
pathlib.Path("ready-" + gpu).touch()
assert word() == signal.SIGTERM
pathlib.Path("stopping-" + gpu).touch()
assert word() == signal.SIGINT
pathlib.Path("hurrying-" + gpu).touch()
hang()
"""
    running = asyncio.create_task(run(worker, grace_seconds=0))
    await both_are(tmp_path, running, "ready")
    os.kill(os.getpid(), signal.SIGTERM)
    await both_are(tmp_path, running, "stopping")
    assert not count(tmp_path, "hurrying")
    monkeypatch.setattr(parent, "LAST_SECONDS", 0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    await both_are(tmp_path, running, "hurrying")
    assert await running == 1  # killed in the end: they hang


@pytest.fixture
def _gpu_1_hangs(monkeypatch) -> None:
    """The first report of GPU 1's first worker was its last, so long ago that it hangs."""
    kill_if_hung, hung = child.Child.kill_if_hung, list[float]()

    def late(worker: child.Child) -> bool:
        if worker.gpu.name == "1" and worker.is_ready and not hung:
            hung.append(worker._hangs_at)
            assert worker._hangs_at <= time.monotonic() + child.HUNG_SECONDS
            worker._hangs_at = 0.0
        return kill_if_hung(worker)

    monkeypatch.setattr(child.Child, "kill_if_hung", late)


@pytest.mark.usefixtures("_gpu_1_hangs")
async def test_a_worker_that_stops_reporting_is_started_again_and_others_go_on(
    run: Callable[..., Any], tmp_path, caplog
):
    worker = """
control.sendall(b"ready\\n")
if gpu == "1" and len(runs.read_text()) == 1: hang()
again = pathlib.Path("runs-1")
until(lambda: again.exists() and len(again.read_text()) == 2)
"""
    assert await run(worker) == 0
    assert runs(tmp_path) == (1, 2)
    assert "the worker of GPU 1 has not reported" in caplog.text


async def test_a_worker_that_hangs_before_its_first_report_is_started_again(
    run: Callable[..., Any],
    tmp_path,
    monkeypatch,
    caplog,
):
    monkeypatch.setattr(child, "FIRST_REPORT_SECONDS", 0.5)
    kill, killed = child.Child.kill, set[str]()

    def noting(worker: child.Child) -> None:
        kill(worker)
        killed.add(worker.gpu.name)
        if len(killed) == 2:  # the next ones may take as long to start as they need
            monkeypatch.setattr(child, "FIRST_REPORT_SECONDS", 300.0)

    monkeypatch.setattr(child.Child, "kill", noting)
    work = "until(lambda: len(runs.read_text()) > 1) if len(runs.read_text()) > 1 else hang()"
    assert await run(work) == 0
    assert min(runs(tmp_path)) > 1
    for gpu in "01":
        assert f"the worker of GPU {gpu} has not reported" in caplog.text


@pytest.mark.usefixtures("_gpu_1_hangs")
async def test_a_worker_that_cannot_be_killed_counts_as_down_and_does_not_keep_the_parent(
    run: Callable[..., Any],
    tmp_path,
    monkeypatch,
):
    """As one whose driver hangs in the kernel; the other GPU's goes on until it is told to end."""
    monkeypatch.setattr(parent, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(parent, "KILLS", 2)
    kill = child.Child.kill

    def kill_at_the_end(worker: child.Child) -> None:
        if isinstance(sys.exception(), asyncio.CancelledError):
            kill(worker)

    monkeypatch.setattr(child.Child, "kill", kill_at_the_end)
    down: list[str] = []
    monkeypatch.setattr(
        parent.MachineMetrics, "is_down", lambda self, gpu: down.append(gpu)
    )
    worker = """
control.sendall(b"ready\\n")
pathlib.Path("ready-" + gpu).touch()
if gpu == "1": hang()
word()
"""
    running = asyncio.create_task(run(worker, grace_seconds=0))
    await both_are(tmp_path, running, "ready")
    await polling.until(lambda: down)
    assert set(down) == {"1"}
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(errors.NodeError, match="the worker of GPU 1 does not even end"):
        await running
    ended = Path("/proc", (tmp_path / "pid-1").read_text())
    assert not await asyncio.to_thread(ended.exists)


async def test_a_port_in_use_starts_no_worker(
    run: Callable[..., Any], tmp_path, serve_probes: Callable[..., Any]
):
    async with serve_probes(True) as port:
        with pytest.raises(errors.SetupError, match="--port"):
            await run("", port=port)
    assert not count(tmp_path, "runs")


def test_the_exit_codes_are_those_of_the_console():
    assert (
        *(parent.DONE, parent.UNEXPECTED, parent.SETUP, parent.NODE),
        *(parent.JOBS_FAILED, parent.INTERRUPTED, parent.TERMINATED),
    ) == (
        *(console.EXIT_DONE, console.EXIT_UNEXPECTED, console.EXIT_OPERATOR_MUST_ACT),
        *(console.EXIT_REPLACE_THIS_NODE, console.EXIT_JOBS_FAILED),
        *(console.EXIT_INTERRUPTED, console.EXIT_TERMINATED),
    )


def count(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


async def both_are(folder: Path, running: asyncio.Task[int], what: str) -> None:
    await polling.until(lambda: count(folder, what) == 2 or running.done())
    assert not running.done()
