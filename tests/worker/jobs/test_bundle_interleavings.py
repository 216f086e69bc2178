"""Two workers of one bundle, each stopped at any step: does each job end once, on both storages?

A goes to a step, where its lease is lost; B gets the bundle and goes to a step; then each goes on
or dies there; then others work until the queue is empty.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from bundled import bundle_of_jobs, faults
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import QueueDepth
from messages import Drawing, failed_jobs
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

COUNT = 8
NAMES = [f"j{number}" for number in range(COUNT)]
BAD = 3

STEPS = ("received", "drawn", "put", "recorded", "poisoned", "ended")

#: Calls to the storage: what is called, and the steps before and after it.
CALLS = (
    ("packs", "create", "drawn", "put"),
    ("blobs", "append", None, "recorded"),
    ("poison", "send", None, "poisoned"),
)


class Case(NamedTuple):
    at_a: str
    at_b: str
    #: Which of the two go on, in that order; the others die where they are.
    then: str
    drain_a: bool
    drain_b: bool
    is_bad: bool
    #: The call of A's whose reply is lost, or that never arrives.
    lost: str = ""


def cases() -> list[Case]:
    thens = ("ab", "ba", "b", "a", "")
    both = (False, True)
    found = itertools.product(STEPS, STEPS, thens, both, both, both)
    lost = itertools.product(
        STEPS, ("received",), ("ba", "b"), (True,), both, (False,), ("put", "no put")
    )
    return [Case(*each) for each in (*found, *lost)]


CASES = cases()

#: Cases of the slow set, on each storage; with `BUNDLE_CASES=1488` and `-o faulthandler_timeout=0`
#: pytest tries them all.
SAMPLE = int(os.environ.get("BUNDLE_CASES", "8"))
FEW = [
    Case("drawn", "drawn", "ab", False, False, True),
    Case("drawn", "put", "ab", True, False, True),
    Case("put", "drawn", "ba", False, True, True),
    Case("put", "received", "b", True, True, True),
    Case("recorded", "drawn", "", False, False, True),
    Case("poisoned", "put", "a", True, False, True),
    Case("ended", "recorded", "ba", True, True, False),
    Case("put", "received", "ba", True, False, False, "put"),
    Case("drawn", "received", "b", True, True, False, "no put"),
]


@dataclass(eq=False)
class Worker:
    """A pipeline that stops at a step until it is let on, and notes the lease that it has."""

    storage: Storage
    settings: WorkerSettings
    stops_at: str
    drains: bool = False
    is_bad: bool = False
    lost: str = ""
    leased: Any = None
    is_dead: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    on: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Task[None] = field(init=False)

    def start(self) -> None:
        for part, name, before, after in CALLS:
            owner = getattr(self.storage, part)
            setattr(owner, name, self._stepping(getattr(owner, name), before, after))
        served = self.storage.models.served

        def routed(models: Any) -> Any:
            queue = served(models)
            queue.receive = self._receiving(queue.receive)
            queue.depth = self._nothing_else
            # Asked for urgent jobs, `receive` would tell of none at once, again and again.
            queue.seconds_until_due = lambda _: math.inf
            for name in ("delete", "release"):
                setattr(
                    queue, name, self._stepping(getattr(queue, name), None, "ended")
                )
            return queue

        self.storage.models.served = routed  # type: ignore[method-assign]
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fails(request: Any) -> errors.FleetError | None:
            if self.drains and request.seed == COUNT // 2:
                loop.call_soon_threadsafe(stop.set)
            if self.is_bad and request.seed == BAD:
                return errors.JobError("cannot be drawn")
            return None

        engine = Drawing(fails, capacity=1, tick_seconds=0.005)
        await Pipeline(self.storage, lambda: engine, self.settings).run(
            stop, asyncio.Event()
        )

    async def step(self, name: str | None) -> None:
        if self.is_dead:
            await asyncio.Event().wait()
        if name == self.stops_at and not self.on.is_set():
            self.reached.set()
            await self.on.wait()
        if self.is_dead:
            await asyncio.Event().wait()

    def _stepping(
        self, call: Callable[..., Any], before: str | None, after: str
    ) -> Callable[..., Any]:
        async def stepping(*given: Any, **named: Any) -> Any:
            await self.step(before)
            if self.lost == "no put" and after == "put":
                raise errors.TransientError("it never arrived")
            result = await call(*given, **named)
            await self.step(after)
            if self.lost == "put" and after == "put":
                self.lost = ""
                error = errors.TransientError("the reply was lost")
                error.outcome_is_unknown = True
                raise error
            return result

        return stepping

    def _receiving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def receive(*given: Any, **named: Any) -> Any:
            if self.leased is not None:  # one delivery
                return []
            found = await call(*given, **named)
            if found:
                (self.leased,) = found
                await self.step("received")
            return found

        return receive

    async def _nothing_else(self) -> QueueDepth:
        return QueueDepth(0, 0, None)

    async def go_to_its_step(self) -> None:
        """Returns once it is at its step, or at its end where it has no such step."""
        reached = asyncio.create_task(self.reached.wait())
        ended = asyncio.create_task(self._nothing_left())
        await asyncio.wait({reached, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reached, ended):
            task.cancel()

    async def _nothing_left(self) -> None:
        await asyncio.wait({self.running})

    async def finish(self) -> None:
        self.on.set()
        await asyncio.wait({self.running})

    async def die(self) -> None:
        self.is_dead = True
        self.running.cancel()
        await asyncio.wait({self.running})


async def expire(storage: Storage, worker: Worker) -> None:
    """The lease of a worker ends, as time has it."""
    if worker.leased is not None:
        with contextlib.suppress(errors.LeaseLost):
            await storage.queue.release(worker.leased)


async def interleave(storage: Storage, settings: Any, case: Case) -> set[str]:
    """What is wrong in the end."""
    await storage.queue.send([bundle_of_jobs(COUNT)])
    async with contextlib.AsyncExitStack() as stack:

        async def worker(name: str, *given: Any) -> Worker:
            opened = await stack.enter_async_context(open_storage(storage.settings))
            made = Worker(opened, settings(name=name, lease_seconds=120), *given)
            made.start()
            await made.go_to_its_step()
            return made

        a = await worker("a", case.at_a, case.drain_a, case.is_bad, case.lost)
        await expire(storage, a)
        b = await worker("b", case.at_b, case.drain_b, case.is_bad)
        for name in case.then:
            await {"a": a, "b": b}[name].finish()
        await expire(storage, b)
        for each in (a, b):
            await each.die()
        while (await storage.queue.depth()).messages:
            fresh = await worker("fresh", "", False, case.is_bad)
            await fresh.finish()
            await expire(storage, fresh)
        wrong = await faults(storage, NAMES)
        poison = {record.id for record in await failed_jobs(storage)}
        if case.is_bad and poison != {NAMES[BAD]}:
            wrong.add(f"in poison: {poison}")
        return wrong


@pytest.fixture(autouse=True)
def _soon(monkeypatch) -> None:
    monkeypatch.setattr("worker.pipeline.HAND_BACK_SECONDS", 0.3)


@pytest.mark.parametrize("case", FEW, ids=map(str, range(len(FEW))))
async def test_each_job_of_a_bundle_ends_once_wherever_two_workers_stop(
    storage: Storage, worker_settings: Callable[..., WorkerSettings], case: Case
):
    assert await interleave(storage, worker_settings, case) == set()


@pytest.mark.slow
@pytest.mark.timeout(max(300, 5 * SAMPLE))
async def test_each_job_of_a_bundle_ends_once_in_a_sample_of_all_cases(
    storage: Storage, worker_settings: Callable[..., WorkerSettings]
):
    tried = random.sample(CASES, min(len(CASES), SAMPLE))
    wrong = {}
    for case in tried:
        if found := await interleave(storage, worker_settings, case):
            wrong[case] = found
        async for name in storage.packs.names():
            await storage.packs.delete(name)
        async for name in storage.blobs.names():
            await storage.blobs.delete(name)
        await storage.poison.clear()
    assert wrong == {}
