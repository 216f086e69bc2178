"""`imagefleet bench scaling`: 1, 2, 4, .. workers of this machine on one campaign."""

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation.bench import runs
from evaluation.bench.options import Asked
from evaluation.bench.runs import Row
from fleet import console, options
from imagefleet import errors
from imagefleet.job import samplers
from imagefleet.job.change import Change
from worker.gpus import choice
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings

#: Measured seconds of each run, and those over which two rates of the warm-up are compared.
SECONDS = {"cuda": 60.0, "cpu": 20.0}
STEPS = 20
WARM_SECONDS = {"cuda": 10.0, "cpu": 4.0}


def measure(asked: Asked) -> tuple[Sequence[Row], dict[str, Any]]:
    """Runs of real workers, from the queue to the stored image."""
    fields: dict[str, Any] = {"sampler_name": "Euler a", "steps": asked.steps or STEPS}
    fields |= Change.read(asked.set_ or []).values
    if "model" in fields:
        raise errors.SetupError("--set model: all jobs are of --model")
    counts = None if asked.workers is None else _numbers(asked.workers)
    gpus, threads = _machines(asked.device, counts)
    kind = "cpu" if threads else "cuda"
    numbers = _to_measure(counts, len(gpus))
    flags = ["--device", "cpu"] if kind == "cpu" else []
    flags += ["--slots", str(asked.slots)] if asked.slots else []
    with tempfile.TemporaryDirectory(prefix="imagefleet-scaling-") as folder:
        console.print_note("preparing the model")
        found, name, words, negative = _prepared(asked.model, folder, asked.device)
        work = runs.Work(
            model=found,
            fields=fields,
            seconds=asked.seconds or SECONDS[kind],
            warm_seconds=WARM_SECONDS[kind],
            flags=flags,
            environment=_environment(threads),
            words=words,
            negative_prompt=negative,
        )
        rows = console.run(runs.measure(work, gpus, numbers, Path(folder)))
    return rows, {
        "rows": [asdict(row) for row in rows],
        "model": str(asked.model) if asked.model else found.name,
        "steps": fields["steps"],
        "sampler": samplers.find(fields["sampler_name"]).name,
        "device": name,
        "threads_per_worker": threads,
        "warm_seconds": work.warm_seconds,
        "how": runs.HOW,
    }


def _machines(device: str, asked: list[int] | None) -> tuple[list[Gpu], int | None]:
    """What a worker can be started for, and each one's threads on a CPU."""
    if device not in {"auto", "cpu"}:
        raise errors.SetupError(f"--device {device[:40]}: should be auto or cpu")
    if device == "auto":
        try:
            return choice.choose(MachineSettings(model="m", gpus=choice.ALL)), None
        except errors.SetupError as error:
            raise errors.SetupError(
                f"{error.message}; for workers on the CPU: --device cpu"
            ) from None
    most = max(asked) if asked else int(choice.threads(1))
    names = ",".join(map(str, range(most)))
    gpus = choice.choose(MachineSettings(model="m", gpus=names, device="cpu"))
    return gpus, int(choice.threads(most))


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(each) for each in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise errors.SetupError(
            f"--workers {text[:40]}: should be numbers with commas, as 1,2,4"
        )
    return numbers


def _to_measure(asked: list[int] | None, machines: int) -> list[int]:
    """The numbers of workers to measure; one worker is always the first."""
    if asked is None:
        return [
            2**power for power in range(machines.bit_length()) if 2**power <= machines
        ]
    if max(asked) > machines:
        raise errors.SetupError(
            f"--workers: this machine has {machines} GPUs, and {max(asked)} workers were asked for"
        )
    return sorted({1, *asked})


def _prepared(
    model: Path | None, folder: str, device: str
) -> tuple[Path, str, str, str]:
    """The checkpoint, the device's name, and the words of the prompts."""
    # In a process of its own, which leaves the GPU to the workers.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_prepare, (model, folder, device))


def _prepare(
    model: Path | None, folder: str, device: str
) -> tuple[Path, str, str, str]:
    from evaluation.bench import engine, jobs, machine
    from worker.engine.device import find_device

    setup = engine.prepare(model, Path(folder), device, loras=0)
    name = str(machine.hardware(find_device(device))["device"])
    return setup.model, name, *jobs.reference_words()


def _environment(threads: int | None) -> dict[str, str]:
    """Without the settings of a fleet, to whose queue and keys these workers do not belong."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(options.PREFIX)
    }
    return own if threads is None else {**own, "OMP_NUM_THREADS": str(threads)}


def show(rows: Sequence[Row], report: Mapping[str, Any]) -> None:
    headings = (
        "workers",
        "images/s",
        "perfect linear",
        "share",
        "slowest worker",
        "fastest",
    )
    shown = console.table(*map(console.number_column, headings))
    for row in rows:
        shown.add_row(
            f"{row.workers:,}",
            f"{row.images_per_second:,.2f}",
            f"{row.perfect_linear:,.2f}",
            console.percent(row.linear_fraction),
            f"{min(row.by_worker):,.2f}",
            f"{max(row.by_worker):,.2f}",
        )
    console.print_tables(shown)
    threads = report["threads_per_worker"]
    each = f", {console.counted(threads, 'thread')} for each worker" if threads else ""
    seconds = statistics.fmean(row.seconds for row in rows)
    console.print_plain(
        f"\n{report['device']}{each}; {report['model']}, {report['sampler']},"
        f" {report['steps']} steps; {seconds:.0f} s measured of each run.\n{report['how']}"
    )
