"""Three queues as one: their order, that none starves, and what polling them costs."""

import logging
import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from pydantic import SecretStr

from browsing import visible
from fleet.keys import mint
from imagefleet import concurrency, errors
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import LeasedMessage, QueueDepth
from imagefleet.storage.routing import route
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.storage.settings import PRIORITIES, Priority, StorageSettings
from unused_queue import UnusedQueue
from worker import pull

LEASE_SECONDS = 30

DAY_SECONDS = 24 * 3600


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class StandInQueue(UnusedQueue):
    """A queue with *jobs* (None: never empty), which counts what it is asked."""

    def __init__(self, name: str, jobs: int | None = 0) -> None:
        self.name = name
        self.jobs = jobs
        self.asked = 0
        self.error: errors.FleetError | None = None

    async def check(self) -> None: ...

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[LeasedMessage]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        count = max_messages if self.jobs is None else min(max_messages, self.jobs)
        if self.jobs is not None:
            self.jobs -= count
        at = datetime.now(UTC)
        return [
            LeasedMessage("m", "{}", 1, at, "r", queue=self.name) for _ in range(count)
        ]

    async def depth(self) -> QueueDepth:
        if self.error is not None:
            raise self.error
        messages = 10**6 if self.jobs is None else self.jobs
        return QueueDepth(messages, None, 1.0 if messages else None)


class StandIns:
    """Three queues behind one, on a clock that stands still."""

    def __init__(
        self, high: int | None = 0, normal: int | None = 0, low: int | None = 0
    ) -> None:
        self.clock = Clock()
        self.high = StandInQueue("jobs-high", high)
        self.normal = StandInQueue("jobs", normal)
        self.low = StandInQueue("jobs-low", low)
        queues = {"high": self.high, "normal": self.normal, "low": self.low}
        self.queue = RoutedQueue(queues, clock=self.clock)

    async def receive(
        self, max_messages: int = 32, above: int | None = None
    ) -> list[str]:
        """The queues of the messages that are received."""
        found = await self.queue.receive(max_messages, LEASE_SECONDS, above)
        return [each.queue for each in found]


# On both storages


@pytest.mark.parametrize("priority", PRIORITIES)
async def test_a_message_is_settled_in_the_queue_that_it_came_from(
    storage: Storage, priority: Priority
):
    name = storage.queues[priority].name
    await storage.queues[priority].send(["a job"])
    (leased,) = await storage.queue.receive(2, LEASE_SECONDS)
    assert (leased.body, leased.queue) == ("a job", name)

    renewed = await storage.queue.renew(leased, LEASE_SECONDS, "rewritten")
    assert renewed.queue == name
    for settle in (
        storage.queue.renew(leased, LEASE_SECONDS),
        storage.queue.delete(leased),
    ):
        with pytest.raises(errors.LeaseLost):
            await settle
    await storage.queue.release(renewed)
    assert (await storage.queues[priority].depth()).messages == 1, (
        "it stays in its queue"
    )

    (again,) = await storage.queue.receive(2, LEASE_SECONDS)
    assert (again.body, again.delivery_count, again.queue) == ("rewritten", 2, name)
    await storage.queue.delete(again)
    assert (await storage.queue.depth()).messages == 0


async def test_queues_are_drained_in_their_order_and_one_receive_takes_from_several(
    storage: Storage,
):
    for priority in reversed(PRIORITIES):
        await storage.queues[priority].send([priority] * 2)
    received = await storage.queue.receive(5, LEASE_SECONDS)
    assert [each.body for each in received] == [
        "high",
        "high",
        "normal",
        "normal",
        "low",
    ]
    assert [each.body for each in await storage.queue.receive(5, LEASE_SECONDS)] == [
        "low"
    ]


