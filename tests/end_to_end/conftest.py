"""The console command as a user starts it, and a checkpoint that it can use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imagefleet.storage.settings import StorageSettings

COMMAND = Path(sys.executable).with_name("imagefleet")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint in diffusers' format."""
    import tiny_model as tiny

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.build_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def environment(storage_settings: StorageSettings) -> dict[str, str]:
    """The environment of a command that works on the test's own storage."""
    return {
        **os.environ,
        "IMAGEFLEET_STORAGE": storage_settings.storage,
        "IMAGEFLEET_QUEUE": storage_settings.queue,
        "IMAGEFLEET_CONTAINER": storage_settings.container,
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
        process.kill()
        process.communicate()
