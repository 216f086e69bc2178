"""`imagefleet scale`: what it decides, what it has spent, and what it does on a SaladCloud."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet import logs, salad_api, salad_calls, salad_deployment, scale_ledger, scaler
from fleet.scale_decision import (
    MARGIN_SECONDS,
    SETTLE_SECONDS,
    Goal,
    Known,
    decide,
)
from jobs import errors, homes
from jobs.settings import StorageSettings

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]  # the fixture of conftest.py

GOAL = Goal(max_dollars=1000, max_replicas=750, dollars_per_hour=1000)

KNOWN = Known(
    now=0,
    messages=1_000_000,
    empty_seconds=0,
    replicas=100,
    running=100,
    spent_dollars=0,
    price=0.03,
    quota_free=1000,
    jobs_per_second=1.0,
)

#: How long a replica that is told to end may be billed: SaladCloud bills what runs, not what stops.
WIND_DOWN_SECONDS = 120.0

#: The longest that nobody looks: what the margin leaves for it.
OUTAGE = MARGIN_SECONDS - WIND_DOWN_SECONDS


def test_a_deadline_takes_as_many_as_it_needs_and_a_few_to_spare() -> None:
    goal = replace(GOAL, deadline=10_000.0, dollars_per_hour=None)

    assert decide(goal, replace(KNOWN, replicas=50), is_due=True).replicas == 110
    assert decide(goal, replace(KNOWN, jobs_per_second=0.5), is_due=True).replicas == 220


def test_a_deadline_that_cannot_be_met_is_told() -> None:
    decision = decide(replace(GOAL, deadline=100.0), KNOWN, is_due=True)

    assert decision.replicas == 750
    assert "need 11,000, but 750 are the most" in decision.reason


def test_an_hourly_budget_is_kept() -> None:
    decision = decide(replace(GOAL, dollars_per_hour=3), KNOWN, is_due=True)

    assert decision.replicas == 100
    assert decide(replace(GOAL, dollars_per_hour=9), KNOWN, is_due=True).replicas == 300


def test_a_short_queue_does_not_start_the_whole_budget() -> None:
    known = replace(KNOWN, messages=9_000, replicas=0, running=0)

    assert decide(GOAL, known, is_due=True).replicas == 10


def test_an_empty_queue_ends_the_fleet_once_it_has_settled() -> None:
    empty = replace(KNOWN, messages=0)

    for is_due in (True, False):
        assert decide(GOAL, empty, is_due=is_due).replicas == 100
        settled = replace(empty, empty_seconds=SETTLE_SECONDS)
        assert decide(GOAL, settled, is_due=is_due).replicas == 0


def test_a_small_difference_is_not_worth_a_change() -> None:
    goal = replace(GOAL, deadline=10_000.0)

    assert decide(goal, replace(KNOWN, replicas=105), is_due=True).replicas == 105
    assert decide(goal, replace(KNOWN, replicas=150), is_due=True).replicas == 110


@pytest.mark.parametrize("unknown", [{"price": None}, {"quota_free": None}])
def test_what_is_unknown_never_scales_up(unknown: dict[str, Any]) -> None:
    decision = decide(GOAL, replace(KNOWN, **unknown), is_due=True)

    assert decision.replicas == KNOWN.replicas
    assert "is not known" in decision.reason


def test_the_quota_is_a_limit() -> None:
    assert decide(GOAL, replace(KNOWN, quota_free=20), is_due=True).replicas == 120


@given(
    goal=st.builds(
        Goal,
        max_dollars=st.floats(1, 100),
        max_replicas=st.integers(1, 1000),
        deadline=st.none() | st.floats(0, 10_000),
        dollars_per_hour=st.none() | st.floats(1, 100),
    ),
    price=st.floats(0.01, 0.5),
    speed=st.floats(0.1, 5),
    jobs=st.sampled_from([10_000, 10_000_000]),
    looks=st.lists(
        st.tuples(
            st.sampled_from([60, 60, 90, OUTAGE]),  # seconds until the next look
            st.sampled_from([0, 0.5, 1]),  # the share that comes of what is missing
            st.booleans(),  # whether those that are too many end at once, or as late as they may
            st.sampled_from([1000, 1000, 50, 0, None]),  # what is free of the quota
        ),
        max_size=60,
    ),
)
@example(  # the cap binds, all come at once, and none goes before it must
    goal=Goal(max_dollars=20, max_replicas=1000, dollars_per_hour=1000),
    price=0.1,
    speed=1.0,
    jobs=10_000_000,
    looks=[(60, 1, False, 1000)] * 60,
)
@example(  # the same, with an outage each time
    goal=Goal(max_dollars=20, max_replicas=1000, dollars_per_hour=1000),
    price=0.1,
    speed=1.0,
    jobs=10_000_000,
    looks=[(OUTAGE, 1, False, 1000)] * 60,
)
@example(  # the same, with the looks late
    goal=Goal(max_dollars=20, max_replicas=1000, dollars_per_hour=1000),
    price=0.1,
    speed=1.0,
    jobs=10_000_000,
    looks=[(90, 1, False, 1000)] * 60,
)
def test_the_cap_is_never_passed(
    goal: Goal, price: float, speed: float, jobs: int, looks: list[Any]
) -> None:
    """Whatever comes and goes, and if the scaler dies and somebody ends the fleet minutes later."""
    now, due_at, gone_by, messages = 0.0, 0.0, 0.0, float(jobs)
    ledger = scale_ledger.Ledger("fleet", began=0, at=0, running=0)
    billed = 0.0
    replicas = running = 0
    for seconds, come, is_quick, quota in looks:
        ledger = ledger.counted(now, running, price)
        known = Known(
            now=now,
            messages=round(messages),
            empty_seconds=0.0 if messages else 1000.0,
            replicas=replicas,
            running=running,
            spent_dollars=ledger.dollars,
            price=price,
            quota_free=quota,
            jobs_per_second=speed,
        )
        had_excess = running > replicas
        replicas = decide(goal, known, is_due=now >= due_at).replicas
        due_at = now + goal.every_seconds if now >= due_at else due_at
        assert 0 <= replicas <= max(goal.max_replicas, known.replicas)
        if running > replicas and not had_excess:
            gone_by = now + WIND_DOWN_SECONDS
        ending_seconds = max(0, running - replicas) * max(0.0, gone_by - now)
        unwatched = replicas * OUTAGE + ending_seconds
        assert billed + unwatched * price / 3600 <= goal.max_dollars + 1e-6

        later = replicas
        if running < replicas:
            later = running + round((replicas - running) * come)
        elif now + seconds < gone_by and not is_quick:
            later = running
        ending_seconds = max(0, running - replicas) * min(seconds, max(0.0, gone_by - now))
        worked_seconds = min(replicas, max(running, later)) * seconds
        billed += (worked_seconds + ending_seconds) * price / 3600
        messages = max(0.0, messages - worked_seconds * speed)
        now, running = now + seconds, later
    assert billed <= goal.max_dollars


def test_the_ledger_counts_on_after_the_scaler_was_away(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    ledger = scale_ledger.read(path, "fleet", now=0.0).counted(0.0, 100, 0.03)
    ledger = ledger.counted(1800.0, 100, 0.03)
    scale_ledger.write(path, ledger)

    later = scale_ledger.read(path, "fleet", now=9999.0).counted(3600.0, 20, 0.03)

    assert later.dollars == pytest.approx(3.0)
    assert later.counted(7200.0, 0, None).dollars == pytest.approx(3.6)


def test_time_without_any_price_is_counted_once_there_is_one() -> None:
    ledger = scale_ledger.Ledger("fleet", began=0, at=0, running=10)

    assert ledger.counted(3600.0, 0, None).dollars == 0
    assert ledger.counted(3600.0, 0, None).counted(3600.0, 0, 0.03).dollars == pytest.approx(0.3)


@pytest.mark.parametrize("content", ["", "{}", '{"fleet": "another"}', "no json"])
def test_a_ledger_that_cannot_be_read_is_no_permission_to_spend(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(content)

    with pytest.raises(errors.SetupError, match=r"ledger\.json"):
        scale_ledger.read(path, "fleet", now=0.0)


def test_the_queue_itself_tells_a_speed() -> None:
    speed = scaler.QueueSpeed()
    assert speed.jobs_per_second is None
    speed.look(0.0, 10_000, running=10)
    assert speed.jobs_per_second is None
    speed.look(60.0, 9_400, running=10)

    assert speed.jobs_per_second == pytest.approx(1.0)


class Clock:
    """Seconds that a test lets pass."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def scaling(salad: Any, salad_module: Any, tmp_path: Path) -> Any:
    """A scaler of two groups with no replicas and a queue of 100 jobs, and all that it sees."""
    import aiohttp

    clock = Clock()
    settings = StorageSettings(storage=f"local:{tmp_path}/home")
    async with homes.open_storage(settings) as home, aiohttp.ClientSession() as session:
        await home.create()
        await home.queue.send([str(number) for number in range(100)])
        # Hours of looks pass in no time here; the limit has a test of its own.
        limit = salad_calls.CallLimit(calls=100_000)
        calls = salad_calls.Calls(session, salad.url, salad_module.KEY, limit=limit)
        api = salad_api.SaladApi(calls, "acme", "default")
        fleet = salad_deployment.Deployment(api, "sd15-batch", lambda _: None)
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
                home,
                tmp_path / "ledger.json",
                given_speed=scaler.Speed(0.01, "given"),
                clock=clock,
                **more,
            )

        yield make, clock, home


