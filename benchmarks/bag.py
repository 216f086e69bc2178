"""Measures a bag of unlike jobs on a fresh process, minute by minute, against uniform jobs.

    python benchmarks/bag.py --out benchmarks/results/first-minute-h100.json
    python benchmarks/bag.py --rows uniform,bag_sizes --memory 8 --out /tmp/bag-8gb.json
    python benchmarks/bag.py --tiny --device cpu --out /tmp/tiny.json

The jobs are drawn by a seed, with the shares of `SHARES`; uniform ones have one LoRA of rank 32, 15
steps and one size. Each row is a process of its own; minutes count from its start. Rows *without
kernels* begin with empty caches of kernels; the others with what earlier rows, or `--folder`, left
there, as a node that has fetched the fleet's. A bag counts the rows of UNet calls in one size, and
rows times pixels in several. `--memory` limits the GPU to GB of a card. What was measured before
stays in the file; `--tiny` tries it on a CPU, with meaningless figures.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from evaluation.bench import jobs as bench_jobs
from evaluation.bench import machine, work
from families import measure as families
from families import tiny_families
from rows.groups import Figures, add_figures, add_row, quotient
from rows.process import limit_memory
from worker.engine import contract, load, phases
from worker.engine import device as devices
from worker.engine.slots.engine import SlotEngine
from worker.engine.slots.step import Step

KINDS = ("lora", "loha", "lokr", "dora", "locon")

SAMPLERS = ("euler_ancestral", "dpmpp_2m_karras", "ddim", "euler")

STEPS, TINY_STEPS = (10, 30), (2, 5)

#: The process that makes models and LoRAs before the others start.
BUILD = "build"

#: The jobs' shares: of numbers of LoRAs, of jobs with a LoCon among them, of few steps, of sizes as
#: parts of the native one. Other kinds, the samplers and the steps are equally frequent.
SHARES: Mapping[str, Sequence[tuple[Any, float]]] = {
    "loras": [(0, 0.25), (1, 0.4), (2, 0.2), (3, 0.15)],
    "sdxl_loras": [(0, 0.3), (1, 0.5), (2, 0.2)],
    "locon": [(True, 0.15), (False, 0.85)],
    "few_steps": [(True, 0.25), (False, 0.75)],
    "sizes": [((1.0, 1.0), 0.5), ((1.0, 1.5), 0.25), ((1.5, 1.0), 0.25)],
    "sdxl_sizes": [((1.0, 1.0), 0.5), ((0.875, 1.125), 0.25), ((1.125, 0.875), 0.25)],
}


@dataclass(frozen=True, slots=True)
class BagRun:
    """A process: its jobs, and for how many minutes it draws."""

    minutes: int
    jobs: str
    """ "uniform", "one_size", "sizes" or "few_steps": sizes, and some in four unguided steps."""
    family: tiny_families.FamilyName = "sd1"
    is_compiled: bool = True
    has_kernels: bool = True


ROWS = {
    "bag_sizes_without_kernels": BagRun(5, "sizes", has_kernels=False),
    "uniform": BagRun(3, "uniform"),
    "bag_one_size": BagRun(3, "one_size"),
    "bag_sizes": BagRun(3, "sizes"),
    "bag_few_steps": BagRun(3, "few_steps"),
    "uniform_uncompiled": BagRun(2, "uniform", is_compiled=False),
    "sdxl_uniform": BagRun(4, "uniform", "sdxl"),
    "sdxl_bag_sizes": BagRun(4, "sizes", "sdxl"),
}

#: Each share of a uniform row's last minute: the row, its minute, what is counted, and that row.
FIGURES = {
    "bag_one_size": ("bag_one_size", 2, "rows", "uniform"),
    "bag_sizes": ("bag_sizes", 2, "row_pixels", "uniform"),
    "bag_sizes_without_kernels": (
        "bag_sizes_without_kernels",
        4,
        "row_pixels",
        "uniform",
    ),
    "uncompiled_over_compiled": ("uniform_uncompiled", 2, "rows", "uniform"),
    "sdxl_bag_sizes": ("sdxl_bag_sizes", 3, "row_pixels", "sdxl_uniform"),
}


def bag(
    row: BagRun, workload: bench_jobs.Workload, seed: int
) -> Iterator[contract.ImageRequest]:
    """The jobs of a row."""
    chance, prefix = random.Random(seed), "sdxl_" if row.family == "sdxl" else ""
    tiny = workload.steps[0] < STEPS[0]

    def choose(name: str) -> Any:
        given = SHARES.get(prefix + name) or SHARES[name]
        values, shares = zip(*given, strict=True)
        return chance.choices(values, shares)[0]

    files = {kind: [name for (name,) in workload.loras if name.startswith(f"random-{kind}-")]
             for kind in KINDS}  # fmt: skip
    for number, request in enumerate(workload.requests()):
        count, has_locon = choose("loras"), choose("locon")
        kinds = [chance.choice(KINDS[:-1]) for _ in range(count)]
        kinds[:1] = ["locon"] if has_locon else kinds[:1]
        chosen = [(chance.choice(files[kind]),) for kind in kinds]
        one_each = replace(workload, loras=tuple(chosen))
        parts = (1.0, 1.0) if row.jobs == "one_size" else choose("sizes")
        is_few = row.jobs == "few_steps" and choose("few_steps")
        yield replace(
            request,
            loras=tuple(one_each.request(at).loras[0] for at in range(len(chosen))),
            sampler=chance.choice(SAMPLERS),
            steps=4 if is_few else chance.randint(*(TINY_STEPS if tiny else STEPS)),
            cfg_scale=1.0 if is_few else request.cfg_scale,
            seed=number,
            width=int(request.width * parts[0]),
            height=int(request.height * parts[1]),
        )


class Ticks:
    """Counts what an engine's ticks draw in each minute, and the GPU's seconds by kind of lane."""

    def __init__(
        self, engine: SlotEngine, began_at: float, minute_seconds: float
    ) -> None:
        self.minutes: dict[int, Counter[str]] = defaultdict(Counter)
        self.full_speed_seconds = 0.0
        """Seconds from the process' start until nothing was compiled any more."""
        self._engine, self._began_at, self._minute = engine, began_at, minute_seconds
        self._on_gpu = engine.checkpoint.unet.device.type == "cuda"
        self._timed: list[tuple[str, Any, Any]] = []
        self._run = engine._runner.run  # noqa: SLF001
        engine._runner.run = self.run  # type: ignore[method-assign]  # noqa: SLF001

    def run(self, step: Step, mode: Any, slots: int) -> None:
        (lane,) = (each for each in self._engine._lanes if each.step is step)  # noqa: SLF001
        key, compiled = (
            lane.batch_key,
            "compiled" if mode in step.compiled else "uncompiled",
        )
        rows = len(lane.active) * key.slot_rows
        seconds = time.monotonic() - self._began_at
        self.minutes[int(seconds / self._minute)] += Counter(
            rows=rows, row_pixels=rows * key.width * key.height
        )
        if self._engine.is_compiling:
            self.full_speed_seconds = seconds
        filled = "full" if 2 * len(lane.active) > lane.slots else "sparse"
        before = self._mark()
        self._run(step, mode, slots)
        self._timed.append((f"{compiled}_{filled}", before, self._mark()))

    def seconds_of_kinds(self) -> dict[str, float]:
        """The GPU's seconds in ticks of lanes that were compiled or not, and more than half full.

        Lanes that wait for others show here: uncompiled ones should take what their images do.
        """
        found: Counter[str] = Counter()
        for kind, before, after in self._timed:
            took = before.elapsed_time(after) / 1000 if self._on_gpu else after - before
            found[kind] += took
        return dict(found)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def build(
    arguments: argparse.Namespace, family: tiny_families.FamilyName
) -> tuple[Path, bench_jobs.Workload]:
    """A family's model and jobs, made once."""
    model = families.build_model(arguments, family)
    return model, families.build_workload(arguments, model, KINDS)


