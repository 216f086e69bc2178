"""The simulated fleet: whether what it counts could be wrong, and whether its limits limit."""

import asyncio
import dataclasses
import time
from datetime import UTC, datetime

import pytest
from azure.core import exceptions

from fleet.plan import estimate
from fleet.plan.estimate import Input, Part
from fleet.plan.work import ModelJobs
from imagefleet.pricing import families
from imagefleet.records.log import Totals, shard_part
from imagefleet.storage.protocol import Clock
from imagefleet.storage.routing.route import Route
from simulation import (
    account,
    clock,
    fleet,
    measure,
    nodes,
    reference,
)
from simulation.fleet import Fleet, Scenario, stand_ins
from simulation.nodes import Card, Weather
from worker.settle import InFlightJob

pytestmark = pytest.mark.slow

#: Faster than any card, so that a minute has thousands of images.
CARD = Card("fast", 8.0, 1.0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch) -> None:
    """All replicas begin soon: these runs are short."""
    monkeypatch.setattr(fleet, "SPREAD_SECONDS", 10.0)


def test_simulated_hours_take_no_time_and_end_where_nothing_can_happen():
    with clock.simulated_time() as loop:
        real = time.monotonic
        clock.run(loop, asyncio.sleep(36_000))
        assert loop.time() == time.monotonic() == 36_000
        with pytest.raises(clock.StuckError, match="every task waits"):
            clock.run(loop, asyncio.Event().wait())
    assert time.monotonic is not real


def test_the_workers_classes_read_simulated_time_and_real_time_afterwards():
    with clock.simulated_time() as loop:
        loop.now = 7.0
        assert InFlightJob(lease=None).pulled_at == 7.0  # type: ignore[arg-type]
        assert Route(None).clock() == 7.0  # type: ignore[arg-type]
        assert Clock().now() == datetime(2026, 1, 1, 0, 0, 7, tzinfo=UTC)
    assert InFlightJob(lease=None).pulled_at > 7.0  # type: ignore[arg-type]
    assert Route(None).clock is time.monotonic  # type: ignore[arg-type]
    assert Clock().machine is time.time


def test_nodes_that_vanish_and_nodes_that_draw_black_lose_no_job_and_show_none_twice():
    # Every node is interrupted after three minutes, and a quarter of them are broken.
    weather = Weather(interruptions=1_800, broken_share=0.25)
    found = measure.measure(Scenario(6, [CARD], weather, jobs=700, seed=2), 0, 40_000)

    assert (found.images, found.lost, found.visible_duplicates) == (700, 0, 0)
    assert found.interruptions >= 2
    assert found.given_up >= 1
    assert found.redeliveries > found.interruptions


def test_a_run_depends_on_its_seed_alone():
    def run(seed: int) -> measure.Figures:
        return measure.measure(Scenario(2, [CARD], seed=seed), 44, 8)

    assert run(1) == run(1)
    assert run(1) != run(3)


def test_what_is_missing_is_told_apart_and_adds_up():
    slow = dataclasses.replace(CARD, images_per_second=1.0)
    plan = Scenario(6, [slow], Weather(600, 0.0, 0.3), seed=3)
    found = measure.measure(plan, 100, 600)
    assert found.interruptions > 0
    assert found.missing["away"] > 0.05
    assert found.missing["starting"] > 0.005
    assert found.missing["slots_empty"] >= 0
    assert found.share_of_possible + sum(found.missing.values()) == pytest.approx(1)


def test_paid_time_at_full_speed_falls_with_interruptions_and_is_what_a_plan_says():
    day = 24 * 3600.0
    found = nodes.warm_up(Weather(), 3000, day, seed=0)
    work = ModelJobs(None, families.SD1, 1, round(day), 1.0)
    planned = estimate.make_plan(
        [work], [Part("a card", 1, *[Input(1, "given", "")] * 3)]
    )
    for case, (starting, cold, lost) in planned.cold.items():
        assert found[case]["starting"] == pytest.approx(starting, rel=0.05)
        assert 1 - found[case]["full_speed"] == pytest.approx(cold, rel=0.05)
        assert 1 - found[case]["drawn"] == pytest.approx(lost, rel=0.05)
        assert (
            found[case]["full_speed"]
            <= found[case]["drawn"]
            <= 1 - found[case]["starting"]
        )
    often = nodes.warm_up(Weather(90.0), 300, day, seed=0)["unlike_jobs"]
    assert often["full_speed"] < 0.8, "nodes last an hour"


