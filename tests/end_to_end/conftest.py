"""The console command as a user starts it, and a checkpoint that it can use."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forks
from imagefleet.storage.settings import StorageSettings

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("imagefleet")

Start = Callable[..., "subprocess.Popen[str]"]


#: `imagefleet` with an engine that is loaded at once and makes 20 images/s.
STAND_IN = """
import asyncio, fcntl, logging, os, sys, termios, threading, time, warnings
from fleet import main
from imagefleet import errors
from worker import process
from benchmarks.stand_in import StandInEngine

if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it

def load(worker, checkpoint):
    {loading}
    return StandInEngine(capacity=4, tick_seconds=0.2)

process._Worker._load_engine = load
process.load.import_libraries = lambda: None
{changes}
main.main()
"""


@pytest.fixture
def stand_in_worker() -> Callable[..., list[str | Path]]:
    """The command line of a worker with a stand-in engine, and Python that runs before it."""

    def make(
        *flags: str | Path, loading: str = "", changes: str = ""
    ) -> list[str | Path]:
        program = STAND_IN.format(loading=loading, changes=changes)
        return [
            sys.executable,
            "-c",
            program,
            "worker",
            "--model",
            ROOT / "demo_model",
            *flags,
        ]

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A tiny random checkpoint in diffusers' format, with half of SD1.5's levels."""
    import tiny_model as tiny

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return tiny.build_half_checkpoint(folder)


@pytest.fixture
def environment(storage_settings: StorageSettings) -> dict[str, str]:
    """The environment of a command that works on the test's own storage."""
    return {
        **os.environ,
        "IMAGEFLEET_STORAGE": storage_settings.storage,
        "IMAGEFLEET_QUEUE": storage_settings.queue,
        "IMAGEFLEET_CONTAINER": storage_settings.container,
        "IMAGEFLEET_FILES_CONTAINER": storage_settings.files_container,
        "IMAGEFLEET_LOG_FORMAT": "text",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Starts `imagefleet ARGUMENTS`; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_command(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [COMMAND, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start_command
    for process in started:
        with process:  # closes its pipe
            process.kill()


@pytest.fixture(scope="session")
def stand_in_forks(tmp_path_factory) -> Iterator[forks.Forks]:
    """Of workers with a stand-in engine, which it starts without their imports."""
    folder = tmp_path_factory.mktemp("forks")
    prelude = "import benchmarks.stand_in, worker.process"
    with forks.running(Path(sys.executable), folder, os.environ, prelude) as made:
        yield made


@pytest.fixture(scope="session")
def worker_forks(tmp_path_factory) -> Iterator[forks.Forks]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("forks")
    prelude = (
        "import worker.process, worker.engine.checkpoint, worker.engine.slots.engine;"
        f"{forks.AZURE};from worker.models import change; change.LOOK_SECONDS = 3.0"
    )
    with forks.running(Path(sys.executable), folder, variables, prelude) as made:
        yield made


@pytest.fixture
def fork(
    environment: dict[str, str], worker_forks: forks.Forks, tmp_path
) -> Iterator[Callable[..., forks.Fork]]:
    """As `start`, of a worker that need not import torch, which takes seconds."""
    with worker_forks.ending() as start:

        def start_command(*arguments: str | Path) -> forks.Fork:
            return start(*map(str, arguments), cwd=tmp_path, variables=environment)

        yield start_command
