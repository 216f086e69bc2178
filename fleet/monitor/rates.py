"""Rates of a fleet over the last minutes, queried from Prometheus.

The queries use the workers' own series: they need no recording rules. All functions raise the
errors of `Prometheus.at`.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from cli import console
from fleet.monitor.prometheus import Prometheus
from imagefleet import concurrency, validation
from imagefleet.errors import FleetError
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict

#: Long enough for several pushes or scrapes, short enough to show a change.
WINDOW = "2m"

_INFO = "imagefleet_worker_info{$fleet}"
_IMAGES = f"rate(imagefleet_images_total{{$fleet}}[{WINDOW}])"
_DOLLARS = f"rate(imagefleet_cost_dollars_total{{$fleet}}[{WINDOW}])"
_GPU_DOLLARS = f'rate(imagefleet_cost_dollars_total{{kind="gpu",$fleet}}[{WINDOW}])'
_BUSY = f"rate(imagefleet_gpu_busy_seconds_total{{$fleet}}[{WINDOW}])"
_IDLE = f"rate(imagefleet_gpu_idle_seconds_total{{$fleet}}[{WINDOW}])"
_OUTCOMES = 'outcome=~"completed|duplicate|failed|dropped|verified|unverified"'
_DROPPED = f"rate(imagefleet_dropped_images_total{{$fleet}}[{WINDOW}])"
_ENDED = f"rate(imagefleet_jobs_total{{{_OUTCOMES},$fleet}}[{WINDOW}])"
_MODEL_ENDED = f"rate(imagefleet_model_jobs_total{{{_OUTCOMES},$fleet}}[{WINDOW}])"

#: Queries of the figures of a fleet.
_FIGURES = {
    "images_per_second": f"sum({_IMAGES})",
    "gpu_idle_fraction": f"sum({_IDLE}) / (sum({_IDLE}) + sum({_BUSY}))",
    # The storage's cost alone, without the GPU's, would give far too high a figure.
    "images_per_dollar": f"sum({_IMAGES}) / (sum({_DOLLARS}) and sum({_GPU_DOLLARS}) > 0)",
    "kept_share": f"sum({_IMAGES}) / (sum({_IMAGES}) + (sum({_DROPPED}) > 0))",
    "workers": f"count({_INFO})",
    "replicas": f"count(count by (instance) ({_INFO}))",
    "jobs_per_second": f"sum({_ENDED})",
    "dollars_per_hour": f"3600 * sum({_DOLLARS})",
    "images_per_dollar_gpu_only": f"sum({_IMAGES}) / sum({_GPU_DOLLARS})",
}

#: Those that are whole numbers. Replicas are machines: each has a worker for each of its GPUs.
_COUNTS = ("workers", "replicas")

#: Days in which a fleet counts as known: a server may keep no more than two weeks.
KNOWN_DAYS = 7

_Answer = TypeVar("_Answer")


async def fleet_rates(prometheus: Prometheus) -> JSONDict:
    """Rates of the whole fleet by the names of `_FIGURES`; None where there is no data."""
    now = datetime.now(UTC)
    asked = (prometheus.at(query, now) for query in _FIGURES.values())
    answers = zip(_FIGURES, await concurrency.gather(*asked), strict=True)
    found = {name: series[0].last if series else None for name, series in answers}
    for name in _COUNTS:
        # Prometheus has no whole numbers, and another server may answer in its place.
        found[name] = int(found[name] or 0)
    return found


async def ask(
    server: Prometheus | None, query: Callable[[Prometheus], Awaitable[_Answer]]
) -> _Answer | None:
    """Answer of *query*; None without a server, and in an outage of it, which is logged."""
    try:
        return await query(server) if server else None
    except FleetError as error:
        log.warning(f"without the metrics: {error}", action="metrics_unknown")
        return None


async def warn_of_unknown_fleet(prometheus: Prometheus) -> None:
    """Warns of a fleet that no worker has named in the last days, where others have."""
    query = f"count by (fleet) (last_over_time(imagefleet_worker_info[{KNOWN_DAYS}d]))"
    found = await prometheus.at(query, datetime.now(UTC))
    fleets = sorted(each.labels.get("fleet", "") for each in found)
    if fleets and prometheus.fleet not in {None, *fleets}:
        hint = validation.suggestion(prometheus.fleet or "", fleets)
        hint = hint or f"; --fleet chooses another, such as {', '.join(fleets)[:200]}"
        console.print_warning(
            f"the metrics have no worker of the fleet {prometheus.fleet}{hint}"
        )


async def replica_jobs_per_second(prometheus: Prometheus) -> dict[str, float]:
    """The jobs that the mean replica ends, by the model they are drawn with."""
    query = f"sum by (model) ({_MODEL_ENDED}) / scalar({_FIGURES['replicas']})"
    return {
        series.labels.get("model", ""): series.last
        for series in await prometheus.at(query, datetime.now(UTC))
    }
