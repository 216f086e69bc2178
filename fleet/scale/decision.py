"""How many replicas there should be: a pure function of what is known, and its reason in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

_SECONDS_PER_HOUR = 3600

#: Azure's counts are approximate, and a queue that is empty for a moment may fill again.
SETTLE_SECONDS = 120.0

#: For how long the fleet could go on unwatched, in an outage of the API say, and then end, without
#: passing the cap. More holds back more of the money until the end.
MARGIN_SECONDS = 600.0

#: Replicas come and go with the wind: SaladCloud's own advice is 5 to 10 % more than are needed.
SPARE = 1.1

#: A change of less than this share is not worth the start-ups that it costs.
HYSTERESIS = 0.1


@dataclass(frozen=True, slots=True)
class Goal:
    """What the operator wants. Times are Unix seconds."""

    max_dollars: float
    max_replicas: int
    deadline: float | None = None
    dollars_per_hour: float | None = None
    every_seconds: float = 900
    look_seconds: float = 60


@dataclass(frozen=True, slots=True)
class Known:
    """What is known at one look; *price* and *quota_free* are None where nobody tells.

    *price* is an hour of one replica of the dearest class; *replicas* are those asked for,
    *running* those that are billed; *empty_seconds* is for how long the queue has been empty.
    """

    now: float
    messages: int
    empty_seconds: float
    replicas: int
    running: int
    spent_dollars: float
    price: float | None
    quota_free: int | None
    jobs_per_second: float


@dataclass(frozen=True, slots=True)
class Decision:
    """So many replicas from here on, and why."""

    replicas: int
    reason: str


def decide(goal: Goal, known: Known, *, is_due: bool) -> Decision:
    """The replicas from here on.

    Between the quarter-hours (*is_due* is False) they only ever become fewer: at an empty queue,
    and where the cap is near.
    """
    if known.empty_seconds >= SETTLE_SECONDS:
        return Decision(0, "the queue is empty")
    if not is_due:
        if _is_near_the_cap(goal, known):
            return Decision(min(known.replicas, _affordable(goal, known)), _spent(goal, known))
        return Decision(known.replicas, "not yet due")
    need, why = _need(goal, known)
    most, bound = _most(goal, known)
    if need > most:
        return Decision(most, f"{why}, but {bound}")
    if known.replicas <= most and abs(need - known.replicas) <= HYSTERESIS * known.replicas:
        return Decision(known.replicas, f"{why}: near enough")
    return Decision(need, why)


def _is_near_the_cap(goal: Goal, known: Known) -> bool:
    """Whether the fleet would pass the cap if nobody looked again until the margin's end."""
    ahead = known.replicas * (known.price or 0.0) * _hours(goal.look_seconds + MARGIN_SECONDS)
    return known.spent_dollars + ahead > goal.max_dollars


def _affordable(goal: Goal, known: Known) -> int:
    """Replicas that may run until the next decision and a margin."""
    left = goal.max_dollars - known.spent_dollars
    if not known.price:
        return known.replicas if left > 0 else 0
    seconds = goal.every_seconds + goal.look_seconds + MARGIN_SECONDS
    return max(0, math.floor(left / (known.price * _hours(seconds))))


def _hours(seconds: float) -> float:
    return seconds / _SECONDS_PER_HOUR


def _spent(goal: Goal, known: Known) -> str:
    return f"${known.spent_dollars:,.2f} of ${goal.max_dollars:,.2f} are spent"


def _need(goal: Goal, known: Known) -> tuple[int, str]:
    """Replicas that the work asks for."""
    if known.messages == 0:
        return known.replicas, "the queue seems empty, and is looked at again"
    speed = known.jobs_per_second
    if goal.deadline is None:
        need = math.ceil(known.messages / (speed * goal.every_seconds))
        return need, (
            f"{known.messages:,} jobs keep {need:,} busy for {goal.every_seconds / 60:g} minutes"
        )
    seconds = goal.deadline - known.now
    until = f"{datetime.fromtimestamp(goal.deadline, UTC):%Y-%m-%d %H:%M} UTC"
    if seconds <= 0:
        return goal.max_replicas, f"{known.messages:,} jobs are left after the deadline, {until}"
    need = math.ceil(known.messages * SPARE / (speed * max(1.0, seconds)))
    return need, f"{known.messages:,} jobs by {until} need {need:,}"


def _most(goal: Goal, known: Known) -> tuple[int, str]:
    """The narrowest of the limits, in replicas, and its name."""
    if known.price is None:
        return min(known.replicas, _affordable(goal, known)), "the price is not known"
    if known.quota_free is None:
        return min(known.replicas, _affordable(goal, known)), "the quota is not known"
    limits = [
        (goal.max_replicas, f"{goal.max_replicas:,} are the most"),
        (known.replicas + known.quota_free, f"the quota has room for {known.quota_free:,} more"),
        (_affordable(goal, known), _spent(goal, known)),
    ]
    if goal.dollars_per_hour is not None:
        limits.append(
            (
                math.floor(goal.dollars_per_hour / known.price),
                f"${goal.dollars_per_hour:,.2f} an hour are the most",
            )
        )
    return min(limits)
