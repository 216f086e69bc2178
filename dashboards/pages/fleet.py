"""How fast the fleet is."""

from pages.panel import Dashboard, Figure, Panel, Stack
from pages.queries import (
    ENDED,
    GROWTH,
    IMAGES,
    IMAGES_BY_GPU,
    INFO,
    MODEL_IMAGES,
    MODEL_JOBS,
    MODEL_SWITCH_SECONDS,
    QUEUES,
    REPLICAS_BY_GPU,
    SECONDS_TO_EMPTY,
    WAITING_JOBS,
    rate,
    series,
)

FLEET = Dashboard(
    "fleet",
    "How many images/s, from how many replicas of which GPUs?",
    (
        Figure(
            "Images/s",
            "Is the fleet as fast as it should be?",
            rate(IMAGES, "fleet"),
            unit="none",
            decimals=2,
        ),
        Figure(
            "Replicas",
            "How many workers reported in the last five minutes?",
            f"count by (fleet) ({INFO})",
        ),
        Figure(
            "Jobs waiting",
            "How much is left? Includes leased jobs.",
            f"sum by (fleet) ({WAITING_JOBS})",
        ),
        Figure(
            "Time to empty",
            "When is the queue empty, at this speed and with the jobs that still arrive?",
            SECONDS_TO_EMPTY,
            unit="s",
        ),
        Stack(
            "Images/s by GPU",
            "Which GPUs make the images?",
            {"{{gpu}}": IMAGES_BY_GPU},
            unit="none",
        ),
        Stack(
            "Replicas by GPU",
            "Did replicas start or stop?",
            {"{{gpu}}": REPLICAS_BY_GPU},
        ),
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
                "arrivals": f"clamp_min(sum({GROWTH}) + {ENDED}, 0)",
                "completions": ENDED,
            },
            unit="none",
        ),
        Panel(
            "Messages by queue and state",
            "How long are the queues? Azure reports only the sum: `any`.",
            {
                "{{fleet}}: {{queue}}, {{state}}": f"max by (fleet, queue, state) ({QUEUES})"
            },
        ),
        Stack(
            "Jobs waiting, by model",
            "Which models do jobs wait for? One that only grows has no worker.",
            {"{{fleet}}: {{model}}": f"max by (fleet, model) ({MODEL_JOBS})"},
        ),
        Stack(
            "Images/s by model",
            "Which models make the images?",
            {"{{model}}": rate(MODEL_IMAGES, "model")},
            unit="none",
        ),
        Panel(
            "GPU time lost to changes of models",
            "What share of the time do workers load another model? Above 7 % too many share them.",
            {
                "{{fleet}}": f"{rate(MODEL_SWITCH_SECONDS, 'fleet')} / count by (fleet) ({INFO})"
            },
            unit="percentunit",
            bad_above=0.07,
        ),
        Panel(
            "Age of the oldest job",
            "How long does a job wait? If it grows while the queue is short, a job is stuck.",
            {
                "{{fleet}}: {{queue}}": "max by (fleet, queue)"
                f" ({series('imagefleet_queue_oldest_age_seconds')})"
            },
            unit="s",
        ),
    ),
)
