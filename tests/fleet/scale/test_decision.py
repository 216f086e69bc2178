"""The decisions of `imagefleet scale`, and its ledger."""

import errno
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.scale import ledger as scale_ledger
from fleet.scale.decision import MARGIN_SECONDS, SETTLE_SECONDS, Goal, Known, decide
from imagefleet import errors

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

#: How long a replica may be billed after its removal: SaladCloud bills running instances only.
WIND_DOWN_SECONDS = 120.0

#: The longest time without a sample that the margin allows.
OUTAGE = MARGIN_SECONDS - WIND_DOWN_SECONDS


def test_a_deadline_gets_the_replicas_it_needs_and_a_few_to_spare():
    goal = replace(GOAL, deadline=10_000.0, dollars_per_hour=None)

    assert decide(goal, replace(KNOWN, replicas=50), is_due=True).replicas == 110
    assert (
        decide(goal, replace(KNOWN, jobs_per_second=0.5), is_due=True).replicas == 220
    )


def test_a_deadline_that_cannot_be_met_is_reported():
    decision = decide(replace(GOAL, deadline=100.0), KNOWN, is_due=True)

    assert decision.replicas == 750
    assert "need 11,000 replicas, but at most 750 are allowed" in decision.reason


def test_after_the_deadline_the_replicas_only_become_fewer():
    goal = replace(GOAL, deadline=100.0)
    late = replace(KNOWN, now=100.0)

    many = decide(goal, late, is_due=True)
    assert many.replicas == KNOWN.replicas
    assert "1,000,000 jobs are left after the deadline" in many.reason
    # The last jobs need fewer, and jobs that arrive after the end start nothing.
    assert decide(goal, replace(late, messages=9_000), is_due=True).replicas == 10
    assert decide(goal, replace(late, replicas=0, running=0), is_due=True).replicas == 0
    # The other limits hold.
    assert decide(goal, replace(late, spent_dollars=999.8), is_due=True).replicas == 2
    cheap = replace(goal, dollars_per_hour=1.5)
    assert decide(cheap, late, is_due=True).replicas == 50


def test_an_hourly_budget_is_kept():
    decision = decide(replace(GOAL, dollars_per_hour=3), KNOWN, is_due=True)

    assert decision.replicas == 100
    assert decide(replace(GOAL, dollars_per_hour=9), KNOWN, is_due=True).replicas == 300


def test_a_short_queue_does_not_use_the_whole_budget():
    known = replace(KNOWN, messages=9_000, replicas=0, running=0)

    assert decide(GOAL, known, is_due=True).replicas == 10


def test_an_empty_queue_ends_the_fleet_after_a_while():
    empty = replace(KNOWN, messages=0)

    for is_due in (True, False):
        assert decide(GOAL, empty, is_due=is_due).replicas == 100
        settled = replace(empty, empty_seconds=SETTLE_SECONDS)
        assert decide(GOAL, settled, is_due=is_due).replicas == 0


def test_a_small_difference_is_not_worth_a_change():
    goal = replace(GOAL, deadline=10_000.0)

    assert decide(goal, replace(KNOWN, replicas=105), is_due=True).replicas == 105
    assert decide(goal, replace(KNOWN, replicas=150), is_due=True).replicas == 110


def test_an_unknown_price_never_scales_up():
    decision = decide(GOAL, replace(KNOWN, price=None), is_due=True)

    assert decision.replicas == KNOWN.replicas
    assert "is unknown" in decision.reason


def test_the_quota_is_a_limit():
    assert decide(GOAL, replace(KNOWN, quota_free=20), is_due=True).replicas == 120
    assert decide(GOAL, replace(KNOWN, quota_free=None), is_due=True).replicas == 100


