"""Several GPUs and several models: real parents and workers, which share out the models.

The workers run on the CPU with a stand-in engine, which marks each image with its model.
"""

import asyncio
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from storages import local_only

pytestmark = pytest.mark.slow

#: By model; more than one GPU draws before the other has started.
JOBS = {"one": 8, "two": 48}

#: Draws the model's number into the corner.
LOADING = """
    from benchmarks.stand_in import draw_noise
    def draw(request):
        image = draw_noise(request)
        image[:4, :4] = {"one": 1, "two": 2}.get(checkpoint.name, 0)
        return image
    engine = StandInEngine(capacity=2, tick_seconds=0.2, draw=draw)
    engine.model_name = checkpoint.name
    return engine
"""


async def run(command: list[Any], environment: dict[str, str]) -> list[JSONDict]:
    """The lines of its log, in JSON; it must end with 0."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**environment, "IMAGEFLEET_LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
        limit=2**20,
    )
    try:
        _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, log.decode()
    return [json.loads(line) for line in log.splitlines()]


@local_only
async def test_gpus_begin_with_a_model_that_jobs_wait_for_change_and_fetch_each_once(
    storage: Storage,
    stand_in_worker: Callable[..., list[Any]],
    environment: dict[str, str],
    tiny_model: Path,
    tmp_path,
):
    packed = tmp_path / "model.tar"
    with tarfile.open(packed, "w") as tar:
        tar.add(tiny_model, "tiny")
    for model, count in JOBS.items():
        name = f"models/{model}.tar"
        await storage.files.create(name, packed.read_bytes(), "application/x-tar", {})
        await storage.models.send(
            f'{{"prompt": "a", "id": "{model}-{number}", "model": "{model}"}}'
            for number in range(count)
        )
    models = [flag for each in JOBS for flag in ("--model", f"store:{each}.tar")]
    changes = "from worker.models import change; change.IDLE_LOOK_SECONDS = 0.1"
    command = stand_in_worker(
        "--device",
        "cpu",
        "--gpus",
        "0,1",
        "--cache",
        tmp_path / "cache",
        *models,
        "--until-empty",
        "--prefetch-seconds",
        "0",
        loading=LOADING.strip(),
        changes=changes,
    )

    log = await run(command, environment)

    def lines(action: str) -> list[JSONDict]:
        return [line for line in log if line["action"] == action]

    began = [line["device"] for line in lines("first_model")]
    assert sorted(began) == ["0", "1"], "jobs wait for each model"
    assert lines("model_switched"), "who has no jobs left helps the others"
    assert len(lines("model_fetched")) == len(JOBS), (
        "the other GPUs found them in the cache"
    )
    assert len(list((tmp_path / "cache").glob("models/*/*/model_index.json"))) == len(
        JOBS
    )
    drawn = {}
    async for name in storage.blobs.names("default/"):
        data = await storage.blobs.read(name)
        assert data is not None
        drawn[name] = Image.open(io.BytesIO(data)).getpixel((0, 0))
    assert drawn == {
        f"default/{model}-{number}.png": (mark,) * 3
        for mark, (model, count) in enumerate(JOBS.items(), start=1)
        for number in range(count)
    }