async def test_the_depth_is_the_sum_and_has_that_of_each_queue(
    storage: Storage,
):
    await storage.queues["high"].send(["a"])
    await storage.queues["low"].send(["b", "c"])
    depth = await storage.queue.depth()
    name = storage.queue.name
    assert depth.messages == 3
    assert depth.oldest_age_seconds is not None
    own = {each: found.messages for each, found in depth.by_queue.items()}
    assert own == {f"{name}-high": 1, name: 0, f"{name}-low": 2}
    assert list(own) == [f"{name}-high", name, f"{name}-low"]
    assert sorted([each.body async for each in visible(storage.queue)]) == [
        "a",
        "b",
        "c",
    ]


async def test_messages_without_a_priority_are_sent_to_the_queue_of_before(
    storage: Storage, storage_settings: StorageSettings
):
    await storage.queue.send(["a job"])
    assert storage.queue.name == storage.queues["normal"].name == storage_settings.queue
    assert (await storage.queues["normal"].depth()).messages == 1


# Queues and tokens of an earlier version


async def test_a_worker_does_without_queues_that_are_not_there_and_finds_them_later(
    azurite_settings: StorageSettings,
    caplog,
):
    caplog.set_level(logging.INFO, "imagefleet")
    clock = Clock()
    async with open_storage(azurite_settings) as storage:
        storage.queue.clock = clock
        for queue in storage.queue.routes.values():
            queue.clock = clock
        await storage.queues["normal"].create()
        await storage.poison.create()  # type: ignore[attr-defined]
        await storage.blobs.create_container()  # type: ignore[attr-defined]
        await storage.check()
        await storage.queue.send(["a job"])
        assert list((await storage.queue.depth()).by_queue) == [storage.queue.name]
        assert len(await storage.queue.receive(32, LEASE_SECONDS)) == 1
        lines = [each.message for each in caplog.records]
        assert len(lines) == 2, "each is reported once"
        assert f"no jobs are taken from the queue {storage.queue.name}-high" in lines[0]

        with pytest.raises(errors.MissingResourceError, match="-high' does not exist"):
            await storage.queues["high"].send(["urgent"])
        async with open_storage(azurite_settings) as other:
            await other.create()
            await other.queues["high"].send(["urgent"])
        assert await storage.queue.receive(32, LEASE_SECONDS) == [], (
            "not asked again so soon"
        )
        clock.now += route.MISSING_PAUSE_SECONDS
        found = await storage.queue.receive(32, LEASE_SECONDS)
        assert [each.body for each in found] == ["urgent"]


async def test_tokens_for_one_priority_serve_the_queue_that_they_are_for(
    azurite_settings: StorageSettings,
):
    minted = mint.Minter(azurite_settings).mint(ROLES["worker"], timedelta(hours=1))
    old = {
        key: each for key, each in minted.by_place.items() if "_" not in key.resource
    }
    assert len(old) == 5
    sas = SecretStr(mint.Minted("", "", old, minted.expires_at).sas)
    tokens = azurite_settings.model_copy(update={"storage": minted.storage, "sas": sas})
    async with open_storage(azurite_settings) as owner, open_storage(tokens) as worker:
        await owner.create()
        for priority in PRIORITIES:
            await owner.queues[priority].send([priority])
        await worker.queue.check()
        (message,) = await worker.queue.receive(32, LEASE_SECONDS)
        assert message.body == "normal"
        await worker.queue.delete(message)
        assert (await worker.queue.depth()).messages == 0
        before = worker.operations.queue
        assert await worker.queue.receive(32, LEASE_SECONDS) == []
        assert worker.operations.queue == before + 1, "what has no token costs nothing"


async def test_the_main_queue_must_exist(azurite_settings: StorageSettings):
    async with open_storage(azurite_settings) as storage:
        name = azurite_settings.queue
        for call in (
            storage.queue.check(),
            storage.queue.receive(1, LEASE_SECONDS),
            storage.queue.depth(),
            anext(visible(storage.queue)),
        ):
            with pytest.raises(errors.SetupError, match=f"'{name}' does not exist"):
                await call


