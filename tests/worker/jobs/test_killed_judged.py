"""Real workers that are killed while they judge: is exactly kept what an undisturbed run keeps?"""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import forks
import storm
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from judging import campaign as judged

JOBS = int(os.environ.get("JUDGED_JOBS", "400"))
KILLS = int(os.environ.get("JUDGED_KILLS", "12"))

#: Workers that run side by side.
WORKERS = 2

#: A worker is killed at one of so many calls to the storage.
CALLS = 60

RULES = {
    "best": "contrast=30,coherence=0.1,early.contrast=25,best=2",
    "distinct": "contrast=30,coherence=0.1,best=1,distinct=3",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[forks.Forks]:
    with storm.commands(tmp_path, "from judging import campaign as judged") as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_kills_keep_exactly_what_an_undisturbed_run_keeps(
    storage: Storage, server: forks.Forks, tmp_path: Path
):
    variables = forks.environment(storage.settings)
    chance = random.Random(0)

    async def work(deadly_call: int) -> int:
        ended = await asyncio.to_thread(
            server.run,
            str(deadly_call),
            cwd=tmp_path,
            variables=variables,
            program="judged.worker()",
        )
        assert ended.returncode in {0, -9}, ended.stderr
        return ended.returncode

    for rule, keep in RULES.items():
        await storage.queue.send(judged.jobs_of(f"calm-{rule}", JOBS // 2, keep))
    assert await work(0) == 0
    for rule, keep in RULES.items():
        await storage.queue.send(judged.jobs_of(f"wild-{rule}", JOBS // 2, keep))
    kills = 0
    while (await storage.queue.depth()).messages:
        calls = [
            chance.randint(1, CALLS) if kills < KILLS else 0 for _ in range(WORKERS)
        ]
        kills += (await asyncio.gather(*map(work, calls))).count(-9)
    assert kills >= KILLS
    for rule in RULES:
        calm = f"calm-{rule}"
        wild = f"wild-{rule}"
        kept = await judged.kept(storage, calm)
        assert kept
        assert await judged.kept(storage, wild) == kept
        assert await judged.dropped(storage, wild) == await judged.dropped(
            storage, calm
        )
        numbers = [await reader.counts(storage, each) for each in (calm, wild)]
        told = {
            (each.images, each.completed, each.dropped, each.failed) for each in numbers
        }
        assert len(told) == 1, told
        assert numbers[0].completed + numbers[0].dropped == JOBS // 2
