"""A campaign's figures for the report's JSON and page: from its records, and from Prometheus."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.monitor import rates
from fleet.monitor.prometheus import Prometheus
from fleet.report.records import Model, Records, Worker
from imagefleet.pricing import prices

#: The most points of the throughput plot: enough to see a dip.
_MAX_BINS = 96

#: Distinct errors shown: failures have few causes.
_MAX_ERRORS = 20

#: Models shown.
_MAX_MODELS = 50

#: A worker below this share of the median speed of its GPU class is slow.
SLOW_SHARE = 2 / 3


@dataclass(frozen=True, slots=True)
class Money:
    """The cost of the campaign; the GPU part is None if a price is unknown."""

    gpu_dollars: float | None
    storage_dollars: float
    dollars: float | None
    images_per_dollar_gpu_only: float | None
    images_per_dollar: float | None
    price_source: str


@dataclass(frozen=True, slots=True)
class Failure:
    error: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Mean images/s of the bin that starts at *at* (Unix seconds)."""

    at: int
    images_per_second: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures computed from the records in storage."""

    campaign: str
    storage: str
    began_at: datetime | None
    ended_at: datetime | None
    seconds: float | None
    jobs: int
    images: int
    image_bytes: int
    images_per_second: float | None
    images_redelivered: int
    seconds_in_worker_median: float | None
    seconds_in_worker_p95: float | None
    failed: int
    cancelled: int
    failures: Sequence[Failure]
    money: Money
    workers: Sequence[Worker]
    models: Sequence[Model]
    bin_seconds: int
    throughput: Sequence[Rate]
    damaged: int
    damage: Sequence[str]
    """The first reasons why records and samples are left out."""
    notes: Sequence[str]


def compute(
    records: Records,
    storage_url: str,
    table: prices.PriceTable,
    price_source: str,
) -> Figures:
    """The figures of *records*, whose workers and models are completed."""
    workers = _workers(records)
    began_at = min((worker.began_at for worker in workers), default=None)
    ended_at = max((worker.last_image_at for worker in workers), default=None)
    seconds = (ended_at - began_at).total_seconds() if began_at and ended_at else None
    bin_seconds, throughput = _throughput(records.stored_in_second)
    return Figures(
        campaign=records.campaign,
        storage=storage_url,
        began_at=began_at,
        ended_at=ended_at,
        seconds=seconds,
        jobs=records.jobs,
        images=records.images,
        image_bytes=records.image_bytes,
        images_per_second=records.images / seconds if seconds else None,
        images_redelivered=records.images_redelivered,
        seconds_in_worker_median=records.time_in_worker(0.5),
        seconds_in_worker_p95=records.time_in_worker(0.95),
        failed=records.failed,
        cancelled=records.cancelled,
        failures=[
            Failure(error, reason, count)
            for (error, reason), count in records.failed_by_error.most_common(_MAX_ERRORS)
        ],
        money=_money(records, workers, table, price_source),
        workers=workers,
        models=_models(records),
        bin_seconds=bin_seconds,
        throughput=throughput,
        damaged=records.damaged.count,
        damage=records.damaged.reasons,
        notes=_notes(records, workers, table),
    )


def _workers(records: Records) -> list[Worker]:
    """The workers with what is computed of each, the fastest first."""
    workers = list(records.workers.values())
    speeds: dict[str | None, list[float]] = {}
    for worker in workers:
        working = (worker.last_image_at - worker.first_pull_at).total_seconds()
        if working > 0 and worker.images > 1:
            worker.images_per_second = worker.images / working
            speeds.setdefault(worker.gpu, []).append(worker.images_per_second)
        if worker.dollars_per_hour:
            worker.gpu_dollars = worker.seconds / 3600 * worker.dollars_per_hour
    slow = {gpu: SLOW_SHARE * statistics.median(each) for gpu, each in speeds.items()}
    for worker in workers:
        speed = worker.images_per_second
        worker.is_slow = speed is not None and speed < slow[worker.gpu]
    return sorted(workers, key=lambda each: each.images_per_second or 0, reverse=True)


def _models(records: Records) -> list[Model]:
    """The models of most images."""
    models = sorted(records.models.values(), key=lambda each: each.images, reverse=True)
    for model in models:
        cost = model.gpu_dollars
        model.images_per_dollar_gpu_only = model.images / cost if cost else None
    return models[:_MAX_MODELS]


def _money(
    records: Records,
    workers: Sequence[Worker],
    table: prices.PriceTable,
    price_source: str,
) -> Money:
    # The messages of failed jobs are sent, received and deleted, too.
    storage_dollars = prices.storage_dollars(records.jobs + records.failed, records.images, table)
    priced = [worker.gpu_dollars for worker in workers if worker.gpu_dollars is not None]
    gpu_dollars = sum(priced) if priced and len(priced) == len(workers) else None
    dollars = None if gpu_dollars is None else gpu_dollars + storage_dollars
    return Money(
        gpu_dollars=gpu_dollars,
        storage_dollars=storage_dollars,
        dollars=dollars,
        images_per_dollar_gpu_only=records.images / gpu_dollars if gpu_dollars else None,
        images_per_dollar=records.images / dollars if dollars else None,
        price_source=price_source,
    )


def _throughput(stored_in_second: Counter[int]) -> tuple[int, list[Rate]]:
    """Bins over the whole period, empty ones included, so that a pause shows."""
    if not stored_in_second:
        return 1, []
    begin, end = min(stored_in_second), max(stored_in_second)
    step = (end - begin) // _MAX_BINS + 1
    bins: Counter[int] = Counter()
    for second, count in stored_in_second.items():
        bins[second // step] += count
    return step, [
        Rate(number * step, bins[number] / step) for number in range(begin // step, end // step + 1)
    ]


def _notes(records: Records, workers: Sequence[Worker], table: prices.PriceTable) -> list[str]:
    """What the figures include and what they leave out."""
    notes = [
        "Images, sizes and times come from the workers' records, by the workers' clocks.",
        (
            "A worker's time runs from its first pull to its last image of this campaign, plus"
            " its start-up if that was recorded. Idle time before and after, and workers that"
            " stored nothing, are not included. Time shared with another campaign counts in full."
        ),
        (
            "Wasted work (duplicates, images of jobs that failed) leaves no record in storage; the"
            " metrics include it (--prometheus)."
        ),
        f"Storage operations: {table.storage.source}; keeping the images is not included.",
    ]
    if records.cancelled:
        notes.append(f"Jobs cancelled: {records.cancelled:,}.")
    if not all(worker.dollars_per_hour for worker in workers):
        notes.append(
            "Not every worker recorded its price: give --price-per-hour or --gpu to get the cost."
        )
    if records.campaign != "default":
        notes.append(
            "An invalid message names no campaign: it counts as a failed job of 'default'."
        )
    return notes


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
