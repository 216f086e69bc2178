"""Jobs of one id, and workers that die at each of their calls to the storage: one outcome each.

The whole pipeline on the local storage, with a stand-in engine; its queue delivers again what a
worker that died had in flight.
"""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

import storm_clashes
import storm_worker
from benchmarks.stand_in import StandInEngine
from imagefleet import concurrency, errors
from imagefleet.records import reader
from imagefleet.storage.open import QUEUE_FILE, Storage, open_storage
from storm_jobs import StormJob
from worker.engine import contract
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

HOUSE: StormJob = {"id": "a", "prompt": "a house", "seed": 1}
CAT: StormJob = {**HOUSE, "prompt": "a cat"}

#: Jobs that meet; the last is an exact copy.
CASES: dict[str, list[StormJob]] = {
    "two pictures": [HOUSE, CAT, HOUSE],
    "two batches": [{**HOUSE, "n_iter": 2}, {**CAT, "n_iter": 3}, {**CAT, "n_iter": 3}],
    "a batch and its first image": [{**HOUSE, "n_iter": 2}, HOUSE, HOUSE],
    "chains of another second stage": [
        {**HOUSE, "then": [{"seed": 2}]},
        {**HOUSE, "then": [{"seed": 3}]},
        {**HOUSE, "then": [{"seed": 3}]},
    ],
    "a chain and its first stage": [{**HOUSE, "then": [{"seed": 2}]}, HOUSE, HOUSE],
    "a batch and a job of its old name": [{**HOUSE, "n_iter": 2}, {**CAT, "id": "a-0"}],
}

#: Calls of one worker until all is done: more are not counted.
MOST_CALLS = 200

_CALLS = {
    "receive",
    "renew",
    "release",
    "delete",
    "send",
    "create",
    "append",
    "record",
    "exists",
}

AT_ONCE = concurrency.RetryPolicy(
    tries=3, first_wait_seconds=0.001, longest_wait_seconds=0.001
)


class Life:
    """A worker's calls to blobs and poison queue, until it dies at one: before or after its effect.

    What comes of several workers side by side is asked by tests/chaos.
    """

    def __init__(self, dies_at: float, *, after: bool) -> None:
        self.calls = 0
        self.is_over = asyncio.Event()
        self._dies_at = dies_at
        self._after = after

    def wrap(self, storage: Storage) -> Storage:
        for name in ("queue", "poison", "blobs"):
            setattr(storage, name, Mortal(getattr(storage, name), self))
        storage.models.send = Mortal(storage.models, self).send  # type: ignore[method-assign]
        return storage

    async def call(self, call: Callable[..., Any], arguments: Any, named: Any) -> Any:
        self.calls += 1
        if self.calls > self._dies_at or (
            self.calls == self._dies_at and not self._after
        ):
            await self._die()
        result = await call(*arguments, **named)
        if self.calls == self._dies_at:
            await self._die()
        return result

    async def _die(self) -> None:
        self.is_over.set()
        raise errors.NodeError("it died")


class Mortal:
    """Forwards to a part of the storage, as long as the worker lives."""

    def __init__(self, inner: Any, life: Life) -> None:
        self._inner = inner
        self._life = life

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in _CALLS:
            return call
        return lambda *arguments, **named: self._life.call(call, arguments, named)


def draw(request: contract.ImageRequest) -> Any:
    noise = storm_worker.noise_of(str(request.prompt), request.steps, request.seed)
    return storm_worker.image_of(
        [noise, *([request.init.pixels] if request.init else [])]
    )


async def live(settings: WorkerSettings, life: Life) -> None:
    """A worker's life, until nothing is left to do or it dies."""
    side = storm_worker.SIDE
    engine = StandInEngine(size=(side, side), draw=draw)
    async with open_storage(settings) as storage:
        pipeline = Pipeline(
            life.wrap(storage), lambda: engine, settings, retry_policy=AT_ONCE
        )
        running = asyncio.create_task(pipeline.run(asyncio.Event(), asyncio.Event()))
        over = asyncio.create_task(life.is_over.wait())
        await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        running.cancel()
        ended = await asyncio.gather(running, return_exceptions=True)
        if not life.is_over.is_set() and isinstance(ended[0], Exception):
            raise ended[0]


def deliver_again(folder: Path) -> None:
    """Ends all leases, as time does."""
    with (
        contextlib.closing(sqlite3.connect(folder / QUEUE_FILE)) as connection,
        connection,
    ):
        connection.execute("UPDATE messages SET visible_at = 0")


class Model:
    """A storage with the messages of some jobs, and what has become of them."""

    def __init__(self, folder: Path, jobs: list[StormJob]) -> None:
        self.folder = folder
        self._jobs = jobs

    def settings(self, name: str) -> WorkerSettings:
        return WorkerSettings(
            storage=f"local:{self.folder}",
            model=Path("stand-in"),
            until_empty=True,
            name=name,
        )

    async def __aenter__(self) -> Self:
        async with open_storage(self.settings("sender")) as storage:
            await storage.create()
            await storage.queue.send(map(json.dumps, self._jobs))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Each job has one outcome, and its records say the same."""
        deliver_again(self.folder)
        await live(self.settings("last"), Life(float("inf"), after=False))
        async with open_storage(self.settings("checker")) as storage:
            sent = list({storm_clashes.key_of(job): job for job in self._jobs}.values())
            truth = await storm_clashes.outcomes_of(storage, sent, "default")
            counts = await reader.counts(storage, "default")
        assert truth.errors == []
        assert (counts.completed, counts.failed) == (
            len(truth.completed),
            len(truth.failed),
        )


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr("worker.pipeline.HAND_BACK_SECONDS", 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", CASES.values(), ids=CASES.keys())
async def test_a_worker_that_dies_at_any_call_leaves_each_job_one_outcome(
    tmp_path, jobs: list[StormJob]
):
    whole = Life(float("inf"), after=False)
    async with Model(tmp_path / "whole", jobs) as model:
        await live(model.settings("whole"), whole)
    assert len(jobs) < whole.calls < MOST_CALLS
    for dies_at in range(1, whole.calls + 1):
        life = Life(dies_at, after=bool(dies_at % 2))
        async with Model(tmp_path / f"{dies_at}", jobs) as model:
            await live(model.settings("first"), life)