def measure(arguments: argparse.Namespace) -> Figures:
    """The process of a row."""
    row, began_at, device = ROWS[arguments.row], arguments.began_at, arguments.device
    phases.seconds["import"] = time.monotonic() - began_at  # of Python, too
    if arguments.memory:
        limit_memory(device, arguments.memory)
    model, workload = build(arguments, row.family)
    graphs: list[str] = []

    def around(name: str) -> contextlib.AbstractContextManager[None]:
        graphs.append(name)
        return contextlib.nullcontext()

    ends_at = began_at + row.minutes * arguments.minute
    engine = load.load_engine(
        load.EngineSettings(
            model,
            str(device),
            slots=arguments.slots,
            compile="background" if row.is_compiled else "off",
            around_compiling=around,
            queue_seconds=lambda: math.inf,
        )
    )
    ticks = Ticks(engine, began_at, arguments.minute)
    workload = replace(workload, sizes=(engine.default_size,))
    plain = tuple(each for each in workload.loras if each[0].startswith("random-lora-"))
    is_uniform = row.jobs == "uniform"
    jobs = (
        replace(workload, loras=plain).requests()
        if is_uniform
        else bag(row, workload, 0)
    )
    first: list[float] = []
    driven = work.drive(
        engine,
        jobs,
        ends_at - time.monotonic(),
        lambda _: first or first.append(time.monotonic() - began_at),
        width=1,
    )
    engine.close()  # a process that ends while it compiles crashes
    per_second = [
        {
            name: count / arguments.minute
            for name, count in ticks.minutes[minute].items()
        }
        for minute in range(row.minutes)
    ]
    return {
        "minutes_per_second": per_second,
        "images": driven.images,
        "first_image_seconds": first[0],
        "full_speed_seconds": ticks.full_speed_seconds,
        "phase_seconds": phases.seconds,
        "graphs_compiled": len(graphs),
        "tick_seconds": ticks.seconds_of_kinds(),
        "slots": engine.slots,
        "recompiles": engine.recompiles,
        "peak_memory_bytes": machine.peak_memory_bytes(device),
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
    }


