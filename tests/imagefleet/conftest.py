"""A proxy that injects faults between a client and Azurite; a client, and its fleet's worker."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stand_in import StandInEngine
from imagefleet import aio
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from messages import draw_unless_broken
from proxy import Fault, FaultProxy
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

RunWorker = Callable[..., Any]


@dataclass(slots=True)
class FaultyAzurite:
    """Each of the next requests suffers the next of `faults`."""

    proxy: FaultProxy
    faults: deque[Fault]

    @property
    def address(self) -> str:
        return self.proxy.address

    @property
    def requests(self) -> int:
        return self.proxy.requests


@pytest.fixture
async def faulty_azurite(azurite_address: str) -> AsyncIterator[FaultyAzurite]:
    """Azurite behind a fault-injecting proxy."""
    faults = deque[Fault]()
    proxy = FaultProxy(lambda: faults.popleft() if faults else "pass")
    async with proxy.running(azurite_address):
        yield FaultyAzurite(proxy, faults)


@pytest.fixture
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(aio, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(aio, "LONGEST_PAUSE_SECONDS", 0.1)


@pytest.fixture
def connect_options(
    _short_pauses: None, storage_settings: StorageSettings
) -> dict[str, str]:
    names = ("storage", "queue", "container", "files_container")
    return {name: getattr(storage_settings, name) for name in names}


@pytest.fixture
async def fleet(connect_options: dict[str, Any]) -> AsyncIterator[aio.Fleet]:
    async with aio.connect(**connect_options) as fleet:
        yield fleet


@pytest.fixture
def work(storage_settings: StorageSettings, tmp_path, monkeypatch) -> RunWorker:
    """Runs a worker until the queue is empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # of the LoRA cache
    monkeypatch.setattr("worker.pull.UNTIL_EMPTY_PAUSE_SECONDS", 0.1, raising=False)
    settings = WorkerSettings(
        **storage_settings.model_dump(),
        model=Path("stand-in"),
        until_empty=True,
    )

    async def run() -> None:
        async with open_storage(settings) as storage:
            pipeline = Pipeline(
                storage, lambda: StandInEngine(draw=draw_unless_broken), settings
            )
            await pipeline.run(asyncio.Event(), asyncio.Event())

    return run
