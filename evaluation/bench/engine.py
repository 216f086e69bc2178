"""The measurements of `imagefleet bench`. Imports torch."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from evaluation.bench import baseline, machine, random_model, work
from evaluation.bench import jobs as bench_jobs
from evaluation.bench.jobs import Workload
from evaluation.bench.options import BenchOptions
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.files import demo
from imagefleet.pricing import families
from imagefleet.validation import JSONDict
from worker.accelerator import Accelerator
from worker.engine import device as devices
from worker.engine import load
from worker.engine.contract import Engine
from worker.engine.families import table
from worker.engine.slots.engine import SlotEngine
from worker.files import check
from worker.settings import WorkerSettings
from worker.stages.requests import PREPARERS

#: Per rate: long compared with one image.
SECONDS = {"cuda": 20.0, "cpu": 3.0}

#: Twice the most slots: no two images drawn at once share a LoRA.
LORAS = 32

#: By plain diffusers, after one for warm-up.
BASELINE_IMAGES = 5

#: Starts a step with a name and a total; the result is called with the units done.
StartStep = Callable[[str, float], Callable[[float], None]]


@dataclass(frozen=True)
class Setup:
    """A checkpoint, its jobs, and a folder for temporary files."""

    model: Path
    workload: Workload
    folder: Path


def prepare(
    model: Path | None,
    folder: Path,
    device: str,
    loras: int = LORAS,
    family: str = "sd1",
) -> Setup:
    """The given checkpoint, else a random one of a *family* on a GPU and the demo's on a CPU.

    The LoRAs are random, of the reference's rank; their content does not affect the speed.

    Raises:
        SetupError: there is no such model, family or device.
    """
    known = {each.slug: each for each in table.FAMILIES}
    if model is None:
        validation.choose("family without a --model", family, known)
    torch_device = devices.find_device(device)
    if model is None and torch_device.type == "cuda":
        name = "random-sd15" if family == "sd1" else f"random-{family}"
        kind = "v_prediction" if family == "sd2" else "epsilon"
        model = random_model.build_random_checkpoint(
            folder / name, torch_device, known[family], prediction_type=kind
        )
    elif model is None and family != "sd1":
        raise SetupError(f"--family {family} is for GPUs: give a --model on a CPU")
    elif model is None:
        model = demo.find_checkpoint()
    directory = folder / "loras"
    names = random_model.build_random_loras(directory, model, loras, torch_device)
    words, negative = bench_jobs.reference_words()
    workload = Workload(
        words, negative, ((0, 0),), directory, tuple((name,) for name in names)
    )
    if own := Accelerator.of_family(families.of_title(check.family(model)).slug):
        scales = own.kind.guidance[:1]
        workload = replace(
            workload, samplers=("euler",), steps=(own.steps,), cfg_scales=scales
        )
    return Setup(model, workload, folder)


def draw_a_round(engine: Engine, workload: Workload) -> None:
    """Warms up: reads each LoRA and fills the engine once."""
    with ThreadPoolExecutor(PREPARERS) as threads:
        requests = map(workload.request, range(len(workload.loras)))
        list(threads.map(engine.prepare, requests))
    work.draw(
        engine, [workload.request(at) for at in range(work.images_at_once(engine))]
    )


def measure_baseline(
    model: Path,
    device: torch.device,
    workload: Workload,
    images: int = BASELINE_IMAGES,
) -> float:
    """Images/s of plain diffusers, one at a time, with its LoRAs in memory."""
    plain = baseline.PlainDiffusers(model, device, devices.find_dtype("auto", device))
    requests = [workload.request(number) for number in range(images + 1)]
    for request in requests:
        plain.use_loras(request.loras)
    plain.draw(requests[:1])
    began_at = time.perf_counter()
    for request in requests[1:]:
        plain.use_loras(request.loras)
        plain.draw([request])
    return images / (time.perf_counter() - began_at)


def measure(setup: Setup, asked: BenchOptions, step: StartStep) -> JSONDict:
    """The figures of `--json`, as far as measured; raises FleetError if an image failed."""
    device = devices.find_device(asked.device)
    if asked.baseline:
        baseline.check(setup.model)
    step("matrix products", 1)
    matrix_rate = machine.measure_matrix_rate(
        device, devices.find_dtype("auto", device)
    )
    machine.reset_peak(device)
    run = _EngineRun(setup, asked, step)
    settings = worker_settings(setup, "from-queue")
    from_queue, idle_fraction = asyncio.run(
        work.work(settings, run.load, on_images=run.on_images)
    )
    workload = run.workload
    (steps,) = workload.steps
    flops = machine.count_image_flops(setup.model, *workload.sizes[0], steps)
    limit = matrix_rate / flops
    mixed = run.mixed.images_per_second
    without = run.without.images_per_second
    peak_memory_bytes = machine.peak_memory_bytes(device)
    plain = None
    if asked.baseline:
        step("diffusers + peft, one job at a time", 1)
        plain = measure_baseline(setup.model, device, workload)
    return {
        "model": str(setup.model),
        "family": families.of_title(check.family(setup.model)).slug,
        "width": workload.sizes[0][0],
        "height": workload.sizes[0][1],
        "steps": steps,
        "slots": run.width,
        "ready_seconds": run.ready_seconds,
        "mixed_lora_images_per_second": mixed,
        "no_lora_images_per_second": without,
        "mixed_over_no_lora": mixed / without,
        "unguided_images_per_second": run.unguided.images_per_second,
        "unguided_over_no_lora": run.unguided.images_per_second / without,
        "worker_images_per_second": from_queue.images_per_second,
        "idle_fraction": idle_fraction,
        "flops_per_image": flops,
        "matrix_flops_per_second": matrix_rate,
        "matrix_limit_images_per_second": limit,
        "matrix_limit_fraction": mixed / limit,
        "peak_memory_bytes": peak_memory_bytes,
        "fp16_accumulate": asked.fp16_accumulate,
        "graphs": run.graphs,
        "diffusers_peft_images_per_second": plain,
        "over_diffusers_peft": mixed / plain if plain else None,
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
    }


def worker_settings(setup: Setup, name: str) -> WorkerSettings:
    """A worker on a new local storage in the setup's folder."""
    return WorkerSettings(
        storage=f"local:{setup.folder / name}",
        model=setup.model,
        lora_directory=setup.workload.lora_directory,
        until_empty=True,
        trusted_key=None,  # its jobs are not signed
    )


