"""Two models, two queues and real worker processes that are killed while they change the model."""

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

import forks
import tiny_model as tiny
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from storages import local_only

pytestmark = pytest.mark.slow

JOBS = 4
MODELS = ("tiny", "other")

#: Company in the engine's batch rounds differently.
SAME = 3

Start = Callable[..., forks.Fork]  # the fixture of conftest.py


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "other"
    return tiny.build_half_checkpoint(folder, seed=1)


def distance(one: Any, other: Any) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def jobs(model: str, campaign: str) -> list[str]:
    return [
        json.dumps(
            {
                "prompt": "a house",
                "id": f"{model}{number}",
                "seed": number,
                "steps": 4,
                "model": model,
                "campaign": campaign,
            }
        )
        for number in range(JOBS)
    ]


async def pictures(storage: Storage, campaign: str) -> JSONDict:
    found = {}
    async for name in storage.blobs.names(f"{campaign}/"):
        data = await storage.blobs.read(name)
        assert data is not None
        found[name.rpartition("/")[2]] = np.asarray(Image.open(io.BytesIO(data)))
    return found


async def said(process: forks.Fork, text: str) -> str:
    def read() -> str:
        while line := process.stdout.readline():
            if text in line:
                return line
        raise AssertionError(f"it ended without {text!r}")

    return await asyncio.to_thread(read)


async def finish(*processes: forks.Fork) -> None:
    for process in processes:
        output, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0, output


@local_only
async def test_workers_killed_in_a_change_of_models_lose_nothing_and_draw_nothing_wrong(
    storage: Storage, tiny_model: Path, other_model: Path, fork: Start
):
    given = ("--lease-seconds", "2", "--slots", "2", "--device", "cpu")
    for model in MODELS:
        await storage.models.send(jobs(model, "alone"))
    # Each by a worker that knows no other model.
    await finish(
        *(
            fork("worker", "--model", path, *given, "--until-empty")
            for path in (tiny_model, other_model)
        )
    )
    for model in MODELS:
        await storage.models.send(jobs(model, "together"))
    await storage.queue.send(jobs("other", "sent-to-the-wrong-queue"))
    both = ("worker", "--model", tiny_model, "--model", other_model, *given)
    first = fork(*both)
    await said(first, " is next: its jobs")
    first.kill()
    for model in MODELS:  # what is left may be of one model
        await storage.models.send(jobs(model, "later"))
    second = fork(*both)
    await said(second, "is loaded in place of")
    second.kill()
    await finish(fork(*both, "--until-empty"))

    alone = await pictures(storage, "alone")
    together = await pictures(storage, "together")
    later = await pictures(storage, "later")
    moved = await pictures(storage, "sent-to-the-wrong-queue")
    assert (
        set(alone)
        == set(together)
        == set(later)
        == {f"{m}{n}.png" for m in MODELS for n in range(JOBS)}
    )
    for name, picture in alone.items():
        for other in (together, later):
            assert distance(picture, other[name]) <= SAME, (
                f"{name} was drawn with another model"
            )
    assert set(moved) == {f"other{number}.png" for number in range(JOBS)}
    assert all(
        distance(alone[name], picture) <= SAME for name, picture in moved.items()
    )
    assert distance(alone["tiny0.png"], alone["other0.png"]) > 10 * SAME
    assert (
        (await storage.queue.depth()).messages
        == (await storage.poison.depth()).messages
        == 0
    )


@local_only
async def test_jobs_find_the_model_whose_name_only_its_server_tells_at_the_first_start(
    storage: Storage, tiny_model: Path, fork: Start, tmp_path
):
    """As civitai's downloads: their addresses end in a number."""
    packed = tmp_path / "packed.tar"
    with tarfile.open(packed, "w") as tar:
        tar.add(tiny_model, "tiny")
    content = packed.read_bytes()

    async def answer(_: web.BaseRequest) -> web.Response:
        named = {"Content-Disposition": 'attachment; filename="dreams.tar"'}
        return web.Response(body=content, headers=named)

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/api/download/models/128713"
    await storage.models.send(
        ['{"prompt": "a", "id": "a", "steps": 2, "model": "dreams"}']
    )
    sha256 = hashlib.sha256(content).hexdigest()
    given = ("--model-sha256", sha256, "--cache", tmp_path / "cache", "--device", "cpu")
    await finish(
        fork("worker", "--model", address, *given, "--slots", "1", "--until-empty")
    )
    await runner.cleanup()
    assert await pictures(storage, "default")
