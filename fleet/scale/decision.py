"""The scaling decision: a pure function of what is known, with its reason."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

#: Azure's counts are approximate, and an empty queue may fill again.
SETTLE_SECONDS = 120.0

#: Seconds for which the fleet may run unsampled (the API or the scaler's machine is away) within
#: the budget; then SaladCloud ends it. A longer time reserves more of the budget until the end.
UNWATCHED_SECONDS = 3600.0

#: Until the last worker has stopped.
STOPPING_SECONDS = 120.0

MARGIN_SECONDS = UNWATCHED_SECONDS + STOPPING_SECONDS

#: Nodes are interrupted: SaladCloud recommends 5 to 10 % more replicas than needed.
SPARE = 1.1

_BUDGET = "the budget allows no more"

#: A smaller relative change is not worth its start-ups.
HYSTERESIS = 0.1


@dataclass(frozen=True)
class Goal:
    """The operator's goal and limits; the deadline is in Unix seconds."""

    max_dollars: float
    max_replicas: int
    deadline: float | None = None
    dollars_per_hour: float | None = None
    every_seconds: float = 900
    sample_seconds: float = 60
    #: Models whose jobs count, of the jobs that name a model; None: all.
    models: Collection[str] | None = None

    def has_passed(self, now: float) -> bool:
        """True after the deadline: from then on the replicas only become fewer."""
        return self.deadline is not None and now >= self.deadline


@dataclass(frozen=True)
class Known:
    """One sample; *price* is None if unknown, *quota_free* if no change is due.

    *price* is $/h of one replica of the most expensive class; *replicas* are those requested and
    *running* those billed; *empty_seconds* is how long the queue has been empty.
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


@dataclass(frozen=True)
class Decision:
    """The number of replicas, and why."""

    replicas: int
    reason: str


def decide(goal: Goal, known: Known, *, is_due: bool) -> Decision:
    """The replicas from now on.

    Unless a change is due, they only ever become fewer: for an empty queue, or near the budget.
    After the deadline, too: more would be paid for without meeting it.
    """
    if known.empty_seconds >= SETTLE_SECONDS:
        return Decision(0, "the queue is empty")
    if not is_due:
        if _is_near_budget(goal, known):
            return Decision(min(known.replicas, _affordable(goal, known)), _BUDGET)
        return Decision(known.replicas, "no change is due yet")
    need, why = _need(goal, known)
    most, bound = _most(goal, known)
    is_close = abs(need - known.replicas) <= HYSTERESIS * known.replicas
    if need > most:
        need = most
        why = f"{why}, but {bound}"
    elif known.replicas <= most and is_close:
        need = known.replicas
        why = f"{why}: close enough"
    return Decision(need, why)


def _is_near_budget(goal: Goal, known: Known) -> bool:
    """True if the fleet could exceed the budget before the margin ends."""
    hours = (goal.sample_seconds + MARGIN_SECONDS) / 3600
    ahead = known.replicas * (known.price or 0.0) * hours
    return known.spent_dollars + ahead > goal.max_dollars


def _affordable(goal: Goal, known: Known) -> int:
    """Replicas that the budget allows until the next decision, plus the margin.

    If fewer than run, what the others cost until they have stopped comes off first.
    """
    left = goal.max_dollars - known.spent_dollars
    if not known.price:
        return known.replicas if left > 0 else 0
    seconds = goal.every_seconds + goal.sample_seconds + MARGIN_SECONDS
    paid_seconds = left / known.price * 3600
    if paid_seconds < known.running * seconds:
        paid_seconds -= known.running * STOPPING_SECONDS
        seconds -= STOPPING_SECONDS
    return max(0, math.floor(paid_seconds / seconds))


def _need(goal: Goal, known: Known) -> tuple[int, str]:
    """The replicas that the work needs, and why."""
    if known.messages == 0:
        return known.replicas, "the queue seems empty; waiting to be sure"
    speed = known.jobs_per_second
    busy = math.ceil(known.messages / (speed * goal.every_seconds))
    if goal.deadline is None:
        minutes = goal.every_seconds / 60
        return (
            busy,
            f"{known.messages:,} jobs keep {busy:,} replicas busy for {minutes:g} minutes",
        )
    until = f"{datetime.fromtimestamp(goal.deadline, UTC):%Y-%m-%d %H:%M} UTC"
    if goal.has_passed(known.now):
        # More replicas cannot meet it any more: the rest is done by those there are.
        need = min(known.replicas, busy)
        why = f"{known.messages:,} jobs are left after the deadline ({until})"
        return need, f"{why}: to add replicas, run scale again with a later --deadline"
    seconds = max(1.0, goal.deadline - known.now)
    need = math.ceil(known.messages * SPARE / (speed * seconds))
    return need, f"{known.messages:,} jobs by {until} need {need:,} replicas"


def _most(goal: Goal, known: Known) -> tuple[int, str]:
    """The tightest limit in replicas, and its name."""
    affordable = _affordable(goal, known)
    if known.price is None:
        return min(known.replicas, affordable), "the price is unknown"
    free = known.quota_free or 0
    limits = [
        (goal.max_replicas, f"at most {goal.max_replicas:,} are allowed"),
        (
            known.replicas + free,
            f"the quota allows {free:,} more",
        ),
        (affordable, _BUDGET),
    ]
    if goal.dollars_per_hour is not None:
        most = math.floor(goal.dollars_per_hour / known.price)
        limits.append((most, f"at most ${goal.dollars_per_hour:,.2f}/h is allowed"))
    return min(limits)
