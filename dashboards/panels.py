"""What a page is made of: panels, each a question and the queries that answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The counters' rate; Grafana makes it at least four pushes long.
RATE = "[$__rate_interval]"

#: The job queue, without the poison queue beside it.
JOBS = '{queue!~".+-poison"}'
POISON = '{queue=~".+-poison"}'

#: Only this series knows a worker's machine and GPU; everything else joins it on `instance`.
INFO = "on (job, instance) group_left (gpu) imagefleet_worker_info"
NAMED = "on (job, instance) group_left (worker, gpu) imagefleet_worker_info"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what a series of its answer is called: a text with {{label}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure (`stat`), curves (`lines`, `stack`) or rows of the newest values (`table`)."""

    title: str
    answers: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["stat", "lines", "stack", "table"] = "lines"
    decimals: int | None = None
    bad_above: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page; its figures come first, in one row."""

    name: str
    title: str
    question: str
    panels: tuple[Panel, ...]


def gained(metric: str, by: str = "") -> str:
    """What a counter gained in the time that is shown, exactly.

    `increase()` extrapolates, and misses what a worker counted before its first push: a series
    that was not there at the beginning began at zero, and a new process is a new series.
    """
    now = f"last_over_time({metric}[$__range])"
    before = f"last_over_time({metric}[5m] offset $__range)"
    return f"sum{f' by ({by}) ' if by else ''}({now} - ({before} or 0 * {now}))"


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{RATE}))"