async def test_a_queue_is_worked_off_and_the_fleet_ends(salad: Any, scaling: Any) -> None:
    make, clock, home = scaling
    scaler_ = make(GOAL)

    first = await scaler_.step()
    assert first["wanted"] == 12  # 100 jobs at 0.01 a second each, in a quarter of an hour
    assert [group.replicas for group in salad.groups.values()] == [6, 6]

    for _ in range(3):
        clock.now += 60
        await scaler_.step()
    while messages := await home.queue.receive(32, lease_seconds=60):
        for message in messages:
            await home.queue.delete(message)
    for _ in range(4):
        clock.now += 60
        last = await scaler_.step()

    assert last["wanted"] == 0
    assert scaler_.is_finished
    assert all(group.replicas == 0 for group in salad.groups.values())
    assert 0 < last["spent_dollars"] < 12 * 0.03 * 7 / 60 + 1e-9


async def test_a_leased_job_keeps_its_worker(salad: Any, scaling: Any) -> None:
    make, clock, home = scaling
    scaler_ = make(GOAL)
    await scaler_.step()
    leased = [each for _ in range(4) for each in await home.queue.receive(32, lease_seconds=3600)]
    for message in leased[:-1]:
        await home.queue.delete(message)

    for _ in range(20):
        clock.now += 60
        record = await scaler_.step()

    assert record["wanted"] >= 1


