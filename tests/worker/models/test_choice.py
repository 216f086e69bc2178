"""When a worker changes its model, in simulated time: what it costs, and that none starves."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.models.change import (
    LONGEST_STAY_SECONDS,
    SHORTEST_STAY_SECONDS,
    STAY_PER_CHANGE,
    ModelChoice,
    Waiting,
)

SECONDS_PER_JOB = 1.0

#: Of `worker.models.change`, with its jitter.
LOOK_SECONDS = 30.0


@dataclass
class Worker:
    """One worker, a second of work for each job, and queues that are filled by a rate."""

    rates: dict[str, float]
    change_seconds: float
    now: float = 0.0
    drawn: dict[str, int] = field(default_factory=dict)
    oldest_seconds: dict[str, float] = field(default_factory=dict)
    changing_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.choice = ModelChoice(next(iter(self.rates)), lambda: self.now)
        self.queues: dict[str, deque[float]] = {model: deque() for model in self.rates}
        self._due = dict.fromkeys(self.rates, 0.0)

    def run(self, seconds: float, *, look_seconds: float = 1.0) -> None:
        looked_at = self.now
        while self.now < seconds:
            self._send()
            own = self.queues[self.choice.current]
            if own:
                self._pass(SECONDS_PER_JOB)
                sent_at = own.popleft()
                model = self.choice.current
                age = self.now - sent_at
                self.oldest_seconds[model] = max(age, self.oldest_seconds.get(model, 0))
                self.drawn[model] = self.drawn.get(model, 0) + 1
            else:
                self._pass(1.0)
            if own and self.now - looked_at < look_seconds:
                continue
            looked_at = self.now
            waiting = {
                model: Waiting(len(queue), self.now - queue[0] if queue else 0)
                for model, queue in self.queues.items()
            }
            following = self.choice.following(waiting, is_idle=not own)
            if following is not None:
                self._pass(self.change_seconds)
                self.changing_seconds += self.change_seconds
                self.choice.changed(following, self.change_seconds)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self._send()

    def _send(self) -> None:
        for model, rate in self.rates.items():
            while rate and self._due[model] <= self.now:
                self.queues[model].append(self._due[model])
                self._due[model] += 1 / rate


def bound(worker: Worker) -> float:
    """As the rule says, and the time until the worker looks."""
    one = worker.choice.stay_seconds + worker.change_seconds + LOOK_SECONDS
    return len(worker.rates) * one


def test_two_models_whose_queues_are_never_empty_share_the_time_equally_and_lose_little():
    worker = Worker({"a": 10.0, "b": 10.0}, change_seconds=20)
    worker.run(20_000)
    assert worker.drawn["a"] == pytest.approx(worker.drawn["b"], rel=0.1)
    assert worker.changing_seconds / worker.now <= 1 / (STAY_PER_CHANGE + 1) + 0.005


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from([0.001, 0.01, 0.1]), min_size=1, max_size=4),
    st.sampled_from([0.5, 5.0, 40.0, 120.0]),
)
def test_beside_a_queue_that_is_never_empty_no_job_of_another_waits_longer_than_said(
    rates: list[float], change_seconds: float
):
    """Also where a model has a job now and then only."""
    few = {f"b{number}": rate for number, rate in enumerate(rates)}
    worker = Worker({"a": 10.0, **few}, change_seconds)
    worker.run(12_000, look_seconds=LOOK_SECONDS)
    left = {
        model: worker.now - queue[0] for model, queue in worker.queues.items() if queue
    }
    for model, rate in few.items():
        # Its own earlier jobs are drawn first: those of one round of the others.
        ahead = bound(worker) * rate * SECONDS_PER_JOB + SECONDS_PER_JOB
        for seconds in (worker.oldest_seconds.get(model, 0), left.get(model, 0)):
            assert seconds <= bound(worker) + ahead + LOOK_SECONDS, model
        assert worker.drawn.get(model) or worker.change_seconds > 60


def test_a_backlog_that_is_older_does_not_keep_the_worker():
    worker = Worker({"a": 0.0, "b": 0.0}, change_seconds=1)
    worker.queues["a"].extend([-1e6] * 5000)
    worker.queues["b"].extend([0.0] * 10)
    worker.run(300)
    assert worker.drawn["b"] == 10


def test_an_idle_worker_changes_at_once():
    worker = Worker({"a": 0.0, "b": 1.0}, change_seconds=1)
    worker.run(20)
    assert worker.drawn["b"] > 10


def test_a_worker_stays_with_its_jobs_for_a_while():
    now = 0.0
    choice = ModelChoice("a", lambda: now)
    choice.longest_change_seconds = 10.0
    assert choice.stay_seconds == 10 * STAY_PER_CHANGE
    waiting = {"b": Waiting(1, 50.0)}
    now = choice.stay_seconds - 1
    assert choice.following(waiting, is_idle=False) is None
    now = choice.stay_seconds
    assert choice.following(waiting, is_idle=False) == "b"
    assert choice.following({"b": Waiting(0, 0)}, is_idle=True) is None


@pytest.mark.parametrize(
    ("change_seconds", "stay_seconds"),
    [(0.1, SHORTEST_STAY_SECONDS), (1000, LONGEST_STAY_SECONDS)],
)
def test_the_stay_has_limits(change_seconds: float, stay_seconds: float):
    choice = ModelChoice("a")
    choice.changed("b", change_seconds)
    assert choice.stay_seconds == stay_seconds
