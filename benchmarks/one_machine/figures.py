"""Figures from samples of a machine's workers: rates, idle time, cores and clocks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from one_machine.workers import Sample
from rows.groups import Figures


def measured(
    samples: Sequence[Sample], gpus: Sequence[str], clocks: Figures
) -> Figures:
    """The figures of one run on *gpus*, from its steady state."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    by_gpu = {}
    for gpu in gpus:
        by_gpu[gpu] = _of_gpu(samples, gpu) | dict(clocks.get(gpu, {}))
    half = len(samples) // 2
    halves = [
        sum(rate(part, gpu) for gpu in gpus)
        for part in (samples[: half + 1], samples[half:])
    ]
    stages = last.stage_counts - first.stage_counts
    return {
        "gpus": len(gpus),
        "images_per_second": sum(each["images_per_second"] for each in by_gpu.values()),
        "idle_fraction": statistics.fmean(
            each["idle_fraction"] for each in by_gpu.values()
        ),
        "seconds": seconds,
        "second_half_over_first": halves[1] / halves[0] if halves[0] else None,
        "cores_used": (last.machine_cpu_seconds - first.machine_cpu_seconds) / seconds,
        "cores_used_by_workers": (last.worker_cpu_seconds - first.worker_cpu_seconds)
        / seconds,
        "graphs_compiled": last.graphs_compiled,
        "stage_seconds": {
            stage: (last.stage_seconds[stage] - first.stage_seconds[stage]) / count
            for stage, count in stages.items()
        },
        "by_gpu": by_gpu,
    }


def _of_gpu(samples: Sequence[Sample], gpu: str) -> Figures:
    first, last = samples[0], samples[-1]
    idle = {
        reason: seconds - first.idle_seconds[gpu][reason]
        for reason, seconds in last.idle_seconds[gpu].items()
    }
    busy = last.busy_seconds[gpu] - first.busy_seconds[gpu]
    images_per_second = rate(samples, gpu)
    busy_fraction = busy / (busy + sum(idle.values()))
    return {
        "images_per_second": images_per_second,
        "images_per_busy_second": images_per_second / busy_fraction,
        "idle_fraction": 1 - busy_fraction,
        "idle_seconds": idle,
    }


def compared(one: Figures, many: Figures) -> Figures:
    """The share of perfect linear, and what it is made of."""
    own = next(iter(one["by_gpu"].values()))
    each = many["by_gpu"].values()
    share = many["images_per_second"] / (many["gpus"] * one["images_per_second"])
    speed = statistics.fmean(gpu["images_per_busy_second"] for gpu in each)
    found: Figures = {
        "linear_fraction": share,
        "speed_while_busy_over_one": speed / own["images_per_busy_second"],
        "busy_time_over_one": (1 - many["idle_fraction"]) / (1 - one["idle_fraction"]),
    }
    if all("sm_megahertz" in gpu for gpu in (own, *each)):
        clock = statistics.fmean(gpu["sm_megahertz"] for gpu in each)
        found["clock_over_one"] = clock / own["sm_megahertz"]
    reasons: dict[str, float] = {}
    for gpu in each:
        for reason, seconds in gpu["idle_seconds"].items():
            reasons[reason] = reasons.get(reason, 0.0) + seconds
    found["idle_seconds"] = reasons
    found["stage_seconds_longer"] = {
        stage: seconds - one["stage_seconds"].get(stage, 0.0)
        for stage, seconds in many["stage_seconds"].items()
    }
    return found


def rounded(figures: Any) -> Any:
    """Rounds all figures to four decimals, for people who read the file."""
    if isinstance(figures, Mapping):
        return {name: rounded(value) for name, value in figures.items()}
    return round(figures, 4) if isinstance(figures, float) else figures


def rate(samples: Sequence[Sample], gpu: str) -> float:
    """Images/s of a GPU: the slope of the line through all samples.

    Images that start together finish together, so the first and the last sample alone would be
    wrong by up to a round of all slots, 2 % of a minute.
    """
    times = [sample.at for sample in samples]
    images = [sample.images[gpu] for sample in samples]
    return statistics.linear_regression(times, images).slope
