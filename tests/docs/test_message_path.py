"""The files that a message visits from its lease to its acknowledgement, as a trace finds them."""

import asyncio
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import tiny_model
from imagefleet.storage.local.queue import LocalQueue
from imagefleet.storage.open import open_storage
from worker import pipeline, process
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"

MOST_FILES = 49

#: The puller waits there for the next message meanwhile, an idle engine asks there why, a header is
#: read on one of asyncio's threads, which is traced only if it is new, each tick asks whether
#: there is anything to compile, and of the first image the time is noted.
NOT_THE_MESSAGES = {
    "worker/tasks.py",
    "worker/pipeline.py",
    "worker/gpu_clock.py",
    "worker/engine/phases.py",
    "imagefleet/files/safetensors.py",
    "worker/engine/slots/compiling.py",
    "worker/engine/slots/compile_policy.py",
}

MESSAGE = '{"prompt": "a (red) house <lora:style:0.5>", "steps": 3, "width": 64, "height": 64}'


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    model = tiny_model.build_tiny_checkpoint(tmp_path / "model")
    tiny_model.build_tiny_lora(tmp_path / "loras" / "style.safetensors", model)
    return WorkerSettings(
        model=str(model),
        storage=f"local:{tmp_path / 'storage'}",
        lora_directory=tmp_path / "loras",
        device="cpu",
        until_empty=True,
    )


async def visited_files(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Files with a function that runs between the lease and the acknowledgement of one message."""
    visited: set[str] = set()
    in_flight = threading.Event()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and in_flight.is_set():
            visited.add(frame.f_code.co_filename)

    receive, delete = LocalQueue.receive, LocalQueue.delete

    async def leased(self: LocalQueue, *arguments: object) -> object:
        messages = await receive(self, *arguments)  # type: ignore[arg-type]
        if messages:
            in_flight.set()
        return messages

    async def acknowledged(self: LocalQueue, *arguments: object) -> None:
        await delete(self, *arguments)  # type: ignore[arg-type]
        in_flight.clear()

    async def measure_nothing(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LocalQueue, "receive", leased)
    monkeypatch.setattr(LocalQueue, "delete", acknowledged)
    monkeypatch.setattr(pipeline, "measure_depth", measure_nothing)
    monkeypatch.setattr(process._Worker, "_show_progress", measure_nothing)
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send([MESSAGE])
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        report = await process.run_worker(settings)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert report.jobs == {"completed": 1}
    inside = [
        Path(name).relative_to(ROOT) for name in visited if name.startswith(f"{ROOT}/")
    ]
    sources = {
        str(path) for path in inside if path.parts[0] in {"imagefleet", "worker"}
    }
    return sorted(sources - NOT_THE_MESSAGES)


async def test_a_message_passes_through_the_files_that_the_page_lists(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited = await visited_files(settings, monkeypatch)

    section = (
        PAGE.read_text().partition("<!-- files -->")[2].partition("<!-- /files -->")[0]
    )
    assert sorted(re.findall(r"`([a-z0-9_/]+\.py)`", section)) == visited
    assert len(visited) <= MOST_FILES