# None starves


@pytest.mark.parametrize(
    ("never_empty", "shares"),
    [
        (("high", "normal", "low"), {"jobs-high": 140, "jobs": 10, "jobs-low": 10}),
        (("high", "low"), {"jobs-high": 140, "jobs-low": 20}),
        (("normal", "low"), {"jobs": 140, "jobs-low": 20}),
        (("high", "normal"), {"jobs-high": 140, "jobs": 20}),
        (("low",), {"jobs-low": 160}),
    ],
)
async def test_no_queue_starves_below_others_that_are_never_empty(
    never_empty: tuple[Priority, ...], shares: dict[str, int]
):
    fleet = StandIns(**dict.fromkeys(never_empty))
    received: Counter[str] = Counter()
    for _ in range(160):
        fleet.clock.now += 2.0
        received.update(set(await fleet.receive()))
    assert received == shares


# What polling costs


async def idle_receives_a_day(fleet: StandIns) -> dict[str, int]:
    """The receives that a worker without jobs makes, with the pauses of the puller."""
    ends_at = fleet.clock.now + DAY_SECONDS
    polls = 0
    while fleet.clock.now < ends_at:
        assert await fleet.receive() == []
        fleet.clock.now += concurrency.backoff(
            polls, pull.FIRST_PAUSE_SECONDS, pull.LONGEST_PAUSE_SECONDS
        )
        polls += 1
    return {each.name: each.asked for each in (fleet.high, fleet.normal, fleet.low)}


async def test_an_idle_worker_asks_the_other_queues_half_as_often():
    asked = await idle_receives_a_day(StandIns())
    assert asked["jobs"] == pytest.approx(11_520, rel=0.05)
    assert asked["jobs-high"] == asked["jobs-low"]
    assert asked["jobs-high"] <= 6_500
    assert sum(asked.values()) == pytest.approx(23_000, rel=0.1), "as the comment says"


async def test_an_idle_worker_finds_a_job_in_the_stated_time():
    for priority, seconds in (("high", 20.0), ("normal", 10.0), ("low", 20.0)):
        fleet = StandIns()
        for _ in range(40):
            assert await fleet.receive() == []
            fleet.clock.now += pull.LONGEST_PAUSE_SECONDS
        getattr(fleet, priority).jobs = 1
        sent_at = fleet.clock.now
        while not await fleet.receive():
            fleet.clock.now += pull.LONGEST_PAUSE_SECONDS
        assert fleet.clock.now - sent_at <= seconds


async def test_an_idle_worker_asks_for_missing_queues_once_a_minute():
    fleet = StandIns()
    fleet.high.error = fleet.low.error = errors.MissingResourceError()
    asked = await idle_receives_a_day(fleet)
    assert asked["jobs-high"] + asked["jobs-low"] <= 2 * 24 * 60


async def test_a_job_of_high_priority_is_found_within_two_seconds_while_others_are_done():
    fleet = StandIns(normal=None)
    for _ in range(50):
        await fleet.receive()
        fleet.clock.now += 0.2
    assert fleet.high.asked < 10, "not at every receive"
    fleet.high.jobs = 1
    for _ in range(11):
        if "jobs-high" in await fleet.receive():
            break
        fleet.clock.now += 0.2
    assert fleet.high.jobs == 0


async def test_after_an_idle_time_the_pauses_are_short_again():
    fleet = StandIns()
    for _ in range(20):
        await fleet.receive()
        fleet.clock.now += 5.0
    fleet.normal.jobs = None
    await fleet.receive()
    fleet.high.jobs = 1
    fleet.clock.now += route.LONGEST_PAUSE_SECONDS
    assert "jobs-high" in await fleet.receive()


