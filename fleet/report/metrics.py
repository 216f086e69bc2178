"""What a Prometheus adds to a report: all the money, what was wasted, and why the GPUs waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.monitor.prometheus import Prometheus
from fleet.report.plot import Line

#: The last pushes come after the last image.
TAIL_SECONDS = 120

#: Points of a plot over time.
_POINTS = 120

#: Rates look back over at least this: several pushes.
_LEAST_RATE_SECONDS = 60

#: How far back a counter's value at the beginning may lie; older, it was not running then.
_LOOK_BACK_SECONDS = 300

#: In a job's order.
_STAGES = ("pull", "prepare", "wait_gpu", "generate", "encode", "upload", "acknowledge")


@dataclass(frozen=True, slots=True)
class Metrics:
    """What the fleet did from *began_at* to *ended_at*, whatever campaign it was for."""

    began_at: datetime
    ended_at: datetime
    images: float
    dollars: Mapping[str, float]
    wasted_dollars: Mapping[str, float]
    jobs: Mapping[str, float]
    gpu_busy_seconds: float
    gpu_idle_seconds: Mapping[str, float]
    stage_mean_seconds: Mapping[str, float]
    images_per_dollar_gpu_only: float | None
    images_per_dollar: float | None
    rate_seconds: float
    over_time: Mapping[str, Sequence[tuple[float, float]]]


async def read_metrics(prometheus: Prometheus, began_at: datetime, last_at: datetime) -> Metrics:
    """Reads the window from the campaign's first worker to shortly after its last image."""
    ended_at = last_at + timedelta(seconds=TAIL_SECONDS)
    window = (ended_at - began_at).total_seconds()

    async def gained(metric: str, label: str = "") -> dict[str, float]:
        found = await prometheus.at(_gain(metric, label, window), ended_at)
        return {each.labels.get(label, ""): each.last for each in found}

    images = (await gained("imagefleet_images_total")).get("", 0.0)
    dollars = await gained("imagefleet_cost_dollars_total", "kind")
    gpu, total = dollars.get("gpu", 0.0), sum(dollars.values())
    spent = await gained("imagefleet_stage_seconds_sum", "stage")
    times = await gained("imagefleet_stage_seconds_count", "stage")
    return Metrics(
        began_at=began_at,
        ended_at=ended_at,
        images=images,
        dollars=dollars,
        wasted_dollars=await gained("imagefleet_wasted_dollars_total", "reason"),
        jobs=await gained("imagefleet_jobs_total", "outcome"),
        gpu_busy_seconds=(await gained("imagefleet_gpu_busy_seconds_total")).get("", 0.0),
        gpu_idle_seconds=await gained("imagefleet_gpu_idle_seconds_total", "reason"),
        stage_mean_seconds={
            stage: spent[stage] / times[stage] for stage in _STAGES if times.get(stage)
        },
        images_per_dollar_gpu_only=images / gpu if gpu else None,
        images_per_dollar=images / total if total else None,
        rate_seconds=_rate_seconds(began_at, last_at),
        over_time=await _over_time(prometheus, began_at, last_at),
    )


def lines(metrics: Metrics, names: Mapping[str, str]) -> list[Line]:
    """The curves of *names*: each with the words for its legend."""
    return [
        Line(words, metrics.over_time[name])
        for name, words in names.items()
        if metrics.over_time.get(name)
    ]


def _gain(metric: str, label: str, window_seconds: float) -> str:
    """What a counter gained in a window, exactly.

    `increase()` extrapolates, and misses what a worker had counted before its first push: here a
    series that was not there at the beginning began at zero. Each process that pushes has series
    of its own, so no counter restarts; one that is scraped and restarted at its old address would
    count too little.
    """
    window = f"{window_seconds:.0f}s"
    now = f"last_over_time({metric}[{window}])"
    before = f"last_over_time({metric}[{_LOOK_BACK_SECONDS}s] offset {window})"
    by = f" by ({label})" if label else ""
    return f"sum{by} ({now} - ({before} or 0 * {now}))"


async def _over_time(
    prometheus: Prometheus, begin: datetime, end: datetime
) -> dict[str, Sequence[tuple[float, float]]]:
    step = _step_seconds(begin, end)
    span = f"{_rate_seconds(begin, end):.0f}s"
    images = f"sum(rate(imagefleet_images_total[{span}]))"
    dollars = f"sum(rate(imagefleet_cost_dollars_total[{span}]))"
    gpu_dollars = f'sum(rate(imagefleet_cost_dollars_total{{kind="gpu"}}[{span}]))'
    queries = {
        "workers": "count(imagefleet_worker_info)",
        "images_per_second": images,
        "images_per_dollar_gpu_only": f"{images} / ({gpu_dollars} > 0)",
        "images_per_dollar": f"{images} / ({dollars} > 0)",
    }
    found = {name: await prometheus.over(each, begin, end, step) for name, each in queries.items()}
    return {name: series[0].points if series else () for name, series in found.items()}


def _step_seconds(begin: datetime, end: datetime) -> float:
    return max(1.0, (end - begin).total_seconds() / _POINTS)


def _rate_seconds(begin: datetime, end: datetime) -> float:
    return max(_LEAST_RATE_SECONDS, 2 * _step_seconds(begin, end))
