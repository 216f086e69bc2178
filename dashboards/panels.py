"""The parts of a dashboard: panels, each a question and the queries that answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Grafana makes this interval at least four pushes long.
RATE = "[$__rate_interval]"

#: The job queue, without its poison queue.
JOBS = '{queue!~".+-poison"}'
POISON = '{queue=~".+-poison"}'

#: Only this series has a worker's machine and GPU; everything else joins it on `instance`.
INFO = "on (job, instance) group_left (gpu) imagefleet_worker_info"
NAMED = "on (job, instance) group_left (worker, gpu) imagefleet_worker_info"

Kind = Literal["stat", "lines", "stack", "table"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A number (`stat`), curves (`lines`, `stack`) or rows of the newest values (`table`).

    *queries* maps the legend of each query, a text with {{label}}, to its PromQL; a bare string is
    a single query without a legend.
    """

    title: str
    answers: str
    queries: dict[str, str] | str
    kind: Kind = "lines"
    unit: str = "short"
    decimals: int | None = None
    bad_above: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; its numbers come first, in one row."""

    name: str
    title: str
    question: str
    panels: tuple[Panel, ...]


def gained(metric: str, by: str = "") -> str:
    """The exact increase of a counter over the time range shown.

    `increase()` extrapolates, and misses what a worker counted before its first push: a series
    that is absent at the start began at zero, and every process pushes a new series.
    """
    now = f"last_over_time({metric}[$__range])"
    before = f"last_over_time({metric}[5m] offset $__range)"
    return f"sum{f' by ({by}) ' if by else ''}({now} - ({before} or 0 * {now}))"


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{RATE}))"


def share(part: str, whole: str) -> str:
    """A ratio by the labels of *part*; without data where *whole* is zero."""
    return f"{part} / on () group_left () ({whole} > 0)"
