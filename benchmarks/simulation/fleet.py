"""Replicas that run `worker.pipeline.Pipeline` on nodes that come and go, in simulated time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from imagefleet import concurrency, errors
from imagefleet.pricing import prices
from imagefleet.storage.azure import account as azure_account
from imagefleet.storage.azure.storage import AzureStorage
from simulation import account, engine
from simulation.clients import Address
from simulation.clock import SimulatedLoop
from simulation.nodes import (
    START_UP_SECONDS,
    Card,
    Node,
    Weather,
    seconds_until_replaced,
)
from worker import pipeline
from worker.metrics import WorkerMetrics
from worker.pipeline import Machine, Pipeline
from worker.replica import Replica
from worker.settings import WorkerSettings
from worker.stages import encode

#: More than any run.
_YEAR_SECONDS = 365 * 86_400.0

_QUEUE = "jobs"

_CONNECTION = "AccountName=simulated;AccountKey=c2ltdWxhdGVk"

#: The first nodes are replaced at once where they are broken: the fleet has been up for long.
_FIRST_REPLACED_SECONDS = 15.0

#: Replicas begin within these seconds, longer than a slow card's slots take for their images:
#: their images come together, which must not be at the same time on all nodes.
SPREAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated fleet: its cards, jobs, queues and interruptions."""

    replicas: int
    cards: Sequence[Card]
    weather: Weather = field(default_factory=Weather)
    #: Number of jobs of the campaign; None for endless ones.
    jobs: int | None = None
    seed: int = 0
    queue_limit: float = account.QUEUE_OPERATIONS_PER_SECOND
    account_limit: float = account.ACCOUNT_REQUESTS_PER_SECOND


@dataclass(slots=True)
class Missing:
    """Images that were not drawn, or not stored, by why."""

    #: The place waits for another node.
    away: float = 0.0
    #: The node is billed, but its engine has no image yet.
    starting: float = 0.0
    #: The engine has nothing to draw.
    waiting: float = 0.0
    #: The engine draws with some of its slots.
    slots_empty: float = 0.0
    #: Black images.
    broken: float = 0.0


@dataclass(slots=True)
class Place:
    """One of the replicas that were asked for: the node that it has, or had last."""

    node: Node | None = None
    pipeline: Pipeline | None = None
    engine: engine.SimulatedEngine | None = None
    #: Busy seconds of its earlier nodes' engines.
    busy_seconds: float = 0.0
    #: Images drawn by its earlier nodes' engines.
    images_drawn: float = 0.0
    dollars: float = 0.0
    up_seconds: float = 0.0
    #: Time at which the present node was first billed.
    began_at: float | None = None
    #: Images that its nodes draw at full speed; between two nodes the last one counts.
    possible_images: float = 0.0
    missing: Missing = field(default_factory=Missing)
    counted_at: float = 0.0
    _busy_counted: float = 0.0
    _drawn_counted: float = 0.0

    def count(self, now: float) -> None:
        """Adds what has passed since the last call."""
        seconds, self.counted_at = now - self.counted_at, now
        node, missing = self.node, self.missing
        if node is None:
            return
        self.possible_images += seconds * node.images_per_second
        if self.began_at is None:
            missing.away += seconds * node.images_per_second
            return
        self.dollars += seconds * node.card.dollars_per_hour / 3600
        first_at = self.pipeline.engine_thread.clock.first_at if self.pipeline else None
        up_seconds = 0.0 if first_at is None else min(seconds, now - first_at)
        busy, drawn = self.busy, self.drawn
        busy_seconds, images = busy - self._busy_counted, drawn - self._drawn_counted
        self.up_seconds += up_seconds
        self._busy_counted, self._drawn_counted = busy, drawn
        missing.starting += (seconds - up_seconds) * node.images_per_second
        missing.waiting += (up_seconds - busy_seconds) * node.images_per_second
        missing.slots_empty += busy_seconds * node.images_per_second - images
        missing.broken += images * node.is_broken

    def leave(self, now: float) -> None:
        """Its node is gone, and is billed no more."""
        self.count(now)
        self.busy_seconds, self.images_drawn = self.busy, self.drawn
        self.pipeline = self.engine = self.began_at = None

    @property
    def busy(self) -> float:
        """Seconds of its engines so far."""
        if self.pipeline is None:
            return self.busy_seconds
        return (
            self.busy_seconds
            + self.pipeline.engine_thread.clock.busy_seconds
            + self._tick_seconds
        )

    @property
    def drawn(self) -> float:
        """Images of its engines so far, with the shares of those that are not done."""
        if self.engine is None:
            return self.images_drawn
        in_tick = self._tick_seconds * self.engine.images_per_second
        return self.images_drawn + self.engine.images_drawn + in_tick

    @property
    def _tick_seconds(self) -> float:
        """Seconds of the present tick so far."""
        began_at = self.pipeline.engine_thread.tick_began_at if self.pipeline else None
        return 0.0 if began_at is None else time.monotonic() - began_at


