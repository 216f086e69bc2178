"""What the images cost."""

from pages.panel import Count, Dashboard, Dollars, Figure, Panel, Stack
from pages.queries import (
    CAMPAIGN_DOLLARS,
    CAMPAIGN_IMAGES,
    DOLLARS,
    GPU_DOLLARS,
    IMAGES,
    IMAGES_BY_GPU,
    RATE,
    SECONDS_TO_EMPTY,
    WITH_GPU,
    gained,
    rate,
    reporting,
    series,
    share,
)

ALL_IN = series("imagefleet:images_per_dollar:all_in")
GPU_ONLY = series("imagefleet:images_per_dollar:gpu")
TARGET = series("imagefleet:images_per_dollar:target")
STORAGE_DOLLARS = series("imagefleet_cost_dollars_total", 'kind="storage"')
WASTED_DOLLARS = series("imagefleet_wasted_dollars_total")
WASTED = series("imagefleet_wasted_dollars_total", 'reason!="dropped"')
DROPPED = series("imagefleet_dropped_images_total")
OPERATIONS = series("imagefleet_storage_operations_total")
DOLLARS_BY_GPU = f"sum by (gpu) (rate({GPU_DOLLARS}{RATE}) * {WITH_GPU})"

COST = Dashboard(
    "cost",
    "How many images does a dollar buy, and where does the money go?",
    (
        Figure(
            "Images per dollar now, all in",
            "How efficient is the fleet now, storage operations included?",
            ALL_IN,
        ),
        Figure(
            "Images per dollar now, of the target",
            "Is the fleet worth its price? The target is a recording rule.",
            f"{ALL_IN} / {TARGET}",
            unit="percentunit",
            decimals=0,
            bad_below=1,
        ),
        Figure(
            "Images per dollar now, GPU only",
            "The same by the price of the replicas alone, as others publish it.",
            GPU_ONLY,
        ),
        Dollars(
            "$/h now",
            "What does the fleet cost while it runs?",
            f"sum by (fleet) {reporting(series('imagefleet_price_dollars_per_hour'))}",
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
            "Forecast",
            "How much will have been spent when the queue is empty? The time range, plus the rest.",
            {
                "spent: {{fleet}}": gained(DOLLARS),
                "to empty: {{fleet}}": f"{SECONDS_TO_EMPTY} / 3600"
                f" * on (fleet) {series('imagefleet:dollars_per_hour')}",
            },
        ),
        Count(
            "Images by campaign in the time range",
            "How many images has each campaign? Beyond the first 50 of a worker's as (others).",
            {"{{fleet}}: {{campaign}}": gained(CAMPAIGN_IMAGES, "fleet, campaign")},
        ),
        Dollars(
            "Dollars by campaign in the time range",
            "What did the workers cost that drew its images, start and waiting included?",
            {
                "{{fleet}}: {{campaign}}": CAMPAIGN_DOLLARS,
                "{{fleet}}: workers without an image": f"clamp_min({gained(DOLLARS)}"
                f" - sum by (fleet) ({CAMPAIGN_DOLLARS}), 0)",
            },
        ),
        Panel(
            "Images per dollar",
            "When did it change, and is it above the target?",
            {
                "all in: {{fleet}}": ALL_IN,
                "GPU only: {{fleet}}": GPU_ONLY,
                "target: {{fleet}}": TARGET,
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
            "Kept of the images drawn",
            "Which share of what was drawn passed its judges? Images per dollar are those stored.",
            {
                "{{fleet}}": f"{rate(IMAGES, 'fleet')} / ({rate(IMAGES, 'fleet')}"
                f" + ({rate(DROPPED, 'fleet')} > 0))"
            },
            unit="percentunit",
        ),
        Panel(
            "Images per dollar by GPU",
            "Which GPU class is worth its price, start-up and idle time included?",
            {"{{gpu}}": f"{IMAGES_BY_GPU} / ({DOLLARS_BY_GPU} > 0)"},
        ),
        Stack(
            "Wasted share of the GPU cost",
            "How much of the replicas' price buys no image, by reason? Above a fifth is too much.",
            {"{{reason}}": share(rate(WASTED, "reason"), rate(GPU_DOLLARS))},
            unit="percentunit",
            bad_above=0.2,
        ),
        Panel(
            "Storage operations per million images",
            "What do storage operations cost? A write an image is a million; bundles take 20,000.",
            {"{{kind}}": f"1e6 * {share(rate(OPERATIONS, 'kind'), rate(IMAGES))}"},
            unit="short",
        ),
    ),
)
