"""The measurements of `imagefleet bench latency`. Imports torch."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.bench import baseline, jobs, machine, work
from fleet.bench import engine as bench_engine
from worker.engine import contract
from worker.engine import device as devices


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of a batch, from text encoding to decoded images."""

    batch: int
    engine_seconds: float
    diffusers_seconds: float


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """What `--report` writes."""

    model: str
    width: int
    height: int
    steps: int
    rows: Sequence[Latency]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]


def measure(
    setup: bench_engine.Setup,
    device: str,
    batches: Sequence[int],
    steps: int,
    repeats: int,
    step: bench_engine.StartStep,
) -> LatencyReport:
    """Each batch by an engine with as many slots, and by diffusers' pipeline in one call.

    Raises:
        FleetError: the model cannot be loaded or an image failed.
    """
    torch_device = devices.find_device(device)
    engine_seconds = []
    workload = setup.workload
    for batch in batches:
        step(f"{batch} at once: the engine", 1)
        engine = bench_engine.load_engine(setup, bench_engine.Options(device, slots=batch))
        workload = latency_workload(setup.workload, engine, steps)
        bench_engine.draw_a_round(engine, workload)
        draw = functools.partial(work.draw, engine)
        engine_seconds.append(median_seconds(draw, workload, batch, repeats))
        engine.close()
    plain = baseline.PlainDiffusers(
        setup.model, torch_device, devices.find_dtype("auto", torch_device)
    )
    rows = []
    for batch, seconds in zip(batches, engine_seconds, strict=True):
        step(f"{batch} at once: diffusers", 1)
        rows.append(Latency(batch, seconds, median_seconds(plain.draw, workload, batch, repeats)))
    return LatencyReport(
        model=str(setup.model),
        width=workload.size[0],
        height=workload.size[1],
        steps=steps,
        rows=rows,
        hardware=machine.hardware(torch_device),
        versions=machine.versions(),
    )


def latency_workload(workload: jobs.Workload, engine: contract.Engine, steps: int) -> jobs.Workload:
    """*workload* with PLMS and without LoRA."""
    return replace(workload, loras=(), steps=(steps,), sampler="plms", size=engine.default_size)


def median_seconds(
    draw: Callable[[Sequence[contract.ImageRequest]], object],
    workload: jobs.Workload,
    batch: int,
    repeats: int,
) -> float:
    """The median after a warm-up; the texts change, so that no embedding is cached."""
    seconds = []
    for number in range(repeats + 1):
        requests = [
            replace(request, negative_prompt=f"{number} {request.negative_prompt}")
            for request in (workload.request(number * batch + at) for at in range(batch))
        ]
        began_at = time.perf_counter()
        draw(requests)
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds[1:])
