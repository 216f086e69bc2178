"""Real workers of bundles, each killed between two steps: does each job end once?"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import forks
import storm
from bundled import DEADLY_CALLS, bundle_of, faults, job, packed
from imagefleet.storage.open import Storage
from messages import failed_jobs
from storm_worker import BAD_STEPS

#: Kills on each storage; `BUNDLE_KILLS=200` is the long run.
KILLS = int(os.environ.get("BUNDLE_KILLS", "8"))

JOBS = 6
BAD = 3

#: All that a delivery does, at which it may end.
DEATHS = list(itertools.product(DEADLY_CALLS, ("before", "after")))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[forks.Forks]:
    with storm.commands(tmp_path, "import bundled") as made:
        yield made


def jobs_of(number: int) -> list[str]:
    first = number * JOBS
    return [
        job(first + place, **({"steps": BAD_STEPS} if place == BAD else {}))
        for place in range(JOBS)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_each_job_of_a_bundle_ends_once_whenever_its_worker_is_killed(
    storage: Storage, server: forks.Forks, tmp_path: Path
):
    variables = forks.environment(storage.settings)
    kills = bundles = 0
    while kills < KILLS:
        name = f"{bundles:032x}"
        await storage.queue.send([bundle_of(jobs_of(bundles), name)])
        bundles += 1
        # One after the other on the same bundle, until it is done.
        while (await storage.queue.depth()).messages:
            (part, call), when = DEATHS[(kills * 3 + bundles) % len(DEATHS)]
            ended = await asyncio.to_thread(
                server.run,
                f"{part}.{call}",
                when,
                cwd=tmp_path,
                variables=variables,
                program="bundled.worker_that_is_killed()",
            )
            assert ended.returncode in {0, -9}, ended.stderr
            kills += ended.returncode == -9
    ids = [f"j{number}" for number in range(bundles * JOBS)]
    assert await faults(storage, ids) == set()
    bad = {f"j{number * JOBS + BAD}" for number in range(bundles)}
    assert {record.id for record in await failed_jobs(storage)} == bad
    assert len((await packed(storage)).images) == len(ids) - len(bad)
