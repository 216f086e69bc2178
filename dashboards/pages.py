"""What the four pages show; `write.py` turns it into Grafana's JSON and the README's tables."""

from __future__ import annotations

from panels import INFO, JOBS, NAMED, POISON, RATE, Dashboard, Panel, Query, gained, rate

GPU_DOLLARS = 'imagefleet_cost_dollars_total{kind="gpu"}'
STORAGE_DOLLARS = 'imagefleet_cost_dollars_total{kind="storage"}'
LORA_HITS = 'imagefleet_lora_cache_total{result="hit"}'
DUPLICATES = 'imagefleet_jobs_total{outcome="duplicate"}'
DONE = 'imagefleet_jobs_total{outcome=~"completed|duplicate"}'
THROWN_AWAY = 'imagefleet_wasted_dollars_total{reason=~"failed|duplicate"}'

FLEET = Dashboard(
    "fleet",
    "imagefleet: Fleet",
    "How many images/s, from how many replicas of which cards?",
    (
        Panel(
            "Images/s",
            "Is the fleet as fast as it should be, now?",
            "none",
            (Query(rate("imagefleet_images_total")),),
            "stat",
            decimals=2,
        ),
        Panel(
            "Replicas",
            "How many workers have told of themselves in the last five minutes?",
            "short",
            (Query("count(imagefleet_worker_info)"),),
            "stat",
        ),
        Panel(
            "Jobs waiting",
            "How much is left? Leased jobs are counted.",
            "short",
            (Query(f"sum(imagefleet:queue_messages{JOBS})"),),
            "stat",
        ),
        Panel(
            "Time to empty",
            "When is it done, at this speed and with what still arrives?",
            "s",
            (Query("max(imagefleet_queue_seconds_to_empty)"),),
            "stat",
        ),
        Panel(
            "Images/s by GPU",
            "Which cards make the images?",
            "none",
            (
                Query(
                    f"sum by (gpu) (rate(imagefleet_images_total{RATE}) * {INFO})",
                    "{{gpu}}",
                ),
            ),
            "stack",
        ),
        Panel(
            "Replicas by GPU",
            "Did replicas come or go?",
            "short",
            (Query("count by (gpu) (imagefleet_worker_info)", "{{gpu}}"),),
            "stack",
        ),
        Panel(
            "Images/s of one replica, by GPU",
            "How fast is each card? A fall of one class points at its nodes or its driver.",
            "none",
            (
                Query(
                    f"sum by (gpu) (rate(imagefleet_images_total{RATE}) * {INFO})"
                    " / count by (gpu) (imagefleet_worker_info)",
                    "{{gpu}}",
                ),
            ),
        ),
        Panel(
            "Jobs/s, in and out",
            "Does the queue grow because more arrives or because less is done?",
            "none",
            (
                Query("sum(imagefleet_exporter_arrivals_per_second)", "arrive"),
                Query("sum(imagefleet_exporter_completions_per_second)", "leave"),
            ),
        ),
        Panel(
            "Messages by queue and state",
            "How deep are the queues? Azure tells the sum alone: `any`.",
            "short",
            (Query("max by (queue, state) (imagefleet_queue_messages)", "{{queue}}, {{state}}"),),
        ),
        Panel(
            "Age of the oldest job",
            "How long does a job wait? An age that grows with a short queue is a stuck job.",
            "s",
            (Query("max by (queue) (imagefleet_queue_oldest_age_seconds)", "{{queue}}"),),
        ),
    ),
)

