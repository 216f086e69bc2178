"""`imagefleet scale` with a queue, a fake SaladCloud and a fake clock."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

import forks
from cli import console
from fleet.monitor import prometheus
from fleet.salad import client, deployment
from fleet.scale import scaler
from fleet.scale.decision import Goal
from imagefleet import concurrency, errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import logs
from in_process import Imagefleet, assert_refused, told

GOAL = Goal(max_dollars=1000, max_replicas=750, dollars_per_hour=1000)


class Metrics:
    """A Prometheus that answers every query with one number, or not at all."""

    value: float | None = 2.0

    async def at(self, query: str, moment: datetime) -> list[prometheus.Series]:
        if self.value is None:
            raise errors.TransientError("no answer")
        return [prometheus.Series(metric={}, value=(0, self.value))]


async def test_a_measured_speed_replaces_the_assumed_one_and_stays():
    metrics: Any = Metrics()
    speeds = scaler.Speeds(last=scaler.Speed(1.0, "assumed"), server=metrics)

    metrics.value = 0.0  # no worker runs yet
    assert (await speeds.find()).source == "assumed"
    metrics.value = 2.0
    assert await speeds.find() == scaler.Speed(2.0, "measured by the metrics")
    metrics.value = None
    assert (await speeds.find()).jobs_per_second == 2.0


async def test_an_unknown_speed_is_an_error():
    with pytest.raises(errors.SetupError, match="--images-per-second"):
        await scaler.Speeds().find()


class Clock:
    """A clock that the test advances."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def scaling(salad, salad_module, tmp_path, monkeypatch) -> Any:
    """Two groups without replicas, 100 jobs of low priority, and a factory of scalers."""
    import aiohttp

    clock = Clock()
    settings = StorageSettings(storage=f"local:{tmp_path}/storage")
    async with open_storage(settings) as storage, aiohttp.ClientSession() as session:
        await storage.create()
        await storage.queues["low"].send([str(number) for number in range(100)])
        # Hours of samples take seconds here; the rate limit has its own test.
        monkeypatch.setattr(client, "CALL_BURST", 100_000)
        api = client.SaladClient(
            session, salad.url, salad_module.KEY, "acme", "default"
        )
        fleet = deployment.Deployment(api, "sd15-batch")
        for number in (1, 2):
            salad.groups[f"sd15-batch-0123abcd-{number}"] = salad_module.Group(
                {
                    "name": f"sd15-batch-0123abcd-{number}",
                    "replicas": 0,
                    "restart_policy": "always",
                    "container": {
                        "image": "x",
                        "priority": "batch",
                        "resources": {
                            "gpu_classes": ["cb6c1931-89b6-4f76-976f-54047320ccc6"],
                            "cpu": 4,
                            "memory": 8192,
                        },
                    },
                }
            )

        def make(goal: Goal, **more: Any) -> scaler.Scaler:
            return scaler.Scaler(
                goal,
                fleet,
                storage,
                tmp_path / "ledger.json",
                scaler.Speeds(given=scaler.Speed(0.01, "given")),
                **{"clock": clock, "wall_clock": clock, **more},
            )

        yield make, clock, storage


async def test_the_fleet_works_off_the_queue_and_scales_to_zero(salad, scaling):
    make, clock, storage = scaling
    scaler_ = make(GOAL)

    first = await scaler_.step()
    assert first["wanted"] == 12  # 100 jobs at 0.01 jobs/s per replica, in 15 minutes
    assert [group.replicas for group in salad.groups.values()] == [6, 6]

    for _ in range(3):
        clock.now += 60
        await scaler_.step()
    while messages := await storage.queue.receive(32, lease_seconds=60):
        for message in messages:
            await storage.queue.delete(message)
    for _ in range(4):
        clock.now += 60
        last = await scaler_.step()

    assert last["wanted"] == 0
    assert scaler_.is_finished
    assert all(group.replicas == 0 for group in salad.groups.values())
    assert 0 < last["spent_dollars"] < 12 * 0.03 * 7 / 60 + 1e-9


async def test_a_leased_job_keeps_its_worker(salad, scaling):
    make, clock, storage = scaling
    scaler_ = make(GOAL)
    await scaler_.step()
    leased = [
        each
        for _ in range(4)
        for each in await storage.queue.receive(32, lease_seconds=3600)
    ]
    for message in leased[:-1]:
        await storage.queue.delete(message)

    for _ in range(20):
        clock.now += 60
        record = await scaler_.step()

    assert record["wanted"] >= 1


