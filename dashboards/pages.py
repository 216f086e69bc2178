"""The four dashboards; `write.py` turns them into Grafana's JSON and the README's tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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


Figure = partial(Panel, kind="stat")
Dollars = partial(Figure, unit="currencyUSD", decimals=2)
Stack = partial(Panel, kind="stack")
Table = partial(Panel, kind="table")


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; its numbers come first, in one row."""

    name: str
    question: str
    panels: tuple[Panel, ...]


def gained(metric: str) -> str:
    """The exact increase of a counter over the time range shown.

    `increase()` extrapolates, and misses what a worker counted before its first push: a series
    that is absent at the start began at zero, and every process pushes a new series.
    """
    now = f"last_over_time({metric}[$__range])"
    before = f"last_over_time({metric}[5m] offset $__range)"
    return f"sum({now} - ({before} or 0 * {now}))"


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{RATE}))"


def share(part: str, whole: str) -> str:
    """A ratio by the labels of *part*; without data where *whole* is zero."""
    return f"{part} / on () group_left () ({whole} > 0)"


IMAGES = "imagefleet_images_total"
DOLLARS = "imagefleet_cost_dollars_total"
GPU_DOLLARS = 'imagefleet_cost_dollars_total{kind="gpu"}'
STORAGE_DOLLARS = 'imagefleet_cost_dollars_total{kind="storage"}'
WASTED_DOLLARS = "imagefleet_wasted_dollars_total"
THROWN_AWAY = 'imagefleet_wasted_dollars_total{reason=~"failed|duplicate"}'
BUSY_SECONDS = "imagefleet_gpu_busy_seconds_total"
IDLE_SECONDS = "imagefleet_gpu_idle_seconds_total"
STAGE_SECONDS = "imagefleet_stage_seconds"
LORA_LOOKUPS = "imagefleet_lora_cache_total"
LORA_HITS = 'imagefleet_lora_cache_total{result="hit"}'
DONE = 'imagefleet_jobs_total{outcome=~"completed|duplicate"}'
DUPLICATES = 'imagefleet_jobs_total{outcome="duplicate"}'
LOST_OR_RETRIED = 'imagefleet_jobs_total{outcome=~"lost|retried"}'

IMAGES_BY_GPU = f"sum by (gpu) (rate({IMAGES}{RATE}) * {INFO})"
REPLICAS_BY_GPU = "count by (gpu) (imagefleet_worker_info)"
DOLLARS_BY_GPU = f"sum by (gpu) (rate({GPU_DOLLARS}{RATE}) * {INFO})"
NODE_SPEED = f"rate({IMAGES}[5m]) * {NAMED}"

FLEET = Dashboard(
    "fleet",
    "How many images/s, from how many replicas of which GPUs?",
    (
        Figure(
            "Images/s",
            "Is the fleet as fast as it should be?",
            rate(IMAGES),
            unit="none",
            decimals=2,
        ),
        Figure(
            "Replicas",
            "How many workers reported in the last five minutes?",
            "count(imagefleet_worker_info)",
        ),
        Figure(
            "Jobs waiting",
            "How much is left? Includes leased jobs.",
            f"sum(imagefleet:queue_messages{JOBS})",
        ),
        Figure(
            "Time to empty",
            "When is the queue empty, at this speed and with the jobs that still arrive?",
            "max(imagefleet_queue_seconds_to_empty)",
            unit="s",
        ),
        Stack(
            "Images/s by GPU",
            "Which GPUs make the images?",
            {"{{gpu}}": IMAGES_BY_GPU},
            unit="none",
        ),
        Stack("Replicas by GPU", "Did replicas start or stop?", {"{{gpu}}": REPLICAS_BY_GPU}),
        Panel(
            "Images/s per replica, by GPU",
            "How fast is each GPU class? If one slows down, look at its nodes or its driver.",
            {"{{gpu}}": f"{IMAGES_BY_GPU} / {REPLICAS_BY_GPU}"},
            unit="none",
        ),
        Panel(
            "Jobs/s, in and out",
            "Does the queue grow because more jobs arrive or because fewer are done?",
            {
                "arrivals": "sum(imagefleet_exporter_arrivals_per_second)",
                "completions": "sum(imagefleet_exporter_completions_per_second)",
            },
            unit="none",
        ),
        Panel(
            "Messages by queue and state",
            "How long are the queues? Azure reports only the sum: `any`.",
            {"{{queue}}, {{state}}": "max by (queue, state) (imagefleet_queue_messages)"},
        ),
        Panel(
            "Age of the oldest job",
            "How long does a job wait? If it grows while the queue is short, a job is stuck.",
            {"{{queue}}": "max by (queue) (imagefleet_queue_oldest_age_seconds)"},
            unit="s",
        ),
    ),
)