def summarise(rows: Mapping[str, Figures]) -> Figures:
    """The main figures; None for what was not measured."""

    def rate(row: str, minute: int, amount: str) -> float | None:
        minutes = rows.get(row, {}).get("minutes_per_second", [])
        at = minute if minute < 0 else minute - 1
        return cast("float | None", minutes[at].get(amount)) if minutes else None

    found: Figures = {}
    for name, (row, minute, amount, uniform) in FIGURES.items():
        found[name] = quotient(rate(row, minute, amount), rate(uniform, -1, amount))
    sizes, cold = (
        rows.get(name, {}) for name in ("bag_sizes", "bag_sizes_without_kernels")
    )
    return found | {
        "ready_seconds": sizes.get("full_speed_seconds"),
        "ready_seconds_cold": cold.get("full_speed_seconds"),
        "first_image_cached_seconds": sizes.get("first_image_seconds"),
        "first_image_cold_seconds": cold.get("first_image_seconds"),
        "graphs_compiled": cold.get("graphs_compiled"),
    }


def start(name: str, given: Sequence[str], kernels: Path) -> Figures:
    """Runs a row's process."""
    if not ROWS[name].has_kernels:
        shutil.rmtree(kernels, ignore_errors=True)
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    own = {variable: str(kernels / folder) for variable, folder in caches.items()}
    command = (
        sys.executable,
        __file__,
        name,
        *given,
        "--began-at",
        str(time.monotonic()),
    )
    ended = subprocess.run(
        command, check=False, env={**os.environ, **own}, stdout=subprocess.PIPE
    )
    if ended.returncode:
        return {"error": f"its process ended with code {ended.returncode}"}
    return cast("Figures", json.loads(ended.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "row", nargs="?", choices=[*ROWS, BUILD], help=argparse.SUPPRESS
    )
    parser.add_argument("--began-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/imagefleet-bag"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int)
    parser.add_argument(
        "--memory", type=float, help="GB of the card that the GPU stands for"
    )
    parser.add_argument(
        "--minute", type=float, default=60.0, help="its seconds, in a trial"
    )
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    names = arguments.rows.split(",")
    if arguments.row:
        arguments.device = devices.find_device(arguments.device)
        if arguments.row != BUILD:
            print(json.dumps(measure(arguments)))
            return
        for family in {ROWS[name].family for name in names}:
            build(arguments, family)
        return
    subprocess.run((sys.executable, __file__, BUILD, *sys.argv[1:]), check=True)
    table = Table("of all jobs", "share")
    for name, shares in SHARES.items():
        for value, share in shares:
            table.add_row(f"{name} {value}", f"{share:.2f}")
    Console().print(table)
    for name in names:
        figures = start(name, sys.argv[1:], arguments.folder / "kernels")
        add_row(arguments.out, summarise, name, figures)
    print(json.dumps(summarise(add_figures(arguments.out, {"shares": SHARES})["rows"])))


if __name__ == "__main__":
    main()
