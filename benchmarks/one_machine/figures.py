"""What samples of a machine's workers say: rates, idle time, cores and clocks."""

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from evaluation.bench.workers import Machine, Sample, rate

Figures = dict[str, Any]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class DetailedSample(Sample):
    """Also what the engines, the stages and the processors did."""

    busy_seconds: dict[str, float] = field(default_factory=dict)
    idle_seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    busy_slots: dict[str, int] = field(default_factory=dict)
    stage_seconds: Counter[str] = field(default_factory=Counter)
    stage_counts: Counter[str] = field(default_factory=Counter)
    recompiles: int = 0
    restarts: int = 0
    worker_cpu_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0
    repeated_families: int = 0

    def read(self, families: Sequence[Metric], machine: Machine) -> None:
        Sample.read(self, families, machine)
        counts = Counter(family.name for family in families)
        self.repeated_families = sum(count > 1 for count in counts.values())
        newest = (machine.process_ids(gpu)[-1] for gpu in machine.gpus)
        self.worker_cpu_seconds = sum(map(_cpu_seconds, {machine.process.pid, *newest}))
        self.machine_cpu_seconds = _machine_cpu_seconds()

    def take(
        self, gpu: str, name: str, labels: Mapping[str, str], value: float
    ) -> None:
        Sample.take(self, gpu, name, labels, value)
        match name:
            case "imagefleet_gpu_busy_seconds_total":
                self.busy_seconds[gpu] = value
            case "imagefleet_gpu_idle_seconds_total":
                self.idle_seconds[gpu][labels["reason"]] = value
            case "imagefleet_slots" if labels["state"] == "busy":
                self.busy_slots[gpu] = int(value)
            case "imagefleet_stage_seconds_sum":
                self.stage_seconds[labels["stage"]] += value  # type: ignore[assignment]
            case "imagefleet_stage_seconds_count":
                self.stage_counts[labels["stage"]] += int(value)
            case "imagefleet_engine_recompiles_total":
                self.recompiles += int(value)
            case "imagefleet_gpu_restarts_total":
                self.restarts += int(value)


def measured(
    samples: Sequence[DetailedSample], gpus: Sequence[str], clocks: Mapping[str, Any]
) -> Figures:
    """The figures of one run on *gpus*, from its steady state."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    by_gpu = {gpu: _of_gpu(samples, gpu) | dict(clocks.get(gpu, {})) for gpu in gpus}
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
        "second_half_over_first": halves[1] / halves[0],
        "cores_used": (last.machine_cpu_seconds - first.machine_cpu_seconds) / seconds,
        "cores_used_by_workers": (last.worker_cpu_seconds - first.worker_cpu_seconds)
        / seconds,
        "recompiles": last.recompiles,
        "stage_seconds": {
            stage: (last.stage_seconds[stage] - first.stage_seconds[stage]) / count
            for stage, count in stages.items()
        },
        "by_gpu": by_gpu,
    }


def _of_gpu(samples: Sequence[DetailedSample], gpu: str) -> Figures:
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
    """With four decimals, for people who read the file."""
    if isinstance(figures, Mapping):
        return {name: rounded(value) for name, value in figures.items()}
    return round(figures, 4) if isinstance(figures, float) else figures


def _cpu_seconds(process_id: int) -> float:
    """Of a process with all its threads; 0 once it has ended."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return 0.0
    user, system = status.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_SECOND


def _machine_cpu_seconds() -> float:
    """Of all processes: user, nice, system, and interrupts."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _waiting, hard, soft = map(int, fields[:7])
    return (user + nice + system + hard + soft) / _TICKS_PER_SECOND