async def test_an_outage_leaves_the_replicas_and_is_tried_again(
    salad: Any, salad_module: Any, scaling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, clock, _ = scaling
    scaler_ = make(GOAL)
    monkeypatch.setattr(salad_calls, "TRIES", 1)
    salad.faults = [salad_module.Fault(503, method="PATCH")]
    records: list[Any] = []

    await scaler_.try_once(records.append)
    assert not records
    assert [group.replicas for group in salad.groups.values()] == [0, 0]

    clock.now += 60
    await scaler_.try_once(records.append)  # still due: what was not done is not forgotten
    assert [group.replicas for group in salad.groups.values()] == [6, 6]

    salad.faults = [salad_module.Fault(403, "{}", method="GET")]
    await scaler_.try_once(records.append)
    assert [group.replicas for group in salad.groups.values()] == [6, 6]


async def test_a_key_that_is_refused_ends_a_scaler_that_has_just_begun(
    salad: Any, salad_module: Any, scaling: Any
) -> None:
    make, _, _ = scaling
    salad.faults = [salad_module.Fault(403, "{}", method="GET")]

    with pytest.raises(errors.SetupError):
        await make(GOAL).try_once(lambda _: None)


async def test_the_cap_outlives_the_scaler(salad: Any, scaling: Any) -> None:
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


async def test_a_dry_run_touches_nothing(salad: Any, scaling: Any, tmp_path: Path) -> None:
    make, _, _ = scaling

    record = await make(GOAL, is_dry_run=True).step()

    assert record["wanted"] == 12
    assert salad.count("PATCH") == 0
    assert not (tmp_path / "ledger.json").exists()


async def test_a_price_that_is_not_told_starts_nothing(salad: Any, scaling: Any) -> None:
    make, _, _ = scaling
    salad.prices = {"high": "0.08"}

    record = await make(GOAL).step()

    assert record["wanted"] == 0
    assert "the price is not known" in record["reason"]


async def test_a_rolling_change_is_left_alone(salad: Any, salad_module: Any, scaling: Any) -> None:
    make, _, _ = scaling
    first = next(iter(salad.groups.values()))
    name = "sd15-batch-ffffffff-1"
    salad.groups[name] = salad_module.Group({**first.body, "name": name})

    record = await make(GOAL).step()

    assert record["reason"] == "a rolling change is under way"
    assert salad.count("PATCH") == 0


def test_the_command_says_what_it_would_do(
    salad: Any, in_process: Imagefleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda _: None)  # it would outlive this test
    in_process("deploy", "salad", "apply", "--yes", "--replicas", "20")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a cat"}\n' * 1000)
    in_process("load", "jobs.jsonl")

    ended = in_process(
        "scale", "--dollars-per-hour", "0.3", "--max-dollars", "5", "--once", "--dry-run", "--json"
    )

    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert (record["replicas"], record["wanted"], record["speed"]) == (20, 2, "assumed")


def test_the_command_wants_to_know_what_for(salad: Any, in_process: Imagefleet) -> None:
    ended = in_process("scale", "--max-dollars", "5")

    assert ended.returncode == 2
    assert "--deadline, --dollars-per-hour or both" in ended.stderr


def test_a_scaler_that_is_told_to_end_says_what_runs_on(
    salad: Any, in_process: Imagefleet, tmp_path: Path
) -> None:
    in_process("deploy", "salad", "apply", "--yes", "--replicas", "20")
    for _ in range(2):
        in_process("deploy", "salad", "status")
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a cat"}\n' * 20_000)
    in_process("load", "jobs.jsonl")
    command = Path(sys.executable).with_name("imagefleet")
    with subprocess.Popen(
        [
            *(command, "scale", "--dollars-per-hour", "1", "--max-dollars", "5", "--json"),
            *("--look-seconds", "1"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        record = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)

    assert process.returncode == 0, log
    assert record["running"] == 20
    assert "20 workers run on, and nobody counts their dollars" in log
    assert json.loads((tmp_path / "sd15-batch-scale.json").read_text())["running"] == 20
