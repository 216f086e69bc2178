"""Disks that are small or cannot be written, and workers on them."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stand_in import StandInEngine
from fleet import main
from imagefleet import concurrency
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

IMPATIENT = concurrency.RetryPolicy(
    tries=3, first_wait_seconds=0.01, longest_wait_seconds=0.05, waits_for_access=True
)

Mount = Callable[..., "Disk"]
RunPipeline = Callable[..., Awaitable[Pipeline]]


class Disk:
    """A mounted disk of so many KB."""

    def __init__(self, folder: Path, kilobytes: int, *, read_only: bool) -> None:
        self.folder = folder
        flags = f"size={kilobytes}k{',ro' if read_only else ''}"
        command = ["mount", "-t", "tmpfs", "-o", flags, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a small disk")

    def fill(self) -> Path:
        """Takes all room that is left; returns the file to remove."""
        path = self.folder / "filler"
        with path.open("wb", buffering=0) as file:
            for size in (65_536, 4096):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        return path

    def change(self, flags: str) -> None:
        """Mounts it again with other flags."""
        subprocess.run(["mount", "-o", f"remount,{flags}", self.folder], check=True)


@pytest.fixture
def mount(tmp_path) -> Iterator[Mount]:
    """Mounts an empty disk of so many KB."""
    mounted: list[Disk] = []

    def new(kilobytes: int = 4096, *, read_only: bool = False) -> Disk:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        mounted.append(Disk(folder, kilobytes, read_only=read_only))
        return mounted[-1]

    yield new
    for disk in mounted:
        subprocess.run(["umount", "--lazy", str(disk.folder)], check=True)


@pytest.fixture
def jobs() -> Callable[..., list[str]]:
    """Messages with the ids j0, j1, ..."""

    def make(count: int, **fields: object) -> list[str]:
        return [
            json.dumps(
                {"prompt": "a house", "id": f"j{number}", "seed": number, **fields}
            )
            for number in range(count)
        ]

    return make


@pytest.fixture
def work(monkeypatch, tmp_path) -> RunPipeline:
    """Runs a worker with a stand-in engine on a storage until the queue is empty."""
    monkeypatch.setattr("worker.pull.UNTIL_EMPTY_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("worker.pull.LONGEST_PAUSE_SECONDS", 0.1)

    async def run(settings: StorageSettings, **changes: Any) -> Pipeline:
        engine = changes.pop("engine", None) or StandInEngine()
        on_settled = changes.pop("on_settled", lambda _: None)
        fields = {
            **settings.model_dump(),
            "model": "stand-in",
            "cache": tmp_path / "cache",
            "until_empty": True,
            "lease_seconds": 5,
            **changes,
        }
        async with open_storage(settings) as storage:
            pipeline = Pipeline(
                storage,
                lambda: engine,
                WorkerSettings(**fields),
                on_settled=on_settled,
                retry_policy=IMPATIENT,
            )
            await pipeline.run(asyncio.Event(), asyncio.Event())
        return pipeline

    return run


@pytest.fixture
def imagefleet(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Runs a command in the test's process; returns its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["imagefleet", *arguments])
        with pytest.raises(SystemExit) as left:
            main.main()
        return int(left.value.code or 0), "".join(capsys.readouterr())

    return run