COST = Dashboard(
    "cost",
    "How many images does a dollar buy, and where does the money go?",
    (
        Figure(
            "Images per dollar now, all in",
            "How efficient is the fleet now, storage operations included?",
            "imagefleet:images_per_dollar:all_in",
        ),
        Figure(
            "Images per dollar now, GPU only",
            "The same by the price of the replicas alone, as others publish it.",
            "imagefleet:images_per_dollar:gpu",
        ),
        Figure(
            "Images per dollar in the time range, all in",
            "How efficient was this run? Select its start and end as the time range.",
            f"{gained(IMAGES)} / {gained(DOLLARS)}",
        ),
        Figure(
            "Images per dollar in the time range, GPU only",
            "The same by the price of the replicas alone.",
            f"{gained(IMAGES)} / {gained(GPU_DOLLARS)}",
        ),
        Dollars(
            "Dollars in the time range",
            "How much was spent?",
            gained(DOLLARS),
        ),
        Dollars(
            "$/h now",
            "What does the fleet cost while it runs?",
            "sum(imagefleet_price_dollars_per_hour)",
        ),
        Dollars(
            "Forecast",
            "How much will have been spent when the queue is empty? The time range, plus the rest.",
            {"spent": gained(DOLLARS), "to empty": "max(imagefleet_queue_dollars_to_empty)"},
        ),
        Panel(
            "Images per dollar",
            "When did it change, and is it above the target?",
            {
                "all in": "imagefleet:images_per_dollar:all_in",
                "GPU only": "imagefleet:images_per_dollar:gpu",
                "target": "imagefleet:images_per_dollar:target",
            },
        ),
        Stack(
            "Where the money goes",
            "$/h for stored images, storage operations and each kind of waste.",
            {
                "images": f"3600 * ({rate(GPU_DOLLARS)} - {rate(WASTED_DOLLARS)})",
                "storage operations": f"3600 * {rate(STORAGE_DOLLARS)}",
                "wasted: {{reason}}": f"3600 * {rate(WASTED_DOLLARS, 'reason')}",
            },
            unit="currencyUSD",
        ),
        Panel(
            "Images per dollar by GPU",
            "Which GPU class is worth its price, start-up and idle time included?",
            {"{{gpu}}": f"{IMAGES_BY_GPU} / ({DOLLARS_BY_GPU} > 0)"},
        ),
        Stack(
            "Wasted share of the GPU cost",
            "How much of the replicas' price buys no image, by reason?",
            {"{{reason}}": share(rate(WASTED_DOLLARS, "reason"), rate(GPU_DOLLARS))},
            unit="percentunit",
        ),
        Panel(
            "Storage operations per image",
            "Why do storage operations cost what they do? Usual: one write and a few queue calls.",
            {"{{kind}}": share(rate("imagefleet_storage_operations_total", "kind"), rate(IMAGES))},
            unit="none",
        ),
    ),
)