async def test_an_outage_leaves_the_replicas_and_the_change_is_retried(
    salad, salad_module, scaling, monkeypatch
):
    make, clock, _ = scaling
    scaler_ = make(GOAL)
    monkeypatch.setattr(client, "RETRIES", concurrency.NEVER)
    salad.faults = [salad_module.Fault(503, method="PATCH")]
    records: list[Any] = []

    await scaler_.try_once(records.append)
    assert not records
    assert [group.replicas for group in salad.groups.values()] == [0, 0]

    clock.now += 60
    await scaler_.try_once(records.append)  # the change is still due
    assert [group.replicas for group in salad.groups.values()] == [6, 6]

    salad.faults = [salad_module.Fault(403, "{}", method="GET")]
    await scaler_.try_once(records.append)
    assert [group.replicas for group in salad.groups.values()] == [6, 6]


@pytest.mark.parametrize("error", [errors.TransientError, errors.SetupError])
async def test_the_budget_is_watched_while_the_queue_does_not_answer(
    salad,
    scaling,
    monkeypatch,
    error: type[errors.FleetError],
):
    """A refusal, of a token that has expired say, is no reason to let the fleet run for ever."""
    make, clock, storage = scaling
    scaler_ = make(replace(GOAL, max_dollars=20))
    await scaler_.step()

    async def silent() -> None:
        raise error("no answer")

    for group in salad.groups.values():
        group.body["replicas"] = 200
    monkeypatch.setattr(storage.queue, "depth", silent)
    clock.now += 900
    records = []
    for _ in range(60):
        records.append(await scaler_.step())
        clock.now += 60

    assert records[0]["reason"] == "the queue does not answer"
    assert records[0]["wanted"] == 400
    assert 10 < records[-1]["spent_dollars"] <= 20


async def test_a_refused_key_ends_a_scaler_at_its_start(salad, salad_module, scaling):
    make, _, _ = scaling
    salad.faults = [salad_module.Fault(403, "{}", method="GET")]

    with pytest.raises(errors.SetupError):
        await make(GOAL).try_once(lambda _: None)


async def test_the_budget_holds_across_restarts(salad, scaling):
    make, clock, _ = scaling
    goal = replace(GOAL, max_dollars=0.5)
    scaler_ = make(goal)
    for _ in range(30):
        await scaler_.step()
        clock.now += 60

    again = make(goal)
    for _ in range(600):
        record = await again.step()
        clock.now += 60

    assert 0.3 < record["spent_dollars"] <= 0.5
    assert record["wanted"] == 0


@pytest.mark.parametrize("is_away", ["the scaler", "the API"])
@pytest.mark.parametrize("minutes", [2, 15, 18, 75])
async def test_the_budget_holds_however_long_nobody_watches(
    salad,
    salad_module,
    scaling,
    monkeypatch,
    is_away: str,
    minutes: int,
):
    """Five hundred replicas, of which SaladCloud ends those that nobody looks at."""
    make, clock, _ = scaling
    clock.now = 1_000_000 // 60 * 60.0
    monkeypatch.setattr(client, "RETRIES", concurrency.NEVER)
    goal = replace(GOAL, max_dollars=20, max_replicas=500)
    scaler_ = make(goal)
    scaler_._speeds = scaler.Speeds(given=scaler.Speed(0.0001, "given"))
    paid = 0.0
    most = 0

    async def pass_minutes(count: int, *, watched: bool) -> None:
        nonlocal paid, most
        for _ in range(count):
            if watched or is_away == "the API":
                await scaler_.try_once(lambda _: None)
            clock.now += 60
            salad.pass_a_minute(clock.now)
            left = sum(group.left for group in salad.groups.values())
            paid = paid + left * 0.03 / 60
            most = max(most, left)

    await pass_minutes(minutes, watched=True)
    if is_away == "the API":
        salad.faults = [salad_module.Fault(503) for _ in range(10_000)]
    await pass_minutes(600, watched=False)
    away = paid
    salad.faults = []
    scaler_ = make(goal)
    record = await scaler_.step()

    assert most == 500
    assert 7 < away <= 20
    assert sum(group.left for group in salad.groups.values()) == 0
    # What may have run between two looks, and until the last worker has stopped, is counted.
    unsure = 4 * 500 * 0.03 / 60
    assert away <= record["spent_dollars"] <= min(20, away + unsure)


