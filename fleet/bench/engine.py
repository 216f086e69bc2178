"""What `imagefleet bench engine` measures, without the terminal. Imports torch's room."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from fleet import demo_jobs
from fleet.bench import baseline, machine, matrix_rate, random_model, tiny_model, work
from fleet.bench import jobs as bench_jobs
from imagefleet import errors
from worker.engine import contract, load
from worker.settings import WorkerSettings

#: For each rate: long beside one image.
SECONDS = {"cuda": 20.0, "cpu": 3.0}

#: Twice the slots of any engine: no two images that are drawn together share a LoRA.
LORAS = 32

#: Drawn one at a time by plain diffusers, after one that does not count.
BASELINE_IMAGES = 5

Step = Callable[[str, float], Callable[[float], None]]
"""Begins a step of so many units of progress; what it returns is told how many are done."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A checkpoint, the jobs for it, and a folder for what the measurement leaves behind."""

    model: Path
    workload: bench_jobs.Workload
    folder: Path


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine is to be set up, and how many seconds each rate is measured for."""

    device: str = "auto"
    slots: int | None = None
    seconds: float = 20.0
    with_baseline: bool = False
    fp16_accumulate: bool = False


@dataclass(frozen=True, slots=True)
class EngineReport:
    """`--report` writes these keys and those of the price; None is what was not asked for."""

    model: str
    width: int
    height: int
    steps: int
    slots: int
    ready_seconds: float
    mixed_lora_images_per_second: float
    no_lora_images_per_second: float
    mixed_over_no_lora: float
    worker_images_per_second: float
    idle_fraction: float
    flops_per_image: float
    matrix_flops_per_second: float
    matrix_limit_images_per_second: float
    matrix_limit_fraction: float
    peak_memory_bytes: int
    fp16_accumulate: bool
    recompiles_after_warmup: int | None
    diffusers_peft_images_per_second: float | None
    over_diffusers_peft: float | None
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]


def prepare(model: Path | None, folder: Path, device: str, loras: int = LORAS) -> Setup:
    """The given checkpoint or, without one, a random SD1.5 for a GPU and a small one for a CPU.

    The LoRAs are random: their rank is the reference's, and their content costs no time.
    """
    torch_device = load.find_device(device)
    if model is not None and not model.exists():
        raise errors.SetupError(f"the model {str(model)!r} does not exist")
    trained = demo_jobs.TRAINED if demo_jobs.TRAINED.exists() else None
    if model is None and torch_device.type == "cuda":
        tokenizer = trained / "tokenizer" if trained else None
        model = random_model.build_random_checkpoint(
            folder / "random-sd15", torch_device, tokenizer=tokenizer
        )
    elif model is None:
        model = trained or tiny_model.build_tiny_checkpoint(folder / "random-tiny")
    directory = folder / "loras"
    names = random_model.build_random_loras(directory, model, loras, torch_device)
    words, negative = bench_jobs.reference_words(model / "tokenizer" if model.is_dir() else None)
    return Setup(
        model, bench_jobs.Workload(words, negative, (0, 0), directory, tuple(names)), folder
    )


def load_engine(setup: Setup, options: Options) -> contract.Engine:
    return load.load_engine(
        setup.model,
        options.device,
        slots=options.slots,
        fp16_accumulate=options.fp16_accumulate,
    )


def draw_a_round(engine: contract.Engine, workload: bench_jobs.Workload) -> None:
    """Reads each LoRA and fills the engine once, so that what is done but once is done."""
    with ThreadPoolExecutor(work.PREPARERS) as threads:
        requests = map(workload.request, range(len(workload.loras)))
        list(threads.map(engine.prepare, requests))
    work.draw(engine, [workload.request(at) for at in range(work.width_of(engine))])


def measure_baseline(
    plain: baseline.PlainDiffusers, workload: bench_jobs.Workload, images: int = BASELINE_IMAGES
) -> float:
    """Images/s of plain diffusers, one at a time; its LoRAs are loaded beforehand."""
    requests = [workload.request(number) for number in range(images + 1)]
    for request in requests:
        plain.use_loras(request.loras)
    plain.draw(requests[:1])
    began_at = time.perf_counter()
    for request in requests[1:]:
        plain.use_loras(request.loras)
        plain.draw([request])
    return images / (time.perf_counter() - began_at)


def measure(setup: Setup, options: Options, step: Step) -> EngineReport:
    """All of it, one after the other.

    Raises:
        FleetError: the model cannot be loaded or does not draw.
    """
    device = load.find_device(options.device)
    step("matrix products", 1)
    matrix_flops_per_second = matrix_rate.measure_matrix_rate(
        device, load.find_dtype("auto", device)
    )
    machine.forget_peak(device)
    run = _EngineRun(setup, options, step)
    settings = worker_settings(setup, "from-queue")
    from_queue = asyncio.run(work.work(settings, run.load, on_images=run.tell))
    workload = run.workload
    (steps,) = workload.steps
    flops = matrix_rate.count_image_flops(setup.model, *workload.size, steps)
    limit = matrix_flops_per_second / flops
    mixed, without = run.mixed.images_per_second, run.without.images_per_second
    peak_memory_bytes = machine.peak_memory_bytes(device)
    plain = _measure_baseline(setup, options, workload, step) if options.with_baseline else None
    return EngineReport(
        model=str(setup.model),
        width=workload.size[0],
        height=workload.size[1],
        steps=steps,
        slots=run.width,
        ready_seconds=run.ready_seconds,
        mixed_lora_images_per_second=mixed,
        no_lora_images_per_second=without,
        mixed_over_no_lora=mixed / without,
        worker_images_per_second=from_queue.rate.images_per_second,
        idle_fraction=from_queue.idle_fraction,
        flops_per_image=flops,
        matrix_flops_per_second=matrix_flops_per_second,
        matrix_limit_images_per_second=limit,
        matrix_limit_fraction=mixed / limit,
        peak_memory_bytes=peak_memory_bytes,
        fp16_accumulate=options.fp16_accumulate,
        recompiles_after_warmup=run.recompiles,
        diffusers_peft_images_per_second=plain,
        over_diffusers_peft=mixed / plain if plain else None,
        hardware=machine.hardware(device),
        versions=machine.versions(),
    )


def worker_settings(setup: Setup, name: str) -> WorkerSettings:
    """A worker on an embedded store of its own in the set-up's folder."""
    return WorkerSettings(
        storage=f"local:{setup.folder / name}",
        model=setup.model,
        lora_directory=setup.workload.lora_directory,
        until_empty=True,
    )