PIPELINE = Dashboard(
    "pipeline",
    "What keeps the GPUs from being busy all the time?",
    (
        Figure(
            "GPU idle",
            "What share of the time are the GPUs idle? Above 5 % something is wrong.",
            "imagefleet:gpu_idle:ratio",
            unit="percentunit",
            decimals=1,
            bad_above=0.05,
        ),
        Figure(
            "Slots in use",
            "Are the batches full?",
            'sum(imagefleet_slots{state="busy"}) / (sum(imagefleet_slots) > 0)',
            unit="percentunit",
            decimals=0,
        ),
        Figure(
            "Recompiles in the time range",
            "Did the engine compile again after its warm-up? It never should.",
            gained("imagefleet_engine_recompiles_total"),
            bad_above=1,
        ),
        Figure(
            "Start-up, median",
            "For how long is a replica billed before its first job?",
            "quantile(0.5, imagefleet_start_up_seconds)",
            unit="s",
            decimals=0,
        ),
        Stack(
            "GPU idle time by reason",
            "No jobs (queue_empty), preparation too slow (starved), or encoding and upload too slow"
            " (backpressure)?",
            {
                "{{reason}}": share(
                    rate(IDLE_SECONDS, "reason"), f"{rate(BUSY_SECONDS)} + {rate(IDLE_SECONDS)}"
                )
            },
            unit="percentunit",
        ),
        Panel(
            "Mean time by stage",
            "Where does a job spend its time? All stages but generate should overlap with the GPU.",
            {
                "{{stage}}": f"{rate(f'{STAGE_SECONDS}_sum', 'stage')}"
                f" / ({rate(f'{STAGE_SECONDS}_count', 'stage')} > 0)"
            },
            unit="s",
        ),
        Panel(
            "95th percentile by stage",
            "Which stage has a long tail? Slow storage shows in upload, pull and acknowledge.",
            {
                "{{stage}}": "histogram_quantile(0.95,"
                f" {rate(f'{STAGE_SECONDS}_bucket', 'le, stage')})"
            },
            unit="s",
        ),
        Stack(
            "Slots by state",
            "Are slots free while jobs wait?",
            {"{{state}}": "sum by (state) (imagefleet_slots)"},
        ),
        Panel(
            "LoRA cache hits",
            "Are LoRAs cached on disk and in memory? A miss costs a download or a load.",
            {"{{cache}}": f"{rate(LORA_HITS, 'cache')} / ({rate(LORA_LOOKUPS, 'cache')} > 0)"},
            unit="percentunit",
        ),
        Panel(
            "Lease renewals/s",
            "Are leases renewed? A lost lease means that a job runs twice.",
            {"{{result}}": rate("imagefleet_lease_renewals_total", "result")},
            unit="none",
        ),
    ),
)

FAILURES = Dashboard(
    "failures",
    "What fails, how often, and is it the jobs or the nodes?",
    (
        Figure(
            "Failed jobs in the time range",
            "How many jobs went to the poison queue?",
            gained("imagefleet_failed_jobs_total"),
            decimals=0,
            bad_above=1,
        ),
        Figure(
            "In the poison queue",
            "How many failed jobs wait for a decision?",
            f"sum(imagefleet:queue_messages{POISON})",
            bad_above=1,
        ),
        Figure(
            "Duplicate jobs in the time range",
            "What share of the jobs found their images already stored?",
            f"{gained(DUPLICATES)} / ({gained(DONE)} > 0)",
            unit="percentunit",
            decimals=2,
        ),
        Figure(
            "Silent for five minutes, of the last hour",
            "How many workers stopped or vanished?",
            "count(count by (job, instance) (count_over_time(imagefleet_worker_info[1h])))"
            " - (count(imagefleet_worker_info) or vector(0))",
        ),
        Figure(
            "Age of the exporter's last poll",
            "How old are the figures of the queues?",
            "time() - max(imagefleet_exporter_last_look_timestamp_seconds)",
            unit="s",
            decimals=0,
            bad_above=120,
        ),
        Stack(
            "Failed jobs/min by error",
            "Is it bad input (JobError and its subclasses), or the storage and the engine?",
            {"{{error}}": f"60 * {rate('imagefleet_failed_jobs_total', 'error')}"},
            unit="none",
        ),
        Stack(
            "Jobs/s by outcome",
            "How do jobs end? Retried and lost ones come back.",
            {"{{outcome}}": rate("imagefleet_jobs_total", "outcome")},
            unit="none",
        ),
        Panel(
            "Poison queues",
            "When did they grow?",
            {"{{queue}}": f"imagefleet:queue_messages{POISON}"},
        ),
        Stack(
            "Wasted work",
            "$/h for images that failed or were already stored.",
            {"{{reason}}": f"3600 * {rate(THROWN_AWAY, 'reason')}"},
            unit="currencyUSD",
        ),
        Table(
            "Slowest nodes of their GPU class",
            "Which nodes are slower than the median of their class? Replace those under 0.67.",
            f"bottomk(10, {NODE_SPEED} / on (gpu) group_left ()"
            f" (quantile by (gpu) (0.5, {NODE_SPEED}) > 0))",
            unit="percentunit",
        ),
        Table(
            "Jobs lost or retried, by node",
            "Is it a single machine? Failed jobs are not counted: most fail on any machine.",
            f"topk(10, sum by (job, instance) (increase({LOST_OR_RETRIED}[$__range])) * {NAMED})",
        ),
    ),
)

DASHBOARDS = (FLEET, COST, PIPELINE, FAILURES)