class _EngineRun:
    """Runs on the engine's thread: measures the engine alone, then loads the worker's jobs."""

    def __init__(self, setup: Setup, asked: BenchOptions, step: StartStep) -> None:
        self._setup = setup
        self._asked = asked
        self._seconds = asked.seconds or SECONDS[devices.find_device(asked.device).type]
        self._step = step
        self._show: Callable[[float], None] = lambda _: None

    def on_images(self, images: float) -> None:
        self._show(images)

    def load(self) -> tuple[Engine, list[str]]:
        asked = self._asked
        began_at = time.monotonic()
        self._step("loading and compiling the model", 1)
        engine = load.load_engine(
            load.EngineSettings(
                self._setup.model,
                asked.device,
                slots=asked.slots,
                fp16_accumulate=asked.fp16_accumulate,
            )
        )
        given = self._setup.workload
        steps = (asked.steps,) if asked.steps else given.steps
        self.workload = replace(given, sizes=(engine.default_size,), steps=steps)
        draw_a_round(engine, self.workload)
        self.ready_seconds = time.monotonic() - began_at
        self.width = engine.slots
        self.mixed = self._drive(engine, "another LoRA per job", self.workload)
        self.without = self._drive(engine, "no LoRA", replace(self.workload, loras=()))
        unguided = replace(self.workload, loras=(), cfg_scales=(1.0,))
        engine.warm_up(unguided.request(0))
        self.unguided = self._drive(engine, "no guidance", unguided)
        self.graphs = dict(engine.graphs)
        rounds = 3 + math.ceil(
            self._seconds * self.mixed.images_per_second / self.width
        )
        jobs = rounds * self.width
        self._show = self._step("whole worker, from queue to stored image", jobs)
        return engine, [self.workload.message(number) for number in range(jobs)]

    def _drive(self, engine: SlotEngine, name: str, workload: Workload) -> work.Rate:
        seconds = self._seconds
        width = engine.slots_for(workload.request(0))
        progress = self._step(name, seconds)
        return work.drive(engine, workload.requests(), seconds, progress, width=width)
