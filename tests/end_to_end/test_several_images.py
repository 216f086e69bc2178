"""A job of several images, and real worker processes that are killed and stopped in its middle."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import forks
import polling
from imagefleet.records import reader
from imagefleet.storage.open import Storage

pytestmark = pytest.mark.slow

IMAGES = 48

#: Of the stand-in engine, which holds four images at a time.
TICK_SECONDS = 0.15
CAPACITY = 4

CHAOS = Path(__file__).parents[1] / "chaos"


class Workers:
    """Starts real workers without torch, which note the seeds that they draw."""

    def __init__(
        self, server: forks.Forks, folder: Path, environment: dict[str, str]
    ) -> None:
        self._server = server
        self._folder = folder
        self._environment = environment
        self._events = folder / "events"
        self._events.touch()

    def start(self, *flags: str) -> forks.Fork:
        arguments = [
            self._events,
            TICK_SECONDS,
            0,
            0,
            "stand-in",
            "--model",
            "none",
            *flags,
        ]
        return self._server.start(
            *map(str, arguments),
            cwd=self._folder,
            variables=self._environment,
            program="storm_worker.main()",
        )

    @property
    def drawn(self) -> list[int]:
        lines = self._events.read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("drawn")]


@pytest.fixture
def workers(environment: dict[str, str], tmp_path: Path) -> Iterator[Workers]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(CHAOS)])}
    with forks.running(
        Path(sys.executable), tmp_path, variables, "import storm_worker"
    ) as server:
        yield Workers(server, tmp_path, environment)


async def stored(storage: Storage) -> set[str]:
    return {name async for name in storage.blobs.names("default/")}


async def wait_for_images(storage: Storage, count: int) -> int:
    return len(
        await polling.until(lambda: stored(storage), lambda names: len(names) >= count)
    )


async def end(process: forks.Fork) -> None:
    output, _ = await asyncio.to_thread(process.communicate, timeout=1100)
    assert process.returncode == 0, output


@pytest.mark.parametrize("storage_settings", ["local"], indirect=True)
async def test_after_a_kill_and_a_stop_others_draw_only_what_is_missing(
    storage: Storage, workers: Workers
) -> None:
    await storage.queue.send(
        [f'{{"prompt": "a house", "id": "j", "seed": 0, "n_iter": {IMAGES}}}']
    )
    killed = workers.start("--lease-seconds", "2")
    await wait_for_images(storage, 6)
    killed.kill()
    await asyncio.to_thread(killed.communicate)
    by_killed = len(await stored(storage))

    stopped = workers.start("--lease-seconds", "300")
    await wait_for_images(storage, by_killed + 3)
    stopped.terminate()
    await end(stopped)
    left = IMAGES - len(await stored(storage))
    assert left > 12, "it has drawn on after it was told to stop"

    await end(workers.start("--until-empty"))  # at once, not after 300 s
    assert await stored(storage) == {
        "default/j.png",
        *(f"default/j~{index}.png" for index in range(1, IMAGES)),
    }
    twice = Counter(workers.drawn) - Counter(range(IMAGES))
    assert twice.total() <= 2 * CAPACITY, "more than was in the killed worker's slots"
    assert [name async for name in storage.blobs.names("-duplicates/")] == []
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed, counts.failed) == (IMAGES, 1, 0)
    assert (await storage.queue.depth()).messages == 0
