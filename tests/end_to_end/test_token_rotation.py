"""A worker process whose tokens are valid for a few seconds: every job is done once."""

import asyncio
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from fleet.keys import mint as keys_mint
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from polling import until

pytestmark = pytest.mark.slow

JOBS = 72

#: Tokens are valid for two or three seconds (Azure's times are whole); the jobs take about eleven.
LIFE = timedelta(seconds=3)

#: Images after which tokens are replaced in time: they take half of that life.
IMAGES_PER_TOKENS = 8

#: A worker with an engine that needs no GPU and generates four images in 0.6 s. Each job may be
#: delivered once: any that failed or was lost would end in the poison queue. It says which images
#: it draws, and when it finds no tokens in place of those that have expired.
WORKER = """
import asyncio
from imagefleet.storage.azure.credentials import RotatingTokens
from imagefleet.telemetry import logs
from worker import process
from worker.settings import WorkerSettings
from benchmarks.stand_in import StandInEngine, draw_noise

renew = RotatingTokens.renew

async def renew_or_say_so(tokens, *given):
    are_there = await renew(tokens, *given)
    if not are_there:
        print("EXPIRED", flush=True)
    return are_there

def draw(request):
    print("DRAWN", flush=True)
    return draw_noise(request)

RotatingTokens.renew = renew_or_say_so
logs.configure("text")
settings = WorkerSettings(
    model="none", until_empty=True, max_attempts=1, lease_seconds=10, prefetch_seconds=3
)
asyncio.run(process.run_worker(settings, load=lambda: StandInEngine(tick_seconds=0.6, draw=draw)))
"""


Mint = Callable[[timedelta], str]


@pytest.fixture
def mint(azurite_settings: StorageSettings) -> Mint:
    minter = keys_mint.Minter(azurite_settings)
    return lambda life: json.dumps(minter.mint(ROLES["worker"], life).record)


@pytest.fixture
def start(
    azurite_settings: StorageSettings,
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the worker with the given variables."""
    started = []

    def start_worker(**variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={
                **os.environ,
                "IMAGEFLEET_STORAGE": keys_mint.Minter(azurite_settings).storage,
                "IMAGEFLEET_QUEUE": azurite_settings.queue,
                "IMAGEFLEET_CONTAINER": azurite_settings.container,
                "IMAGEFLEET_FILES_CONTAINER": azurite_settings.files_container,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start_worker
    for process in started:
        with process:  # closes its pipe
            process.kill()


async def fill(storage: Storage) -> None:
    await storage.create()
    await storage.queue.send(
        f'{{"prompt": "a fox", "id": "j{number}"}}' for number in range(JOBS)
    )


async def check_that_each_job_was_done_once(storage: Storage, output: str) -> None:
    assert {name async for name in storage.blobs.names("default/")} == {
        f"default/j{number}.png" for number in range(JOBS)
    }
    assert (await storage.queue.depth()).messages == 0
    assert (await storage.poison.depth()).messages == 0
    (jobs,) = re.findall("done: .* jobs: (.*)", output)
    counts = {
        outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", jobs)
    }
    # A busy machine loses a lease: what was stored meanwhile is a duplicate.
    assert counts["completed"] + counts.get("duplicate", 0) == JOBS, output
    assert "sig=" not in output


async def test_a_worker_survives_tokens_that_are_rotated_in_a_file_sometimes_too_late(
    azurite_settings: StorageSettings, mint: Mint, start, tmp_path
):
    file = tmp_path / "tokens.json"
    told = Counter[str]()  # the worker's lines

    def replace_tokens(life: timedelta) -> None:
        new = tmp_path / "new.json"
        new.write_text(mint(life))
        new.replace(file)

    def listen() -> None:
        for line in process.stdout:
            told[line.strip()] += 1

    async def until_they_are_due(images: float) -> None:
        """Returns after so many *images*, once the tokens have expired, or the worker ends."""
        drawn = told["DRAWN"]
        expired = told["EXPIRED"]
        await until(
            lambda: (
                told["DRAWN"] >= drawn + images
                or told["EXPIRED"] > expired
                or ended.done()
            )
        )

    async with open_storage(azurite_settings) as storage:
        await fill(storage)
        replace_tokens(timedelta(hours=1))  # for its start, however long that takes
        process = start(IMAGEFLEET_SAS_FILE=str(file))
        ended = asyncio.create_task(asyncio.to_thread(listen))
        replacements = 0
        while not ended.done():
            is_late = replacements % 3 == 2
            await until_they_are_due(math.inf if is_late else IMAGES_PER_TOKENS)
            replace_tokens(LIFE)
            replacements += 1
        await ended
        output = "\n".join(told)
        assert process.wait() == 0, output
        await check_that_each_job_was_done_once(storage, output)
    assert replacements > 3
    assert "waiting for the file" in output, "no token expired: this proves nothing"