COST = Dashboard(
    "cost",
    "imagefleet: Cost",
    "How many images does a dollar buy, and where does the rest of it go?",
    (
        Panel(
            "Images per dollar now, all in",
            "What does the fleet earn at this moment, storage operations paid?",
            "short",
            (Query("imagefleet:images_per_dollar:all_in"),),
            "stat",
        ),
        Panel(
            "Images per dollar now, GPU only",
            "The same by the price of the replicas alone, as others publish it.",
            "short",
            (Query("imagefleet:images_per_dollar:gpu"),),
            "stat",
        ),
        Panel(
            "Images per dollar, time shown, all in",
            "What did this run come to? Choose its begin and end as the time range.",
            "short",
            (
                Query(
                    f"{gained('imagefleet_images_total')}"
                    f" / {gained('imagefleet_cost_dollars_total')}"
                ),
            ),
            "stat",
        ),
        Panel(
            "Images per dollar, time shown, GPU only",
            "The same by the price of the replicas alone.",
            "short",
            (Query(f"{gained('imagefleet_images_total')} / {gained(GPU_DOLLARS)}"),),
            "stat",
        ),
        Panel(
            "Dollars, time shown",
            "What was spent?",
            "currencyUSD",
            (Query(gained("imagefleet_cost_dollars_total")),),
            "stat",
            decimals=2,
        ),
        Panel(
            "Dollars per hour now",
            "What does it cost to leave this running?",
            "currencyUSD",
            (Query("sum(imagefleet_price_dollars_per_hour)"),),
            "stat",
            decimals=2,
        ),
        Panel(
            "Forecast",
            "What will have been spent when the queue is empty? The time shown, and what is left.",
            "currencyUSD",
            (
                Query(gained("imagefleet_cost_dollars_total"), "spent"),
                Query("max(imagefleet_queue_dollars_to_empty)", "to empty"),
            ),
            "stat",
            decimals=2,
        ),
        Panel(
            "Images per dollar",
            "Since when is it better or worse, and is it above the target?",
            "short",
            (
                Query("imagefleet:images_per_dollar:all_in", "all in"),
                Query("imagefleet:images_per_dollar:gpu", "GPU only"),
                Query("imagefleet:images_per_dollar:target", "target"),
            ),
        ),
        Panel(
            "Where the money goes",
            "Dollars per hour: images that are stored, storage operations, and each kind of waste.",
            "currencyUSD",
            (
                Query(
                    f"3600 * ({rate(GPU_DOLLARS)} - {rate('imagefleet_wasted_dollars_total')})",
                    "images",
                ),
                Query(
                    f"3600 * {rate(STORAGE_DOLLARS)}",
                    "storage operations",
                ),
                Query(
                    f"3600 * {rate('imagefleet_wasted_dollars_total', 'reason')}",
                    "wasted: {{reason}}",
                ),
            ),
            "stack",
        ),
        Panel(
            "Images per dollar by GPU",
            "Which card pays, start-up and idle time included?",
            "short",
            (
                Query(
                    f"sum by (gpu) (rate(imagefleet_images_total{RATE}) * {INFO})"
                    f" / (sum by (gpu) (rate({GPU_DOLLARS}{RATE}) * {INFO}) > 0)",
                    "{{gpu}}",
                ),
            ),
        ),
        Panel(
            "Wasted share of the GPU dollars",
            "How much of the replicas' price buys no image, by reason?",
            "percentunit",
            (
                Query(
                    f"{rate('imagefleet_wasted_dollars_total', 'reason')}"
                    f" / on () group_left () ({rate(GPU_DOLLARS)} > 0)",
                    "{{reason}}",
                ),
            ),
            "stack",
        ),
        Panel(
            "Storage operations an image",
            "Why do storage operations cost what they do? One write and a few calls are usual.",
            "none",
            (
                Query(
                    f"{rate('imagefleet_storage_operations_total', 'kind')}"
                    f" / on () group_left () ({rate('imagefleet_images_total')} > 0)",
                    "{{kind}}",
                ),
            ),
        ),
    ),
)

GPU_SECONDS = (
    f"({rate('imagefleet_gpu_busy_seconds_total')}"
    f" + {rate('imagefleet_gpu_idle_seconds_total')} > 0)"
)

