"""What Prometheus adds to a report: the whole cost, the waste, and why the GPUs were idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.monitor import rates
from fleet.monitor.prometheus import Prometheus

#: The last pushes follow the last image.
TAIL_SECONDS = 120

#: Points of each plot over time.
_POINTS = 120

#: The shortest window of a rate: several pushes.
_MIN_RATE_SECONDS = 60

#: The oldest sample that counts as a counter's value at the start of the window.
_LOOK_BACK_SECONDS = 300

#: The stages, in the order of the pipeline.
_STAGES = ("pull", "prepare", "wait_gpu", "generate", "encode", "upload", "acknowledge")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Totals of the whole fleet from *began_at* to *ended_at*, all campaigns included."""

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
    left_out: str | None = None


async def read_metrics(prometheus: Prometheus, began_at: datetime, last_at: datetime) -> Metrics:
    """Reads the metrics from the campaign's first worker to shortly after its last image."""
    ended_at = last_at + timedelta(seconds=TAIL_SECONDS)
    window = (ended_at - began_at).total_seconds()
    step = max(1.0, (last_at - began_at).total_seconds() / _POINTS)
    span = (began_at, last_at, step)
    rate_seconds = max(_MIN_RATE_SECONDS, 2 * step)

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
        rate_seconds=rate_seconds,
        over_time={
            name: series[0].points if (series := await prometheus.over(query, *span)) else ()
            for name, query in _queries_over_time(f"{rate_seconds:.0f}s").items()
        },
        left_out=await rates.left_out(prometheus, ended_at, f"{window:.0f}s"),
    )


def _gain(metric: str, label: str, window_seconds: float) -> str:
    """A query for the exact increase of a counter in a window.

    `increase()` extrapolates, and misses what a worker counted before its first push: here a series
    that is absent at the start began at zero. Every process pushes its own series, so no counter
    resets; a scraped worker that restarts at the same address is undercounted.
    """
    window = f"{window_seconds:.0f}s"
    now = f"last_over_time({metric}{{$fleet}}[{window}])"
    before = f"last_over_time({metric}{{$fleet}}[{_LOOK_BACK_SECONDS}s] offset {window})"
    by = f" by ({label})" if label else ""
    return f"sum{by} ({now} - ({before} or 0 * {now}))"


def _queries_over_time(window: str) -> dict[str, str]:
    images = f"sum(rate(imagefleet_images_total{{$fleet}}[{window}]))"
    dollars = f"sum(rate(imagefleet_cost_dollars_total{{$fleet}}[{window}]))"
    gpu_dollars = f'sum(rate(imagefleet_cost_dollars_total{{kind="gpu",$fleet}}[{window}]))'
    return {
        "workers": "count(imagefleet_worker_info{$fleet})",
        "images_per_second": images,
        "images_per_dollar_gpu_only": f"{images} / ({gpu_dollars} > 0)",
        "images_per_dollar": f"{images} / ({dollars} > 0)",
    }
