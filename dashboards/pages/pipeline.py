"""What a job waits for."""

from pages.panel import Dashboard, Figure, Panel, Stack
from pages.queries import (
    BUSY_SECONDS,
    IDLE_SECONDS,
    STAGE_COUNT,
    STAGE_SUM,
    START_UP,
    gained,
    rate,
    series,
    share,
)

STAGE_BUCKETS = series("imagefleet_stage_seconds_bucket")
SLOTS = series("imagefleet_slots")
BUSY_SLOTS = series("imagefleet_slots", 'state="busy"')
LORA_LOOKUPS = series("imagefleet_lora_cache_total")
LORA_HITS = series("imagefleet_lora_cache_total", 'result="hit"')

PIPELINE = Dashboard(
    "pipeline",
    "What keeps the GPUs from being busy all the time?",
    (
        Figure(
            "GPU idle",
            "What share of the time are the GPUs idle? Above 5 % something is wrong.",
            series("imagefleet:gpu_idle:ratio"),
            unit="percentunit",
            decimals=1,
            bad_above=0.05,
        ),
        Figure(
            "Slots in use",
            "Are the batches full? Under a half the queue or the preparation is too slow.",
            f"sum by (fleet) ({BUSY_SLOTS}) / (sum by (fleet) ({SLOTS}) > 0)",
            unit="percentunit",
            decimals=0,
            bad_below=0.5,
        ),
        Figure(
            "Graphs compiled in the time range",
            "Do nodes compile for themselves what others of the same GPU have compiled?",
            gained(series("imagefleet_engine_graphs_total", 'origin="compiled"')),
        ),
        Figure(
            "Start-up, median",
            "For how long is a replica billed before its first job?",
            f"quantile by (fleet) (0.5, {START_UP})",
            unit="s",
            decimals=0,
            bad_above=600,
        ),
        Stack(
            "GPU idle time by reason",
            "No jobs (queue_empty), preparation too slow (starved), encoding and upload too slow"
            " (backpressure), or another model that is loaded (switch)?",
            {
                "{{reason}}": share(
                    rate(IDLE_SECONDS, "reason"),
                    f"{rate(BUSY_SECONDS)} + {rate(IDLE_SECONDS)}",
                )
            },
            unit="percentunit",
            bad_above=0.05,
        ),
        Panel(
            "Mean time by stage",
            "Where does a job spend its time? All stages but generate should overlap with the GPU.",
            {
                "{{stage}}": f"{rate(STAGE_SUM, 'stage')} / ({rate(STAGE_COUNT, 'stage')} > 0)"
            },
            unit="s",
        ),
        Panel(
            "95th percentile by stage",
            "Which stage has a long tail? Slow storage shows in upload, pull and acknowledge.",
            {
                "{{stage}}": f"histogram_quantile(0.95, {rate(STAGE_BUCKETS, 'le, stage')})"
            },
            unit="s",
        ),
        Stack(
            "Slots by state",
            "Are slots free while jobs wait?",
            {"{{state}}": f"sum by (state) ({SLOTS})"},
        ),
        Panel(
            "LoRA cache hits",
            "Are LoRAs cached on disk and in memory? A miss costs a download or a load.",
            {
                "{{cache}}": f"{rate(LORA_HITS, 'cache')} / ({rate(LORA_LOOKUPS, 'cache')} > 0)"
            },
            unit="percentunit",
        ),
        Panel(
            "Lease renewals/s",
            "Are leases renewed? A lost lease means that a job runs twice.",
            {"{{result}}": rate(series("imagefleet_lease_renewals_total"), "result")},
            unit="none",
        ),
    ),
)