def test_a_replica_that_is_away_counts_against_the_fleet_but_costs_nothing():
    slow = dataclasses.replace(CARD, images_per_second=1.0)
    found = measure.measure(Scenario(4, [slow], Weather(3_000, 0, 0), seed=1), 60, 300)
    assert found.share_of_possible < 0.9
    assert found.dollars < 0.9 * 4 * 300 / 3600 * slow.dollars_per_hour


@pytest.mark.parametrize(
    ("share", "of_account", "idle", "expected"),
    [
        (0.99, 0.5, 0.4, measure.QUEUE),
        (0.5, 0.99, 0.4, measure.ACCOUNT),
        (0.5, 0.5, 0.4, measure.LATENCY),
        (0.5, 0.5, 0.001, measure.GPUS),
    ],
)
def test_the_limit_that_is_reached_first_is_named(
    share: float, of_account: float, idle: float, expected: str
):
    assert measure.bottleneck(share, of_account, idle) == expected


def _leased(store: account.Account) -> account.Stored:
    store.queue("jobs").source = account.jobs("j", 1)
    (message,) = store.queue("jobs").receive(32, 30, 0.0)
    return message


def test_a_job_deleted_without_its_image_is_counted_as_lost():
    store = account.Account(lambda: 0.0)
    message = _leased(store)
    store.deleted(
        store.queue("jobs").delete(message.id, str(message.receipt)), "images"
    )
    assert store.lost == ["j0"]


def test_only_the_newest_receipt_counts_and_a_lease_that_ended_is_delivered_again():
    store = account.Account(lambda: 0.0)
    queue = store.queue("jobs")
    message = _leased(store)
    old = str(message.receipt)
    assert queue.receive(32, 30, 29.9) == []
    assert queue.receive(32, 30, 30.1) == [message]
    assert (message.deliveries, store.redeliveries) == (2, 1)
    with pytest.raises(exceptions.HttpResponseError, match="PopReceiptMismatch"):
        queue.delete(message.id, old)


def test_an_image_that_is_overwritten_or_recorded_twice_is_a_visible_duplicate():
    store = account.Account(lambda: 0.0)
    for _ in range(2):
        store.put("images", "simulation/j0.png", 9, overwrite=True)
    with pytest.raises(exceptions.HttpResponseError, match="BlobAlreadyExists"):
        store.put("images", "simulation/j0.png", 9)
    lines = [b'{"blob": "simulation/j0.png"}\n'] * 3
    data = bytearray(shard_part(lines, Totals(3, 3)))
    store.container("images")["-records/simulation/x.images.jsonl.gz"] = account.Blob(
        9, data
    )

    assert (store.images, store.overwritten, store.recorded_twice("images")) == (
        1,
        1,
        2,
    )


def test_requests_over_a_limit_are_refused_until_time_has_passed():
    limit = account.Limit(10)
    assert [limit.take(0.0) for _ in range(12)].count(True) == 10
    assert [limit.take(0.5) for _ in range(12)].count(True) == 5
    assert limit.refused == 9


def test_the_public_run_comes_out_as_published_from_its_seconds_per_job(
    monkeypatch,
):
    monkeypatch.setattr(reference, "DAYS", 1)
    monkeypatch.setattr(reference, "_CALIBRATED_ON", 4_000)
    replayed = reference.replay(0, hours=0.5)
    assert 48 * replayed.images == pytest.approx(reference.PUBLISHED_IMAGES, rel=0.05)
    assert 48 * replayed.dollars == pytest.approx(reference.PUBLISHED_DOLLARS, rel=0.05)

    monkeypatch.setattr(reference, "SECONDS_PER_JOB", 14.0)
    slower = reference.replay(0, hours=0.5)
    assert slower.images == pytest.approx(replayed.images / 2, rel=0.02)


def test_a_replica_that_ends_by_a_defect_ends_the_simulation(
    monkeypatch,
):
    def broken(*_: object) -> nodes.Node:
        raise ZeroDivisionError

    monkeypatch.setattr(Weather, "node", broken)
    with clock.simulated_time() as loop, stand_ins():
        replicas = Fleet(Scenario(1, [CARD]), loop)

        async def run() -> None:
            replicas.start()
            await asyncio.sleep(20)
            replicas.check()

        with pytest.raises(ZeroDivisionError):
            clock.run(loop, run())
