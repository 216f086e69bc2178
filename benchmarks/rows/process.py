"""Parts of `engine.py`'s processes: replies, the model, and an engine after its first images."""

import functools
import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import tiny_model
from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs as bench_jobs
from evaluation.bench import machine, work
from evaluation.score import metrics
from imagefleet import errors
from rows import amounts
from rows.groups import Figures
from worker.engine import contract, load
from worker.engine import device as devices
from worker.engine.slots.engine import SlotEngine
from worker.engine.slots.queue import WeightMode

log = logging.getLogger("benchmark")

#: Measures for the given seconds.
Measure = Callable[[float], Figures]

#: GiB that cards have for one process, by the GB that they are sold with.
CAPS = {8: 7.4, 12: 11.0, 16: 15.0, 24: 23.0}

#: To create the model; the other groups give up after it.
BUILDING_SECONDS = 60.0

#: Each group's pause after the model is ready. An engine times kernels at its start, which others
#: would disturb. `base` compiles first what `engine` compiles second and then finds in the cache,
#: so it must not be late.
STAGGER_SECONDS = {"base": 3.0, "few_steps": 6.0, "few_steps_lora": 9.0, "capped": 9.0,
                   "sizes": 6.0, "prompts": 7.0, "capped_loras": 9.0, "capped_sizes": 12.0,
                   "plain": 16.0, "exact": 18.0, "exact_compiled": 18.0}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """The options of all groups."""

    group: str
    builder: str
    folder: Path
    device: str
    slots: int | None
    capped_slots: int | None
    #: Jobs of a message to a whole worker.
    bundle: int
    is_tiny: bool

    @property
    def torch_device(self) -> torch.device:
        return devices.find_device(self.device)


class Channel:
    """Replies to `engine.py`."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def reply(self, **figures: Any) -> None:
        print(json.dumps(figures), file=self._out, flush=True)

    def serve(self, rows: Mapping[str, Measure], *, until: str = "") -> float:
        """Measures the requested rows; returns the seconds requested for the row *until*."""
        self.reply(ready=True)
        for line in sys.stdin:
            command = json.loads(line)
            name, seconds = command["row"], command["seconds"]
            if name == until:
                return float(seconds)
            try:
                self.reply(row=name, **rows[name](seconds))
            except Exception as error:  # the other rows do not depend on this one
                log.exception("%s failed", name)
                self.reply(row=name, error=f"{type(error).__name__}: {error}"[:500])
        raise SystemExit(0)


def build(options: Options) -> bench_engine.Setup:
    """The model, the LoRAs and the jobs; one group creates them, the others wait."""
    ready = options.folder / "ready.pickle"
    if options.group != options.builder:
        wait_for(ready)
        if not options.is_tiny:
            time.sleep(STAGGER_SECONDS.get(options.group, 0))
        setup: bench_engine.Setup = pickle.loads(ready.read_bytes())
        return setup
    options.folder.mkdir(parents=True, exist_ok=True)
    model = (
        tiny_model.build_tiny_checkpoint(options.folder / "tiny")
        if options.is_tiny
        else None
    )
    loras = 6 if options.is_tiny else bench_engine.LORAS
    setup = bench_engine.prepare(model, options.folder, options.device, loras)
    part = ready.with_suffix(".part")
    part.write_bytes(pickle.dumps(setup))
    part.rename(ready)
    return setup


def wait_for(file: Path) -> None:
    began_at = time.monotonic()
    while not file.exists():
        if time.monotonic() - began_at > BUILDING_SECONDS:
            raise errors.SetupError("the model was not created in time")
        time.sleep(0.1)


def load_engine(
    options: Options, model: Path, slots: int | None, compiled: Sequence[WeightMode]
) -> SlotEngine:
    """An engine with the UNet compiled for these weight modes, in this order; () for none."""
    return load.load_engine(
        load.EngineSettings(
            model,
            options.device,
            slots=slots,
            compile="auto" if compiled else "off",
            compiled_modes=compiled,
        )
    )


def warm(
    options: Options,
    setup: bench_engine.Setup,
    workload: bench_jobs.Workload,
    slots: int | None,
    compiled: Sequence[WeightMode],
) -> tuple[SlotEngine, bench_jobs.Workload, Figures]:
    """An engine after its first images, its jobs, and the start-up's figures."""
    began_at = time.monotonic()
    engine = load_engine(options, setup.model, slots, compiled)
    workload = replace(workload, sizes=(engine.default_size,))
    engine.warm_up(workload.request(0))
    bench_engine.draw_a_round(engine, workload)
    figures: Figures = {
        "slots": work.images_at_once(engine),
        "ready_seconds": time.monotonic() - began_at,
    }
    log.info("warm: %s", figures)
    return engine, workload, figures


def rate(
    engine: SlotEngine,
    workload: bench_jobs.Workload,
    options: Options,
    warmth: Figures,
    seconds: float,
    amount: Literal["pixels", "unet_rows"] = "pixels",
) -> Figures:
    """Images/s of the engine alone, always full; of one size, or of several.

    *amount*: what is counted beside images and calls, per second.
    """
    amount_of = pixels if amount == "pixels" else functools.partial(unet_rows, engine)
    machine.reset_peak(options.torch_device)
    cpu_seconds, began_at = time.process_time(), time.perf_counter()
    width = None
    if len(workload.sizes) == 1:
        width = engine.slots_for(workload.request(0))
    measured = work.drive(engine, workload.requests(), seconds, width=width)
    cores = (time.process_time() - cpu_seconds) / (time.perf_counter() - began_at)
    return {
        "images_per_second": measured.images_per_second,
        "unet_calls_per_second": amounts.per_second(measured, lambda each: each.steps),
        f"{amount}_per_second": amounts.per_second(measured, amount_of),
        "images": measured.images,
        "seconds": measured.seconds,
        "cpu_cores": cores,
        "peak_memory_bytes": machine.peak_memory_bytes(options.torch_device),
        "graphs": dict(engine.graphs),
        **warmth,
    }


def pixels(request: contract.ImageRequest) -> float:
    return request.width * request.height


def unet_rows(engine: SlotEngine, request: contract.ImageRequest) -> float:
    """The rows that an image takes of all UNet calls: one of a call without guidance, else two."""
    prepared = engine.prepare(request)
    return sum(prepared.rows(call) for call in range(len(prepared.schedule.table)))


def limit_memory(device: torch.device, gigabytes: float = 8.0) -> None:
    """Limits this process to what a card of so many GB has for one."""
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        usable = CAPS.get(gigabytes, gigabytes - 1) * 2**30
        torch.cuda.set_per_process_memory_fraction(usable / total_bytes, device)


def decibels(image: contract.Pixels, reference: contract.Pixels) -> float:
    """Peak signal-to-noise ratio in dB; 99 for identical images."""
    found = metrics.psnr(metrics.mean_square(image, reference))
    return 99.0 if found is None else found
