"""A worker at its start, with the engine replaced: the rest is real."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import polling
from evaluation.stand_in import StandInEngine
from imagefleet.storage.open import Storage
from kernel_files import GRAPH, KEY, compile_into
from worker import process
from worker.files.kernels import archive, cache
from worker.settings import WorkerSettings


@pytest.fixture
def settings(
    worker_settings: Callable[..., WorkerSettings],
    tmp_path,
    monkeypatch,
) -> WorkerSettings:
    """Of a worker on a machine with the key, without torch's and Triton's variables."""
    for name in (cache.TORCH_FOLDER, cache.TRITON_FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(cache, "find_key", lambda *_: KEY)
    archive.pack(compile_into(tmp_path / "there"), KEY, tmp_path / f"{KEY.name}.tar.xz")
    return worker_settings(kernels=tmp_path)


async def test_kernels_arrive_while_the_model_loads_where_torch_looks_for_them(
    storage: Storage, settings: WorkerSettings, caplog
):
    caplog.set_level("INFO")
    found: list[str] = []

    def load() -> StandInEngine:
        graph = Path(os.environ[cache.TORCH_FOLDER]) / GRAPH
        polling.until_in_thread(graph.exists)
        found.append(graph.read_text())
        return StandInEngine()

    await process.run_worker(settings, load=load)
    assert found == ["a graph"]
    assert f"kernels=image for {KEY.name}" in caplog.text


async def test_a_download_that_never_ends_keeps_no_worker_from_its_work_and_its_end(
    storage: Storage, settings: WorkerSettings, monkeypatch
):
    monkeypatch.setattr(cache.Manifest, "sha256", lambda *_: asyncio.Event().wait())
    without_image = settings.model_copy(update={"kernels": None})
    report = await process.run_worker(without_image, load=StandInEngine)
    assert report.jobs == {}


async def test_no_compiler_waits_for_what_a_worker_has_stopped_to_fetch(
    storage: Storage, settings: WorkerSettings, monkeypatch
):
    monkeypatch.setattr(cache.Manifest, "sha256", lambda *_: asyncio.Event().wait())
    async with cache.fetching(settings, storage.files) as kernels:
        pass  # at once: the fetch has not even begun
    assert kernels is not None
    monkeypatch.setattr(cache, "LONGEST_WAIT_SECONDS", 3600)
    with kernels.compiling("the UNet"):
        pass  # at once
