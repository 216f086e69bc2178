"""What fails."""

from pages.panel import Dashboard, Figure, Panel, Stack, Table
from pages.queries import (
    FAILED_JOBS,
    INFO,
    JOBS_ENDED,
    NAMED,
    ONE_GPU,
    gained,
    rate,
    series,
)

FAILED = series("imagefleet_failed_jobs_total")
DONE = series("imagefleet_jobs_total", 'outcome=~"completed|duplicate"')
DUPLICATES = series("imagefleet_jobs_total", 'outcome="duplicate"')
LOST_OR_RETRIED = series("imagefleet_jobs_total", 'outcome=~"lost|retried"')
THROWN_AWAY = series("imagefleet_wasted_dollars_total", 'reason=~"failed|duplicate"')
LAST_POLL = series("imagefleet_exporter_last_look_timestamp_seconds")
LAST_HOUR = f"last_over_time({INFO}[1h])"

FAILURES = Dashboard(
    "failures",
    "What fails, how often, and is it the jobs or the nodes?",
    (
        Figure(
            "Failed jobs in the time range",
            "How many jobs went to the poison queue?",
            gained(FAILED),
            decimals=0,
            bad_above=1,
        ),
        Figure(
            "In the poison queue",
            "How many failed jobs wait for a decision?",
            f"sum by (fleet) ({FAILED_JOBS})",
            bad_above=1,
        ),
        Figure(
            "Duplicate jobs in the time range",
            "What share of the jobs found their images already stored? Above 1 % leases are lost.",
            f"{gained(DUPLICATES)} / ({gained(DONE)} > 0)",
            unit="percentunit",
            decimals=2,
            bad_above=0.01,
        ),
        Figure(
            "Silent for five minutes, of the last hour",
            "How many workers stopped or vanished?",
            f"count by (fleet) ({LAST_HOUR} unless on ({ONE_GPU}) {INFO})"
            f" or 0 * count by (fleet) ({LAST_HOUR})",
        ),
        Figure(
            "Age of the exporter's last poll",
            "How old are the figures of the queues?",
            f"time() - max by (fleet) ({LAST_POLL})",
            unit="s",
            decimals=0,
            bad_above=120,
        ),
        Stack(
            "Failed jobs/min by error",
            "Is it bad input (JobError and its subclasses), or the storage and the engine?",
            {"{{error}}": f"60 * {rate(FAILED, 'error')}"},
            unit="none",
        ),
        Stack(
            "Jobs/s by outcome",
            "How do jobs end? Retried and lost ones come back.",
            {"{{outcome}}": rate(JOBS_ENDED, "outcome")},
            unit="none",
        ),
        Panel(
            "Poison queues",
            "When did they grow?",
            {"{{fleet}}: {{queue}}": FAILED_JOBS},
        ),
        Stack(
            "Wasted work",
            "$/h for images that failed or were already stored.",
            {"{{reason}}": f"3600 * {rate(THROWN_AWAY, 'reason')}"},
            unit="currencyUSD",
        ),
        Table(
            "Jobs lost or retried, by node",
            "Is it a single machine? Failed jobs are not counted: most fail on any machine.",
            {
                "jobs": f"topk(10, sum by ({ONE_GPU})"
                f" (increase({LOST_OR_RETRIED}[$__range])) * {NAMED})"
            },
            decimals=0,
        ),
    ),
)