def on_the_budget(seconds: float) -> Any:
    """Only the budget limits; samples are *seconds* apart, replicas stop as late as possible."""
    return example(
        goal=Goal(max_dollars=20, max_replicas=1000, dollars_per_hour=1000),
        price=0.1,
        speed=1.0,
        jobs=10_000_000,
        samples=[(seconds, 1, False, 1000)] * 60,
    )


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
    samples=st.lists(
        st.tuples(
            st.sampled_from([60, 60, 90, OUTAGE]),  # seconds until the next sample
            st.sampled_from(
                [0, 0.5, 1]
            ),  # the share of the missing replicas that starts
            st.booleans(),  # surplus replicas stop at once, or as late as possible
            st.sampled_from([1000, 1000, 50, 0, None]),  # the free quota
        ),
        max_size=60,
    ),
)
@on_the_budget(60)
@on_the_budget(OUTAGE)
@on_the_budget(90)
@example(  # What surplus replicas cost until they have stopped passed it by 0.13 %.
    goal=Goal(max_dollars=52.5, max_replicas=136),
    price=0.296875,
    speed=1.0,
    jobs=10_000_000,
    samples=[*[(60, 1, False, 1000)] * 11, (OUTAGE, 0, False, 1000), (60, 0, False, 0)],
)
def test_the_budget_holds_through_an_hour_in_which_nobody_watches(
    goal: Goal, price: float, speed: float, jobs: int, samples: list[Any]
):
    """Also if the scaler dies and the operator stops the fleet an hour later."""
    now = 0.0
    due_at = 0.0
    gone_by = 0.0
    messages = float(jobs)
    ledger = scale_ledger.Ledger("fleet", began=0, at=0, running=0, end=1e9)
    billed = 0.0
    replicas = running = 0
    for seconds, come, is_quick, quota in samples:
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
        ending_seconds = max(0, running - replicas) * min(
            seconds, max(0.0, gone_by - now)
        )
        worked_seconds = min(replicas, max(running, later)) * seconds
        billed += (worked_seconds + ending_seconds) * price / 3600
        messages = max(0.0, messages - worked_seconds * speed)
        now = now + seconds
        running = later
    assert billed <= goal.max_dollars


def test_the_ledger_counts_the_time_that_the_scaler_was_away(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = scale_ledger.read(path, "fleet", now=0.0).counted(0.0, 100, 0.03)
    ledger = replace(ledger, end=7080.0).counted(1800.0, 100, 0.03)
    scale_ledger.write(path, ledger)

    later = scale_ledger.read(path, "fleet", now=9999.0).counted(3600.0, 20, 0.03)

    assert later.dollars == pytest.approx(3.0)
    assert later.counted(7200.0, 0, None).dollars == pytest.approx(3.6)
    # After its end nothing runs, but what somebody has started again.
    assert later.counted(72_000.0, 0, None).dollars == pytest.approx(3.6)
    assert later.counted(72_000.0, 10, None).dollars == pytest.approx(9.0)


def test_a_ledger_of_the_future_is_an_error_for_its_cost_is_unknown(tmp_path):
    path = tmp_path / "ledger.json"
    scale_ledger.write(
        path, scale_ledger.Ledger("fleet", 0, 100_000.0, 100, price=0.03)
    )
    assert scale_ledger.read(path, "fleet", 99_990.0).running == 100
    with pytest.raises(
        errors.SetupError, match=r"10\.0 hours in the future.*set this machine"
    ):
        scale_ledger.read(path, "fleet", 64_000.0)


def test_a_write_that_fails_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    ledger = scale_ledger.Ledger("fleet", 0, 100.0, 100, price=0.03)
    scale_ledger.write(path, ledger)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.SetupError, match="No space left"):
        scale_ledger.write(path, ledger.counted(200.0, 50, 0.03))
    assert scale_ledger.read(path, "fleet", 100.0).running == 100
    assert list(tmp_path.iterdir()) == [path]


def test_time_without_a_price_is_counted_once_there_is_one():
    ledger = scale_ledger.Ledger("fleet", began=0, at=0, running=10, end=1e9)

    assert ledger.counted(3600.0, 0, None).dollars == 0
    assert ledger.counted(3600.0, 0, None).counted(
        3600.0, 0, 0.03
    ).dollars == pytest.approx(0.3)


@pytest.mark.parametrize("content", ["", "{}", '{"fleet": "another"}', "no json"])
def test_an_unreadable_ledger_is_an_error(content: str, tmp_path):
    path = tmp_path / "ledger.json"
    path.write_text(content)

    with pytest.raises(errors.SetupError, match=r"ledger\.json"):
        scale_ledger.read(path, "fleet", now=0.0)
