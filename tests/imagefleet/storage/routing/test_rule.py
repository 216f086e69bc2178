"""Who takes from which shard: none starves, idle workers cost little, and new jobs are found."""

import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefleet import errors
from imagefleet.storage.protocol import (
    LeasedMessage,
    QueueDepth,
    Shards,
)
from imagefleet.storage.routing import route
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.storage.routing.route import Route
from imagefleet.storage.settings import MAX_SHARDS, PRIORITIES, Priority, job_queue
from unused_queue import UnusedQueue
from worker import metrics, pull
from worker.settings import share_of

LEASE_SECONDS = 30
#: Of a day, in which nothing changes.
PART = 1 / 8
PART_SECONDS = 24 * 3600 * PART

#: Of Azure's queues: 200,000 for a cent.
DOLLARS_PER_OPERATION = 0.01 / 200_000

#: How many workers the tests and the documents state the cost of.
WORKERS = 750


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class StandInShard(UnusedQueue):
    """A shard with *jobs*, which counts what it is asked; *trickle*: jobs before each receive."""

    def __init__(self, name: str, shards: Shards) -> None:
        self.name = name
        self.shards = shards
        self.jobs = self.asked = self.trickle = 0
        self.error: errors.FleetError | None = None

    async def check(self) -> None: ...

    async def create(self) -> bool:
        return True

    async def read_shards(self) -> Shards:
        return self.shards

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[LeasedMessage]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.jobs += self.trickle
        count = min(max_messages, self.jobs)
        self.jobs -= count
        at = datetime.now(UTC)
        return [
            LeasedMessage("m", "{}", 1, at, "r", queue=self.name) for _ in range(count)
        ]

    async def depth(self) -> QueueDepth:
        return QueueDepth(self.jobs, None, 1.0 if self.jobs else None)


class StandIns:
    """The shards of queues of one storage, and workers on one clock."""

    def __init__(self, shards: int, made: int | None = None) -> None:
        self.clock = Clock()
        self.shards = Shards(shards, made or shards)
        self.stored: dict[str, StandInShard] = {}

    def shard(
        self, number: int, priority: str = "normal", model: str | None = None
    ) -> StandInShard:
        name = job_queue("jobs", model, priority, number)
        return self.stored.setdefault(name, StandInShard(name, self.shards))

    def route(
        self, share: float, priority: Priority = "normal", model: str | None = None
    ) -> Route:
        route = Route(
            lambda number: self.shard(number, priority, model),
            level=PRIORITIES.index(priority),
            model=model,
            clock=self.clock,
        )
        route.stand_at(share)
        return route

    def queue(self, share: float) -> RoutedQueue:
        return RoutedQueue([self.route(share)])

    def worker(self, share: float) -> RoutedQueue:
        """As a worker of one model has them: jobs may name it, or none."""
        own, named = (
            [self.route(share, each, model) for each in PRIORITIES]
            for model in (None, "a")
        )
        queue = RoutedQueue(own, main=own[1])
        queue.add([RoutedQueue(named)])
        return queue

    async def idle_receives(
        self, queue: RoutedQueue, seconds: float = PART_SECONDS
    ) -> int:
        """The receives of an idle worker in that time, paused as the worker's puller does."""
        before = sum(each.asked for each in self.stored.values())
        ends_at = self.clock.now + seconds
        while self.clock.now < ends_at:
            assert await queue.receive(32, LEASE_SECONDS) == []
            self.clock.now += (
                0.75 * pull.LONGEST_PAUSE_SECONDS
            )  # by its jitter, on average
        return sum(each.asked for each in self.stored.values()) - before


shares = st.floats(0, 1)
some_shards = st.integers(1, MAX_SHARDS).flatmap(
    lambda made: st.builds(Shards, st.integers(1, made), st.just(made))
)


@given(shares, some_shards)
def test_a_worker_asks_every_shard_and_its_home_is_one_that_jobs_are_sent_to(
    share: float, shards: Shards
) -> None:
    order = route.in_order(share, shards)
    assert sorted(order) == list(range(shards.made))
    assert order[0] < shards.used
    assert order == route.in_order(share, shards), "a worker's restart changes nothing"


def test_homes_and_helpers_are_spread() -> None:
    orders = [
        route.in_order(share_of(f"worker-{n}"), Shards(8, 8)) for n in range(WORKERS)
    ]
    for place in (0, 1):
        count = Counter(order[place] for order in orders)
        assert len(count) == 8
        assert max(count.values()) < 1.4 * WORKERS / 8
    processes = [
        route.in_order(share_of("host", n, 8), Shards(8, 8))[0] for n in range(8)
    ]
    assert sorted(processes) == list(range(8)), "those of one machine have a home each"


@given(
    st.lists(st.text(max_size=3), max_size=200), st.integers(1, 32), st.integers(0, 31)
)
def test_messages_are_dealt_evenly_and_none_is_lost(
    bodies: list[str], shards: int, first: int
) -> None:
    dealt = route.spread(bodies, shards, first % shards)
    assert sorted(body for some in dealt.values() for body in some) == sorted(bodies)
    sizes = [len(dealt.get(number, [])) for number in range(shards)]
    assert max(sizes) - min(sizes) <= 1


async def test_a_shard_that_is_nobodys_home_is_emptied_although_the_home_never_is() -> (
    None
):
    fleet = StandIns(2)
    queue = fleet.queue(0.0)
    fleet.shard(0).trickle = 32
    fleet.shard(1).jobs = 100
    receives = 0
    while fleet.shard(1).jobs:
        assert len(await queue.receive(32, LEASE_SECONDS)) == 32
        receives += 1
        assert receives <= 4 * route.FAIR_EVERY + 1