class _EngineRun:
    """What happens on the engine's thread: the engine alone first, then the worker's jobs."""

    def __init__(self, setup: Setup, options: Options, step: Step) -> None:
        self._setup = setup
        self._options = options
        self._step = step
        self.tell: Callable[[float], None] = lambda _: None

    def load(self) -> work.Loaded:
        began_at = time.monotonic()
        self._step("loading and compiling the model", 1)
        engine = load_engine(self._setup, self._options)
        self.workload = replace(self._setup.workload, size=engine.default_size)
        draw_a_round(engine, self.workload)
        self.ready_seconds = time.monotonic() - began_at
        self.width = work.width_of(engine)
        seconds = self._options.seconds
        self.mixed = self._drive(engine, "every job another LoRA", self.workload)
        self.without = self._drive(engine, "no LoRA", replace(self.workload, loras=()))
        self.recompiles = work.recompiles_of(engine)
        rounds = 3 + math.ceil(seconds * self.mixed.images_per_second / self.width)
        jobs = rounds * self.width
        self.tell = self._step("from the queue to the stored image", jobs)
        messages = [self.workload.message(number) for number in range(jobs)]
        return work.Loaded(engine, messages, *self.workload.steps)

    def _drive(
        self, engine: contract.Engine, name: str, workload: bench_jobs.Workload
    ) -> work.Rate:
        seconds = self._options.seconds
        tell = self._step(name, seconds)
        return work.drive(engine, workload.requests(), seconds, tell)


def _measure_baseline(
    setup: Setup, options: Options, workload: bench_jobs.Workload, step: Step
) -> float:
    step("diffusers + peft, one job at a time", 1)
    device = load.find_device(options.device)
    plain = baseline.PlainDiffusers(setup.model, device, load.find_dtype("auto", device))
    return measure_baseline(plain, workload)
