"""Fixtures that run the console command."""

import asyncio
import dataclasses
import hashlib
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import numpy as np
import pytest
from aiolimiter import AsyncLimiter

import forks
from benchmarks.stand_in import StandInEngine
from imagefleet.files import kernels as kernel_files
from imagefleet.job.message import Output
from imagefleet.pricing import prices
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, as_it_was, built, console_forks, in_process, start
from salad_fake import fleet_file
from worker.engine import contract
from worker.pipeline import Machine, Pipeline
from worker.replica import Replica
from worker.settings import WorkerSettings
from worker.stages import encode

__all__ = ["as_it_was", "built", "console_forks", "in_process", "start"]

#: Must never appear in any output.
SECRET = "sv=2024-11-04&sp=up&sig=aB%2FcD3cReT%3D"

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


@pytest.fixture
def imagefleet(tmp_path, console_forks: forks.Forks) -> Imagefleet:
    """Runs `imagefleet ARGUMENTS` in a new process and an empty folder; keywords set variables."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "80", **variables}
        return console_forks.run(*arguments, cwd=tmp_path, variables=environment)

    return run


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> bytes:
    """A file of compiled kernels."""
    path = tmp_path_factory.mktemp("kernels") / "unet.kernels"
    kernel_files.write(path, kernel_files.Header("NVIDIA H200", []), b"")
    return path.read_bytes()


def draw_picture(request: contract.ImageRequest) -> contract.Pixels:
    """A picture of large shapes by its seed, never twice the same to the last bit."""
    shapes = np.random.default_rng(request.seed).integers(10, 246, (8, 8, 3))
    rounding = np.random.default_rng().integers(
        -1, 2, (request.height, request.width, 3)
    )
    scale = request.height // 8
    return (shapes.repeat(scale, 0).repeat(scale, 1) + rounding).astype(np.uint8)


def draw_another(request: contract.ImageRequest) -> contract.Pixels:
    """A good picture of another job: a cached image, say."""
    return draw_picture(dataclasses.replace(request, seed=request.seed + 1))


@pytest.fixture
def bad_picture() -> Callable[[contract.ImageRequest], contract.Pixels]:
    return draw_another


class RunWorker(Protocol):
    """Runs a worker until the queue is empty."""

    async def __call__(
        self,
        name: str,
        draw: Callable[[contract.ImageRequest], contract.Pixels] = draw_picture,
        opened: Storage | None = None,
    ) -> None: ...


@pytest.fixture
def run_worker(
    storage: Storage,
    storage_settings: StorageSettings,
    tmp_path,
    monkeypatch,
) -> RunWorker:
    monkeypatch.setattr("worker.pull.UNTIL_EMPTY_PAUSE_SECONDS", 0.1)

    async def run(
        name: str,
        draw: Callable[[contract.ImageRequest], contract.Pixels] = draw_picture,
        opened: Storage | None = None,
    ) -> None:
        settings = WorkerSettings(
            **storage_settings.model_dump(),
            model="stand-in",
            cache=tmp_path / "cache",
            until_empty=True,
            name=name,
        )
        pipeline = Pipeline(
            opened or storage,
            lambda: StandInEngine(size=(64, 64), draw=draw),
            settings,
            machine=Machine(Replica("a GPU", 0.036, prices.FREE_STORAGE)),
        )
        await pipeline.run(asyncio.Event(), asyncio.Event())

    return run


@pytest.fixture
def salad(salad_module, tmp_path, monkeypatch) -> Iterator[Any]:
    """A fake SaladCloud, and a `fleet.yaml` for it in the test's folder."""
    from fleet.salad import client, deployment

    monkeypatch.setattr(deployment, "POLL_SECONDS", 0.01)
    quick = dataclasses.replace(client.RETRIES, first_wait_seconds=0.01)
    monkeypatch.setattr(client, "RETRIES", quick)
    monkeypatch.setattr(client, "call_limiter", lambda: AsyncLimiter(10_000))
    monkeypatch.setenv("SALAD_API_KEY", salad_module.KEY)
    monkeypatch.setenv("SAS", json.dumps({"queue": SECRET}))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fake = salad_module.SaladFake()
    with salad_module.serving(fake):
        (tmp_path / "fleet.yaml").write_text(
            fleet_file(fake.url, "IMAGEFLEET_SAS: {env: SAS}", replicas=750)
        )
        yield fake
    assert not fake.violations


class StoreImages(Protocol):
    """Stores images of the campaign `spring` with their records, as a worker does."""

    async def __call__(
        self, storage: Storage, *ids: str, **fields: Any
    ) -> list[Record]: ...


@pytest.fixture
def store_images() -> StoreImages:
    async def store(storage: Storage, *ids: str, **fields: Any) -> list[Record]:
        await storage.create()
        records = []
        for number, name in enumerate(ids):
            pixels = np.random.default_rng(number).integers(
                0, 256, (32, 32, 3), np.uint8
            )
            data = encode.encode(pixels, Output(), "a house\nSteps: 1").data
            known = {
                "outcome": "completed",
                "id": name,
                "campaign": "spring",
                "at": NOON + timedelta(seconds=number),
                "worker": "w1",
                "blob": f"spring/{name}.png",
                "size_bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "seconds": 1.5,
                "prompt": f"a house {name}, <lora:outline-style:0.8>",
                "negative_prompt": "blurry",
                "seed": number,
                "model": "dreamshaper",
                "sampler": "euler_a",
                "steps": 20,
                "cfg_scale": 7.5,
                "width": 32,
                "height": 32,
                "loras": [("outline-style", 0.8)],
            }
            record = Record.model_validate(known | fields)
            told = {"job": name, "sha256": str(record.sha256)}
            await storage.blobs.create(str(record.blob), data, "image/png", told)
            records.append(record)
        await RecordLog(storage.blobs, "w1").add(records)
        return records

    return store


@pytest.fixture
def add_job() -> Callable[..., Awaitable[Record]]:
    """Adds the record of a job of the campaign `spring` that ended otherwise."""

    async def add(storage: Storage, job_id: str, outcome: str, **fields: Any) -> Record:
        await storage.create()
        known = {
            "outcome": outcome,
            "id": job_id,
            "campaign": "spring",
            "at": NOON,
            "source": f"message-{job_id}",
            "error": "MissingFileError",
            "reason": "there is no LoRA fox",
        }
        record = Record.model_validate(known | fields)
        by_worker = outcome in {"failed", "cancelled"}
        if outcome == "cancelled":
            await RecordLog(storage.files, "operator").open("spring", "cancelled")
        await RecordLog(storage.blobs if by_worker else storage.files, "w1").add(
            [record]
        )
        return record

    return add