async def test_a_shard_that_no_jobs_are_sent_to_any_more_is_emptied() -> None:
    fleet = StandIns(2, made=4)
    fleet.shard(0).trickle = fleet.shard(1).trickle = 32
    fleet.shard(2).jobs = fleet.shard(3).jobs = 64
    workers = [fleet.queue(share) for share in (0.1, 0.9)]
    for _ in range(6 * route.FAIR_EVERY):
        for queue in workers:
            await queue.receive(32, LEASE_SECONDS)
    assert fleet.shard(2).jobs == fleet.shard(3).jobs == 0


async def test_a_full_home_costs_one_receive_a_page_and_a_look_elsewhere_now_and_then() -> (
    None
):
    fleet = StandIns(8)
    queue = fleet.queue(0.0)
    fleet.shard(0).trickle = 32
    for _ in range(800):
        await queue.receive(32, LEASE_SECONDS)
        fleet.clock.now += 2.0
    asked = [fleet.shard(number).asked for number in range(8)]
    assert asked[0] == 800
    assert sum(asked[1:]) <= 800 / route.FAIR_EVERY + 7


async def test_who_helps_finds_his_homes_new_jobs_within_two_seconds() -> None:
    fleet = StandIns(4)
    queue = fleet.queue(0.0)
    fleet.shard(2).trickle = 8
    for _ in range(100):
        assert await queue.receive(8, LEASE_SECONDS)
        fleet.clock.now += 0.1
    fleet.shard(0).jobs = 8
    fleet.clock.now += route.LONGEST_HOME_PAUSE_SECONDS
    for _ in range(
        2
    ):  # the second, where this receive was one that looks elsewhere first
        await queue.receive(8, LEASE_SECONDS)
    assert fleet.shard(0).jobs == 0


@pytest.mark.parametrize(
    ("shards", "seconds"), [(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0), (32, 130.0)]
)
async def test_an_idle_worker_finds_a_job_in_the_stated_time_wherever_it_is(
    shards: int, seconds: float
) -> None:
    fleet = StandIns(shards)
    queue = fleet.worker(0.0)
    for number in range(shards):
        await fleet.idle_receives(queue, 300.0)
        fleet.shard(number).jobs = 1
        sent_at = fleet.clock.now
        while not await queue.receive(32, LEASE_SECONDS):
            fleet.clock.now += pull.LONGEST_PAUSE_SECONDS
        assert fleet.clock.now - sent_at <= (10.0 if number == 0 else seconds)


async def test_jobs_sent_to_idle_workers_are_looked_for_in_all_shards_at_once() -> None:
    fleet = StandIns(8)
    queue = fleet.worker(0.0)
    await fleet.idle_receives(queue, 300.0)
    for number in range(8):
        fleet.shard(number).jobs = 4
    taken = 0
    for _ in range(2):
        taken += len(await queue.receive(32, LEASE_SECONDS))
    assert taken == 32


async def test_idle_workers_cost_what_the_page_says() -> None:
    text = (Path(__file__).parents[4] / "docs" / "storage.md").read_text(
        encoding="utf-8"
    )
    rows = re.findall(
        r"^\| (\d+) \| ([\d,]+) \| (\d+) million \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16]
    for shards, stated, millions, dollars in rows:
        fleet = StandIns(int(shards))
        worker = fleet.worker(0.3)
        asked = await fleet.idle_receives(worker) / PART
        sizes = (
            len(fleet.stored) + 1
        )  # the poison queue's as well; an empty one is one request
        looks = 24 * 3600 / worker.look_seconds(metrics.DEPTH_SECONDS)
        operations = asked + sizes * looks
        assert operations == pytest.approx(int(stated.replace(",", "")), rel=0.03)
        assert WORKERS * operations / 1e6 == pytest.approx(int(millions), rel=0.03)
        assert WORKERS * operations * DOLLARS_PER_OPERATION == pytest.approx(
            float(dollars), rel=0.03
        )


async def test_a_shard_that_does_not_answer_holds_up_no_other_and_is_asked_later() -> (
    None
):
    fleet = StandIns(3)
    queue = fleet.queue(0.5)
    fleet.shard(1).error = errors.TransientError("down")
    fleet.shard(2).jobs = 1
    assert len(await queue.receive(32, LEASE_SECONDS)) == 1
    fleet.clock.now += route.LONGEST_HOME_PAUSE_SECONDS
    with pytest.raises(errors.TransientError):  # an outage is no empty queue
        await queue.receive(32, LEASE_SECONDS)
    fleet.shard(1).error = None
    fleet.shard(1).jobs = 1
    assert len(await queue.receive(32, LEASE_SECONDS)) == 1, (
        "the home is asked each time"
    )


async def test_jobs_that_a_look_at_the_sizes_shows_are_received_at_once() -> None:
    fleet = StandIns(8)
    queue = fleet.worker(0.0)
    await fleet.idle_receives(queue, 300.0)
    fleet.shard(5).jobs = 1
    await queue.depth()
    assert len(await queue.receive(32, LEASE_SECONDS)) == 1


async def test_sizes_are_looked_at_less_often_with_more_shards() -> None:
    for shards, seconds in ((1, 60), (3, 180), (8, 300), (32, 300)):
        queue = StandIns(shards).queue(0.0)
        await queue.depth()
        assert queue.look_seconds(60) == seconds