async def test_an_end_that_saladcloud_refuses_is_said_and_the_budget_watched(
    salad, salad_module, scaling, caplog
):
    make, clock, _ = scaling
    scaler_ = make(replace(GOAL, max_dollars=0.5))
    refused = "scheduled-scaling-enabled is unknown"
    for _ in range(100):
        salad.faults = [
            salad_module.Fault(400, f'{{"title": "{refused}"}}', method="PATCH")
            for group in salad.groups.values()
            if not group.body.get("scaling-actions")
        ][:1]
        record = await scaler_.step()
        clock.now += 60

    assert refused in caplog.text
    assert "SaladCloud sets no end" in caplog.text
    assert 0.3 < record["spent_dollars"] <= 0.5


async def test_a_clock_that_is_set_moves_the_deadline_and_no_dollar(salad, scaling):
    make, clock, _ = scaling
    wall = Clock()
    goal = replace(GOAL, dollars_per_hour=None, deadline=clock.now + 7200)
    scaler_ = make(goal, wall_clock=wall)
    spent = []
    for jump in (0.0, 0.0, 3600.0, -36_000.0, 0.0):
        wall.now = wall.now + 60 + jump
        clock.now = clock.now + 60
        spent.append((await scaler_.step())["spent_dollars"])
    minutes = [after - before for before, after in itertools.pairwise(spent)]
    assert minutes[1:] == pytest.approx([2 * 0.03 / 60] * 3)  # two replicas
    wall.now = goal.deadline
    assert "after the deadline" in (await make(goal, wall_clock=wall).step())["reason"]


async def test_the_budget_is_watched_while_the_ledger_cannot_be_written(
    salad, scaling, tmp_path
):
    """A scaler that only failed would leave the fleet as it is, and billed, for ever."""
    make, clock, _ = scaling
    scaler_ = make(replace(GOAL, max_dollars=0.5))
    (tmp_path / "ledger.json").mkdir()
    with pytest.raises(errors.SetupError, match="cannot write"):  # nothing has begun
        await scaler_.try_once(lambda _: None)
    (tmp_path / "ledger.json").rmdir()
    await scaler_.step()
    (tmp_path / "ledger.json").unlink()
    (tmp_path / "ledger.json").mkdir()
    records = []
    for _ in range(120):
        clock.now += 60
        records.append(await scaler_.step())

    assert records[0]["reason"] == "the ledger cannot be written"
    assert 0.3 < records[-1]["spent_dollars"] <= 0.5
    assert records[-1]["wanted"] < records[0]["wanted"]


async def test_without_a_price_nothing_is_started(salad, scaling):
    make, _, _ = scaling
    salad.prices = {"high": "0.08"}

    record = await make(GOAL).step()

    assert record["wanted"] == 0
    assert "the price is unknown" in record["reason"]


async def test_a_rolling_change_is_left_alone(salad, salad_module, scaling):
    make, _, _ = scaling
    first = next(iter(salad.groups.values()))
    name = "sd15-batch-ffffffff-1"
    body = {**first.body, "name": name, "replicas": 7}
    salad.groups[name] = salad_module.Group(body)
    scaler_ = make(GOAL)

    record = await scaler_.step()

    assert record["reason"] == "a rolling change is under way"
    assert [group.replicas for group in salad.groups.values()] == [0, 0, 7]
    assert salad.count("PATCH") == 3, "their ends"
    await scaler_.step()
    assert salad.count("PATCH") == 3


async def test_the_budget_holds_during_a_rolling_change(salad, salad_module, scaling):
    make, clock, _ = scaling
    first = next(iter(salad.groups.values()))
    name = "sd15-batch-ffffffff-1"
    salad.groups[name] = salad_module.Group(
        {**first.body, "name": name, "replicas": 400}
    )
    scaler_ = make(replace(GOAL, max_dollars=10))

    for _ in range(70):
        record = await scaler_.step()
        clock.now += 60

    assert 5 < record["spent_dollars"] <= 10


def test_a_dry_run_prints_the_decision(
    salad, in_process: Imagefleet, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        logs, "configure", lambda _: None
    )  # it would affect later tests
    in_process("deploy", "apply", "--yes", "--replicas", "20")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a cat"}\n' * 1000)
    in_process("load", "jobs.jsonl")

    ended = in_process(
        "scale",
        "--dollars-per-hour",
        "0.3",
        "--max-dollars",
        "5",
        "--once",
        "--dry-run",
        "--json",
        "--sample-seconds",
        "60",
    )

    record = told(ended)
    assert (record["replicas"], record["wanted"], record["speed"]) == (20, 2, "assumed")


