"""A campaign's figures for the report's JSON and page, computed from its records."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from fleet.report.records import Model, Records, Worker
from imagefleet.pricing import prices
from imagefleet.validation import JSONObject

#: The most bars of the throughput plot: enough to see a dip.
_MAX_BINS = 96

#: Distinct errors shown: failures have few causes.
_MAX_ERRORS = 20

#: Models shown.
_MAX_MODELS = 50

#: A worker below this share of the median speed of its GPU class is slow.
SLOW_SHARE = 2 / 3


#: The report's JSON, which the page shows; a figure that cannot be computed is None.
Figures = JSONObject


def compute(records: Records, storage_url: str, table: prices.PriceTable) -> Figures:
    """The figures of *records*, whose workers and models are completed."""
    workers = _workers(records)
    began_at = min((worker.began_at for worker in workers), default=None)
    ended_at = max((worker.last_image_at for worker in workers), default=None)
    seconds = (ended_at - began_at).total_seconds() if began_at and ended_at else None
    bin_seconds, throughput = _throughput(records.stored_in_second)
    # The messages of failed jobs are sent, received and deleted, too.
    drawn = max(records.images, sum(worker.drawn for worker in workers))
    jobs = records.jobs + records.failed + records.dropped + drawn - records.images
    operations = prices.operations(
        jobs - records.packed, drawn - records.packed, len(records.packs)
    )
    storage_dollars = table.storage.dollars(operations)
    priced = [
        worker.gpu_dollars for worker in workers if worker.gpu_dollars is not None
    ]
    gpu_dollars = sum(priced) if priced and len(priced) == len(workers) else None
    dollars = None if gpu_dollars is None else gpu_dollars + storage_dollars
    return {
        "campaign": records.campaign,
        "storage": storage_url,
        "began_at": began_at,
        "ended_at": ended_at,
        "seconds": seconds,
        "jobs": records.jobs,
        "images": records.images,
        "image_bytes": records.image_bytes,
        "images_per_second": _quotient(records.images, seconds),
        "images_redelivered": records.images_redelivered,
        "images_replaced": sum(each.replaced for each in workers)
        + records.replaced_unrecorded,
        "share_before_first_image": _quotient(
            sum(
                (each.first_image_at - each.began_at).total_seconds()
                for each in workers
            ),
            sum(each.seconds for each in workers),
        ),
        "seconds_in_worker_median": records.time_in_worker(0.5),
        "seconds_in_worker_p95": records.time_in_worker(0.95),
        "failed": records.failed,
        "cancelled": records.cancelled,
        "dropped": records.dropped,
        "images_dropped": records.images_dropped,
        "kept_share": _quotient(
            records.images, records.images + records.images_dropped
        ),
        "failures": [
            {"error": error, "reason": reason, "count": count}
            for (error, reason), count in records.failed_by_error.most_common(
                _MAX_ERRORS
            )
        ],
        "money": {
            "gpu_dollars": gpu_dollars,
            "storage_dollars": storage_dollars,
            "storage_operations": asdict(operations),
            "storage_month_dollars": records.image_bytes
            / 1e9
            * table.storage.gigabyte_month,
            "dollars": dollars,
            "images_per_dollar_gpu_only": _quotient(records.images, gpu_dollars),
            "images_per_dollar": _quotient(records.images, dollars),
            "price_source": "given with --price-per-hour"
            if records.given_price
            else "recorded by the workers with each image",
            "split": None if dollars is None else _split(workers, storage_dollars),
        },
        "workers": [asdict(worker) for worker in workers],
        "models": [asdict(model) for model in _models(records)],
        "bin_seconds": bin_seconds,
        "throughput": throughput,
        "damaged": records.damaged.count,
        "damage": records.damaged.reasons,
        "notes": _notes(records, workers, table),
    }


def _quotient(images: float, by: float | None) -> float | None:
    return images / by if by else None


def _workers(records: Records) -> list[Worker]:
    """The workers with what is computed of each, the fastest first."""
    workers = list(records.workers.values())
    speeds: dict[str | None, list[float]] = {}
    for worker in workers:
        working = (worker.last_image_at - worker.first_pull_at).total_seconds()
        if working > 0 and worker.drawn > 1:
            worker.images_per_second = worker.drawn / working
            speeds.setdefault(worker.gpu, []).append(worker.images_per_second)
        if worker.dollars_per_hour:
            worker.gpu_dollars = worker.seconds / 3600 * worker.dollars_per_hour
    slow = {gpu: SLOW_SHARE * statistics.median(each) for gpu, each in speeds.items()}
    for worker in workers:
        speed = worker.images_per_second
        worker.is_slow = speed is not None and speed < slow[worker.gpu]
    return sorted(workers, key=lambda each: each.images_per_second or 0, reverse=True)


def _split(workers: Sequence[Worker], storage_dollars: float) -> dict[str, float]:
    """Dollars by what they paid for; a worker's time after its start is shared by its drawings."""
    rows = dict.fromkeys(
        ("images", "images_replaced", "images_doubled", "start_up"), 0.0
    )
    for worker in workers:
        start_up = worker.start_up_seconds / 3600 * (worker.dollars_per_hour or 0)
        each = ((worker.gpu_dollars or 0) - start_up) / worker.drawn
        rows["images"] += worker.images * each
        rows["images_replaced"] += worker.replaced * each
        rows["images_doubled"] += worker.doubled * each
        rows["start_up"] += start_up
    return rows | {"storage_operations": storage_dollars}


def _models(records: Records) -> list[Model]:
    """The models of most images."""
    models = sorted(records.models.values(), key=lambda each: each.images, reverse=True)
    for model in models:
        model.images_per_dollar_gpu_only = _quotient(model.images, model.gpu_dollars)
    return models[:_MAX_MODELS]


def _throughput(stored_in_second: Counter[int]) -> tuple[int, list[dict[str, float]]]:
    """Mean rates from Unix seconds on; no empty bin is left out, so that a pause shows."""
    if not stored_in_second:
        return 1, []
    begin = min(stored_in_second)
    end = max(stored_in_second)
    step = (end - begin) // _MAX_BINS + 1
    bins = Counter[int]()
    for second, count in stored_in_second.items():
        bins[second // step] += count
    return step, [
        {"at": number * step, "images_per_second": bins[number] / step}
        for number in range(begin // step, end // step + 1)
    ]


def _notes(
    records: Records, workers: Sequence[Worker], table: prices.PriceTable
) -> list[str]:
    """Sentences on what the figures include and leave out."""
    notes = [
        "Images, sizes and times come from the workers' records, by the storage's clock.",
        "A worker's time runs from its start-up to its last image of the campaign.",
        "What of it went to other campaigns' images is in the reports of those.",
        "Workers that stored nothing, and idle time before and after, are not included.",
        "Images that were replaced or drawn twice were paid, too, and are included.",
        "Other wasted work leaves no record in storage; the dashboards of Grafana show it.",
        f"Storage operations: {table.storage.source}; keeping the images is not included.",
    ]
    if records.cancelled:
        notes.append(f"Jobs cancelled: {records.cancelled:,}.")
    if records.images_dropped:
        notes.append(
            f"Images judged and not stored: {records.images_dropped:,}, of {records.dropped:,} jobs"
            " that kept none and of others; what drawing them cost is in the dollars of the kept"
            " images."
        )
    if not all(worker.dollars_per_hour for worker in workers):
        notes.append(
            "Not every worker recorded its price: give --price-per-hour to get the cost."
        )
    if records.campaign != "default":
        notes.append(
            "An invalid message names no campaign: it counts as a failed job of 'default'."
        )
    return notes