PIPELINE = Dashboard(
    "pipeline",
    "imagefleet: Pipeline",
    "What keeps the GPUs from making images all the time?",
    (
        Panel(
            "GPU idle",
            "What share of their time do the GPUs wait? Above 5 % something is wrong.",
            "percentunit",
            (Query("imagefleet:gpu_idle:ratio"),),
            "stat",
            decimals=1,
            bad_above=0.05,
        ),
        Panel(
            "Slots in use",
            "Are the batches full?",
            "percentunit",
            (
                Query(
                    'sum(imagefleet_slots{state="busy"}) / (sum(imagefleet_slots) > 0)',
                ),
            ),
            "stat",
            decimals=0,
        ),
        Panel(
            "Recompiles, time shown",
            "Did the engine compile again after its warm-up? It never should.",
            "short",
            (Query(gained("imagefleet_engine_recompiles_total")),),
            "stat",
            bad_above=1,
        ),
        Panel(
            "Start-up, median",
            "How long is a replica paid before its first job?",
            "s",
            (Query("quantile(0.5, imagefleet_start_up_seconds)"),),
            "stat",
            decimals=0,
        ),
        Panel(
            "Why the GPUs waited",
            "Share of their time: no jobs (queue_empty), jobs too slow to come (starved), images"
            " too slow to leave (backpressure).",
            "percentunit",
            (
                Query(
                    f"{rate('imagefleet_gpu_idle_seconds_total', 'reason')}"
                    f" / on () group_left () {GPU_SECONDS}",
                    "{{reason}}",
                ),
            ),
            "stack",
        ),
        Panel(
            "Mean time by stage",
            "Where is a job's time spent? All but generate should hide behind the GPU.",
            "s",
            (
                Query(
                    f"{rate('imagefleet_stage_seconds_sum', 'stage')}"
                    f" / ({rate('imagefleet_stage_seconds_count', 'stage')} > 0)",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            "95th percentile by stage",
            "Which stage has a long tail? A slow store shows in upload, pull and acknowledge.",
            "s",
            (
                Query(
                    "histogram_quantile(0.95,"
                    f" {rate('imagefleet_stage_seconds_bucket', 'le, stage')})",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            "Slots by state",
            "Are places in the batches free while jobs wait?",
            "short",
            (Query("sum by (state) (imagefleet_slots)", "{{state}}"),),
            "stack",
        ),
        Panel(
            "LoRA cache hits",
            "Are LoRAs at hand, on disk and in memory? Misses cost a download or a load.",
            "percentunit",
            (
                Query(
                    f"{rate(LORA_HITS, 'cache')}"
                    f" / ({rate('imagefleet_lora_cache_total', 'cache')} > 0)",
                    "{{cache}}",
                ),
            ),
        ),
        Panel(
            "Lease renewals a second",
            "Are leases kept? Lost ones are work done twice.",
            "none",
            (Query(rate("imagefleet_lease_renewals_total", "result"), "{{result}}"),),
        ),
    ),
)

FAILURES = Dashboard(
    "failures",
    "imagefleet: Failures",
    "What goes wrong, how often, and is it the jobs or the nodes?",
    (
        Panel(
            "Failed jobs, time shown",
            "How many jobs ended in the poison queue?",
            "short",
            (Query(gained("imagefleet_failed_jobs_total")),),
            "stat",
            decimals=0,
            bad_above=1,
        ),
        Panel(
            "In the poison queue",
            "How many wait for somebody to decide?",
            "short",
            (Query(f"sum(imagefleet:queue_messages{POISON})"),),
            "stat",
            bad_above=1,
        ),
        Panel(
            "Done twice, time shown",
            "What share of the jobs found its images stored already?",
            "percentunit",
            (
                Query(
                    f"{gained(DUPLICATES)} / ({gained(DONE)} > 0)",
                ),
            ),
            "stat",
            decimals=2,
        ),
        Panel(
            "Silent for five minutes, of the last hour",
            "How many workers ended or vanished?",
            "short",
            (
                Query(
                    "count(count by (job, instance)"
                    " (count_over_time(imagefleet_worker_info[1h])))"
                    " - (count(imagefleet_worker_info) or vector(0))"
                ),
            ),
            "stat",
        ),
        Panel(
            "The exporter's last look",
            "How old is what is shown of the queues?",
            "s",
            (Query("time() - max(imagefleet_exporter_last_look_timestamp_seconds)"),),
            "stat",
            decimals=0,
            bad_above=120,
        ),
        Panel(
            "Failed jobs a minute by error",
            "Is it one kind of bad input (JobError and its kin), or the store and the engine?",
            "none",
            (Query(f"60 * {rate('imagefleet_failed_jobs_total', 'error')}", "{{error}}"),),
            "stack",
        ),
        Panel(
            "Jobs/s by outcome",
            "What becomes of the jobs? Retried and lost ones come again.",
            "none",
            (Query(rate("imagefleet_jobs_total", "outcome"), "{{outcome}}"),),
            "stack",
        ),
        Panel(
            "Poison queues",
            "Since when do they grow?",
            "short",
            (Query(f"imagefleet:queue_messages{POISON}", "{{queue}}"),),
        ),
        Panel(
            "Work thrown away",
            "Dollars per hour of images that failed or were there already.",
            "currencyUSD",
            (
                Query(
                    f"3600 * {rate(THROWN_AWAY, 'reason')}",
                    "{{reason}}",
                ),
            ),
            "stack",
        ),
        Panel(
            "Slowest nodes against their own class",
            "Which nodes make fewer images than the median of their card? Under 0.67, replace it.",
            "percentunit",
            (
                Query(
                    f"bottomk(10, rate(imagefleet_images_total[5m]) * {NAMED}"
                    " / on (gpu) group_left () (quantile by (gpu)"
                    f" (0.5, rate(imagefleet_images_total[5m]) * {NAMED}) > 0))",
                ),
            ),
            "table",
        ),
        Panel(
            "Jobs lost or retried, by node",
            "Is it one machine? Jobs in the time shown that did not end as they should.",
            "short",
            (
                Query(
                    "topk(10, sum by (job, instance) (increase(imagefleet_jobs_total"
                    '{outcome=~"retried|lost|failed"}[$__range]))'
                    f" * {NAMED})",
                ),
            ),
            "table",
        ),
    ),
)

DASHBOARDS = (FLEET, COST, PIPELINE, FAILURES)