async def test_jobs_that_the_depth_shows_are_received_at_once():
    """With --until-empty a worker asks for the depth before it ends, and must not wait then."""
    fleet = StandIns()
    for _ in range(20):
        await fleet.receive()
        fleet.clock.now += 5.0
    await fleet.receive()
    fleet.low.jobs = 1
    assert await fleet.receive() == []
    await fleet.queue.depth()
    assert await fleet.receive() == ["jobs-low"]


# Faults


async def test_a_queue_that_does_not_answer_holds_up_no_other(
    caplog,
):
    fleet = StandIns(normal=1)
    fleet.high.error = errors.TransientError("503 server busy")
    assert await fleet.receive() == ["jobs"]
    for _ in range(5):
        fleet.clock.now += 10.0
        assert await fleet.receive() == []
    assert fleet.high.asked == 1, "its retries take seconds each time"
    (record,) = caplog.records
    assert "no jobs are taken from the queue jobs-high: 503" in record.getMessage()


async def test_an_outage_is_no_empty_queue():
    fleet = StandIns()
    fleet.low.error = errors.TransientError("503 server busy")
    with pytest.raises(errors.TransientError, match="503 server busy"):
        await fleet.receive()


async def test_after_an_outage_of_all_queues_none_waits_for_long():
    fleet = StandIns()
    every = (fleet.high, fleet.normal, fleet.low)
    for queue in every:
        queue.error = errors.TransientError("503 server busy")
    for _ in range(10):
        with pytest.raises(errors.TransientError):
            await fleet.receive()
        fleet.clock.now += 20.0
    for queue in every:
        queue.error = None
    fleet.high.jobs = 1
    assert await fleet.receive() == ["jobs-high"]


async def test_messages_leased_before_a_fault_are_returned():
    fleet = StandIns(high=1)
    for error in (errors.TransientError("503"), errors.SetupError("gone")):
        fleet.high.jobs = 1
        fleet.normal.error = error
        fleet.clock.now += 10.0
        assert await fleet.receive() == ["jobs-high"]


async def test_a_refused_token_of_one_queue_is_a_warning_and_not_the_end(
    caplog,
):
    fleet = StandIns(normal=2)
    fleet.high.error = errors.SetupError(
        "the SAS token of the queue 'jobs-high' expired"
    )
    for _ in range(2):
        assert await fleet.receive(1) == ["jobs"]
        fleet.clock.now += route.MISSING_PAUSE_SECONDS
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "jobs-high: the SAS token" in record.getMessage()


def test_the_names_fit_into_azures_limit():
    settings = StorageSettings(queue="q" * 56)
    assert list(settings.queues_of(None)) == list(get_args(Priority))
    assert (
        max(map(len, (*settings.queues_of(None).values(), settings.poison_queue))) == 63
    )


async def test_a_worker_that_has_enough_asks_the_queues_above_alone_and_seldom():
    queues = StandIns(normal=None, low=None)
    assert await queues.receive(above=0) == []
    assert queues.queue.seconds_until_due(0) == math.inf
    assert await queues.receive(above=1) == []
    assert (queues.high.asked, queues.normal.asked, queues.low.asked) == (1, 0, 0)
    seconds = queues.queue.seconds_until_due(1)
    assert seconds > 0
    assert await queues.receive(above=1) == []
    assert queues.high.asked == 1, "it is not due"
    queues.high.jobs = 1
    queues.clock.now += seconds
    assert queues.queue.seconds_until_due(1) == 0
    assert await queues.receive(above=1) == ["jobs-high"]
    assert set(await queues.receive(above=2)) == {"jobs"}
    assert queues.low.asked == 0


async def test_a_queue_that_is_not_there_is_missing_also_for_who_asks_it_alone():
    queues = StandIns(normal=None)
    queues.high.error = errors.MissingResourceError("there is no queue jobs-high")
    assert await queues.receive(above=1) == []
    assert queues.queue.seconds_until_due(1) >= route.MISSING_PAUSE_SECONDS
