"""Fixtures of the worker's tests: settings for both storages, and a pipeline run to its end."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import pytest

from benchmarks.stand_in import StandInEngine
from imagefleet import concurrency
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.message import read_job
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from worker.engine import contract
from worker.pipeline import Machine, Pipeline
from worker.replica import UNKNOWN, Replica
from worker.settings import WorkerSettings

#: Faults are retried as often as in production, but at once.
IMPATIENT = concurrency.RetryPolicy(
    tries=5, first_wait_seconds=0.001, longest_wait_seconds=0.001, waits_for_access=True
)


class RunPipeline(Protocol):
    """Runs a pipeline on the test's storage, once the messages are *sent* that are given.

    By default it runs until the queue is empty.
    """

    async def __call__(
        self,
        engine: contract.Engine | None = None,
        *,
        sent: Iterable[str] = (),
        opened: Storage | None = None,
        stop: asyncio.Event | None = None,
        hurry: asyncio.Event | None = None,
        load: Callable[[], contract.Engine] | None = None,
        runs_on: Replica = UNKNOWN,
        **changes: Any,
    ) -> Pipeline: ...


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr("worker.pull.UNTIL_EMPTY_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("worker.pull.LONGEST_PAUSE_SECONDS", 0.1)


@pytest.fixture
def worker_settings(
    storage_settings: StorageSettings, tmp_path
) -> Callable[..., WorkerSettings]:
    def make(**changes: Any) -> WorkerSettings:
        fields = {
            **storage_settings.model_dump(),
            "model": Path("stand-in"),
            "cache": tmp_path / "cache",
            "until_empty": True,
            "name": "test-worker",
            **changes,
        }
        return WorkerSettings(**fields)

    return make


@pytest.fixture
def one_hand_back(monkeypatch) -> None:
    monkeypatch.setattr("worker.stages.prepare.HAND_BACKS", 1)


class StoreImages(Protocol):
    """Stores images of a message's job, by default all, without records of them."""

    async def __call__(
        self, body: str, *indices: int, data: bytes = b"image"
    ) -> None: ...


@pytest.fixture
def store_images(storage: Storage) -> StoreImages:
    """As a worker does that dies before it has written a record."""

    async def store(body: str, *indices: int, data: bytes = b"image") -> None:
        job = read_job(body, "message")
        for index in indices or range(job.images):
            facts = {"job": str(job.id), "digest": job.stage_digest}
            if job.stages > 1:
                facts["stages"] = str(job.stages)
            if job.images > 1:
                facts["images"] = str(job.images)
            await storage.blobs.create(job.blob_name(index), data, "image/png", facts)

    return store


@pytest.fixture
def run_pipeline(
    storage: Storage, worker_settings: Callable[..., WorkerSettings]
) -> RunPipeline:
    async def run(
        engine: contract.Engine | None = None,
        *,
        sent: Iterable[str] = (),
        opened: Storage | None = None,
        stop: asyncio.Event | None = None,
        hurry: asyncio.Event | None = None,
        load: Callable[[], contract.Engine] | None = None,
        runs_on: Replica = UNKNOWN,
        **changes: Any,
    ) -> Pipeline:
        await storage.queue.send(sent)
        pipeline = Pipeline(
            opened or storage,
            load or (lambda: engine or StandInEngine()),
            worker_settings(**changes),
            retry_policy=IMPATIENT,
            machine=Machine(runs_on),
        )
        await pipeline.run(stop or asyncio.Event(), hurry or asyncio.Event())
        return pipeline

    return run


@pytest.fixture
def spring_is_read(monkeypatch) -> threading.Event:
    """Set once a worker knows that the campaign `spring` is cancelled."""
    known = threading.Event()
    read = CancelledCampaigns._read

    async def noting(self: CancelledCampaigns) -> None:
        await read(self)
        if "spring" in self.times:
            known.set()

    monkeypatch.setattr(CancelledCampaigns, "_read", noting)
    return known


@pytest.fixture
def lora_bytes() -> Callable[[str], bytes]:
    """A safetensors file as far as its header goes; its numbers are a text's letters."""

    def make(text: str) -> bytes:
        data = text.encode()
        entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
        header = json.dumps({"__metadata__": {"format": "pt"}, "x": entry}).encode()
        return len(header).to_bytes(8, "little") + header + data

    return make
