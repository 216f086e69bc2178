"""The rule by which a worker with several models changes from one to another, and to which.

The rule:

1. It stays while its own model's queues have jobs, for `stay_seconds` at least: 15 times as long as
   the longest change so far took, half a minute to a quarter of an hour. So where every queue is
   always full, changes take a sixteenth of the time at most.
2. Then, or as soon as its own queues are empty, it takes the model that has waited longest: since
   its oldest job was sent, or since this worker left it, whichever is later. So it takes turns.
3. While its own queues have jobs, it leaves them only for a model whose jobs are worth the change:
   they take as long to draw as the change itself, or they have waited for `stay_seconds`.

So of N models, none waits longer for this worker than N times (`stay_seconds` and one change).

Workers that start together begin with different models, each model with as many of them as is its
share of the waiting jobs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

STAY_PER_CHANGE = 15.0
SHORTEST_STAY_SECONDS = 30.0
LONGEST_STAY_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """The jobs of one model that nobody has; *age_seconds* is of the oldest."""

    jobs: int
    age_seconds: float


def share_of(worker: str, position: int = 0, workers: int = 1) -> float:
    """A worker's place among all, from 0 to 1: by chance, but apart from its neighbours."""
    digest = hashlib.blake2b(worker.encode(), digest_size=4).digest()
    return (position + int.from_bytes(digest) / 2**32) / workers


def first_to_serve(waiting: Mapping[str, Waiting], share: float) -> str | None:
    """The model to begin with; None: no job waits."""
    jobs = sum(each.jobs for each in waiting.values())
    passed = 0
    for model, each in waiting.items():
        passed += each.jobs
        if passed > share * jobs:
            return model
    return None


@dataclass(slots=True)
class ModelChoice:
    """Decides by the rule above; *clock* in seconds."""

    current: str
    clock: Callable[[], float] = time.monotonic
    longest_change_seconds: float = 0.0
    _since: float = field(init=False)
    _left_at: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @property
    def stay_seconds(self) -> float:
        wanted = STAY_PER_CHANGE * self.longest_change_seconds
        return min(max(wanted, SHORTEST_STAY_SECONDS), LONGEST_STAY_SECONDS)

    def changed(self, model: str, change_seconds: float) -> None:
        """The worker serves *model* from now on; nothing was drawn for *change_seconds*."""
        self._left_at[self.current] = self.clock() - change_seconds
        self.current, self._since = model, self.clock()
        self.longest_change_seconds = max(self.longest_change_seconds, change_seconds)

    @property
    def may_leave(self) -> bool:
        """Whether it has stayed long enough to leave jobs behind."""
        return self.clock() - self._since >= self.stay_seconds

    def following(
        self, waiting: Mapping[str, Waiting], *, is_idle: bool, seconds_per_job: float
    ) -> str | None:
        """The model to change to; None: stay. *is_idle*: there are no jobs of the present one."""
        if not (is_idle or self.may_leave):
            return None
        others = {
            model: each for model, each in waiting.items() if model != self.current and each.jobs
        }
        waited = {model: self._waited(model, each) for model, each in others.items()}
        worth = [
            model
            for model, each in others.items()
            if is_idle
            or each.jobs * seconds_per_job >= self.longest_change_seconds
            or waited[model] >= self.stay_seconds
        ]
        return max(worth, key=lambda model: waited[model], default=None)

    def _waited(self, model: str, waiting: Waiting) -> float:
        left_at = self._left_at.get(model)
        if left_at is None:
            return waiting.age_seconds
        return min(waiting.age_seconds, self.clock() - left_at)