@dataclass(slots=True)
class Fleet:
    """The replicas, and the storage account that they share."""

    plan: Scenario
    loop: SimulatedLoop
    account: account.Account = field(init=False)
    places: list[Place] = field(default_factory=list, init=False)
    interruptions: int = field(default=0, init=False)
    #: Nodes that their own worker found to be broken.
    given_up: int = field(default=0, init=False)
    _settings: WorkerSettings = field(init=False)
    _metrics: WorkerMetrics = field(init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.account = account.Account(
            self.loop.time, plan.queue_limit, plan.account_limit
        )
        self.account.queue(_QUEUE).source = account.jobs("s0-", plan.jobs)
        self._settings = WorkerSettings(
            storage=_CONNECTION,
            queue=_QUEUE,
            model=Path("simulated"),
            cache=Path("simulated-cache"),
        )
        # One for all: what they count is not read here.
        self._metrics = WorkerMetrics()

    def start(self) -> None:
        dice = random.Random(self.plan.seed)
        for number in range(self.plan.replicas):
            place = Place()
            self.places.append(place)
            work = self._hold(number, place, random.Random(dice.random()))
            self._tasks.append(asyncio.create_task(work, name=f"replica {number}"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what ended a replica: none may end."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"the {task.get_name()} ended, which it must not")

    def count(self) -> None:
        for place in self.places:
            place.count(self.loop.time())

    async def _hold(self, number: int, place: Place, dice: random.Random) -> None:
        """Keeps one place filled."""
        await asyncio.sleep(dice.uniform(0, SPREAD_SECONDS))
        is_first = True
        generation = 0
        while True:
            node = self.plan.weather.node(self.plan.cards, dice)
            place.count(self.loop.time())
            place.node, place.began_at = node, self.loop.time()
            generation += 1
            was_good = await self._rent(place, node, f"w{number}-{generation}", dice)
            if is_first and not was_good:
                await asyncio.sleep(_FIRST_REPLACED_SECONDS)
            else:
                await asyncio.sleep(seconds_until_replaced(dice))
            is_first = is_first and not was_good

    async def _rent(
        self, place: Place, node: Node, name: str, dice: random.Random
    ) -> bool:
        """Works until the node is interrupted; False: its worker found it to be broken."""
        settings = self._settings.model_copy(update={"name": name})
        address = Address(self.account, node.line)
        with mock.patch.object(azure_account, "read_address", return_value=address):
            storage = AzureStorage(settings, concurrency.DEFAULT)
        table = prices.BUILT_IN.storage
        drawing = engine.SimulatedEngine(
            node.images_per_second, is_broken=node.is_broken
        )
        place.engine = drawing
        worker = place.pipeline = Pipeline(
            storage,
            lambda: drawing,
            settings,
            machine=Machine(Replica(node.card.name, node.card.dollars_per_hour, table)),
            metrics=self._metrics,
        )
        await asyncio.sleep(START_UP_SECONDS)
        working = asyncio.create_task(worker.run(asyncio.Event(), asyncio.Event()))
        try:
            seconds = self.plan.weather.seconds_until_interrupted(dice)
            await asyncio.wait({working}, timeout=min(seconds, _YEAR_SECONDS))
            if working.done():
                working.result()
                raise RuntimeError(f"the worker {name} ended, which it must not")
        except errors.NodeError:
            self.given_up += 1
            return False
        else:
            self.interruptions += 1
            return True
        finally:
            # Nobody is warned: what it does from now on reaches nobody.
            node.line.is_cut = True
            place.leave(self.loop.time())
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Context manager: replaces everything that needs a GPU or a thread."""
    logging.disable(logging.ERROR)
    try:
        with (
            mock.patch.object(pipeline, "EngineThread", engine.SimulatedEngineThread),
            mock.patch.object(encode, "encode", engine.encode),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)
