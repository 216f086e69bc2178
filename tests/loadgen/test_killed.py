"""A load that is killed: the next one goes on where it was."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import polling
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.submit import BATCH
from loadgen.load import Checkpoint

ROOT = Path(__file__).parents[2]


def ids_in(settings: StorageSettings) -> Counter[str]:
    async def browse() -> Counter[str]:
        async with open_storage(settings) as storage:
            browsed = storage.queue.browse()
            return Counter(
                [json.loads(message.body)["id"] async for message in browsed]
            )

    return asyncio.run(browse())


def test_a_load_that_is_killed_resumes_and_loses_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "t.yaml").write_text("prompt: a fox\ncount: 3000\n")
    place = tmp_path / ".t.yaml.jobs.checkpoint.json"
    settings = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")
    command = [sys.executable, "-m", "fleet.main", "load", "t.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("IMAGEFLEET_REQUIRE_AZURITE", None)
    load = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def confirmed() -> int:
        assert load.poll() is None, load.communicate()[1]
        found = Checkpoint.read(place)
        return found.confirmed if found else 0

    try:
        polling.until_in_thread(confirmed, lambda jobs: jobs >= 1_000)
    finally:
        load.kill()
        load.communicate()
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    ids = ids_in(settings)
    assert len(ids) == 3_000
    assert ids.total() - 3_000 <= BATCH
    assert json.loads(result.stdout)["confirmed"] == 3_000
    # A user counts images, and the names of images follow from the ids: none is there twice.
    checkpoint = Checkpoint.read(place)
    assert checkpoint is not None
    assert checkpoint.confirmed == checkpoint.noted == 3_000