def test_two_scalers_with_one_ledger_are_refused(
    salad, in_process: Imagefleet, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        logs, "configure", lambda _: None
    )  # it would affect later tests
    with console.only_one(tmp_path / "sd15-batch-scale.json"):
        ended = in_process(
            "scale", "--dollars-per-hour", "1", "--max-dollars", "5", "--once", "--yes"
        )

    assert_refused(ended, "another `imagefleet` is at work with sd15-batch-scale.json")
    assert not salad.requests


@pytest.mark.parametrize("deadline", ["tomorrow", "8:00", "2026-13-01T08:00"])
def test_a_deadline_that_is_no_time_is_refused_with_an_example(
    in_process: Imagefleet, deadline: str
):
    ended = in_process("scale", "--deadline", deadline, "--max-dollars", "5")

    assert ended.returncode == 2
    assert ended.stderr == (
        "error: --deadline: should be a date and a time, such as 2026-12-01T08:00, not"
        f" {deadline}\n"
    )


def test_a_goal_is_required(salad, in_process: Imagefleet):
    assert_refused(
        in_process("scale", "--max-dollars", "5"),
        "--deadline, --dollars-per-hour or both",
    )


@pytest.mark.parametrize(
    "also", [(), ("--dollars-per-hour", "3"), ("--dry-run",), ("--yes",)]
)
def test_a_deadline_in_the_past_is_refused(
    salad, in_process: Imagefleet, also: tuple[str, ...]
):
    ended = in_process(
        "scale", "--deadline", "2020-01-31T08:00", "--max-dollars", "5", *also
    )

    assert_refused(ended, "--deadline 2020-01-31 08:00", "is in the past")
    assert not salad.requests


@pytest.mark.parametrize(
    "goal", [("--deadline", "2999-01-01T08:00"), ("--dollars-per-hour", "3")]
)
def test_without_a_terminal_scaling_needs_yes(
    salad, in_process: Imagefleet, goal: tuple[str, str]
):
    ended = in_process(
        "scale", *goal, "--max-dollars", "5", "--replicas", "7", "--once"
    )

    assert_refused(ended, "Spend up to $5.00 on sd15-batch, at most 7 replicas?")
    assert "without a terminal: add --yes" in " ".join(ended.stderr.split())
    assert not salad.requests


def test_a_stopped_scaler_reports_the_workers_that_keep_running(
    salad, in_process: Imagefleet, start: Callable[..., forks.Fork], tmp_path
):
    in_process("deploy", "apply", "--yes", "--replicas", "20")
    for _ in range(2):
        in_process("deploy", "status")
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a cat"}\n' * 200)
    in_process("load", "jobs.jsonl")
    errors = tmp_path / "errors"
    process = start(
        "scale",
        "--dollars-per-hour",
        "1",
        "--max-dollars",
        "5",
        "--json",
        "--yes",
        "--images-per-second",
        "0.01",
        "--sample-seconds",
        "1",
        errors=errors,
    )
    record = json.loads(process.stdout.readline())
    process.terminate()
    process.wait()
    log = errors.read_text()

    assert process.returncode == 0, log
    assert record["running"] == 20
    assert "20 workers keep running for an hour at most, then SaladCloud ends" in log
    ledger = json.loads((tmp_path / "sd15-batch-scale.json").read_text())
    assert ledger["running"] == 20
    end = datetime.fromtimestamp(ledger["end"], UTC)
    schedule = f"{end.minute} {end.hour} {end.day} {end.month} *"
    for group in salad.groups.values():
        action = {"schedule": schedule, "replicas": 0}
        assert group.body["scaling-actions"] == [action]

    for _ in range(2):  # the second finds the fleet up to date
        for group in salad.groups.values():
            group.body["scaling-actions"] = [action]
        in_process("deploy", "apply", "--dry-run", "--replicas", "20")
        assert all(each.body["scaling-actions"] for each in salad.groups.values())
        applied = in_process("deploy", "apply", "--yes", "--replicas", "20")
        assert applied.returncode == 0, applied.stderr
        assert not any(each.body["scaling-actions"] for each in salad.groups.values())
