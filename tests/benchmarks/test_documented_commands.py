"""The commands that the documents name for their figures run, with little to do."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker import tasks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

ENGINE = ("--tiny", "--device", "cpu", "--scale", "0.1", "--seconds", "3600")


def test_overlaps_figures_are_printed_as_json(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--jobs", "40"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])


def test_the_stores_figures_are_printed_as_json(run: Callable[..., str], monkeypatch):
    # Threads in place of processes, which import the worker anew and alone may handle signals.
    context = SimpleNamespace(Pool=ThreadPool)
    threads = SimpleNamespace(get_context=lambda _: context)
    monkeypatch.setattr(tasks, "on_signals", contextlib.nullcontext)

    printed = run("store.py", "--jobs", "200", multiprocessing=threads)

    figures = json.loads(printed.splitlines()[-1])
    assert figures["lost"] == figures["done_twice"] == 0


@pytest.mark.usefixtures("few_steps", "groups_here")
def test_the_engines_figures_are_printed_as_json(run: Callable[..., str]):
    signals = SimpleNamespace(signal=lambda *_: None, SIGTERM=signal.SIGTERM)
    rows = ("--rows", "mixed,worker,baseline")

    printed = run("engine.py", *ENGINE, *rows, "--out", "out.json", signal=signals)

    assert json.loads(printed.splitlines()[-1])
    measured = json.loads(Path("out.json").read_text())["rows"]
    assert not {
        name: row
        for name, row in measured.items()
        if row.keys() & {"error", "not_measured"}
    }
