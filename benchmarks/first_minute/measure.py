"""Measures a node's first minutes on one card: beside the compiler, until full speed, and after it.

    python benchmarks/first_minute/measure.py --seconds 570 --before /tmp/before
    python benchmarks/first_minute/measure.py --rows bag_sizes --memory 8 --out /tmp/8gb.json
    python benchmarks/first_minute/measure.py --tiny --device cpu --out /tmp/tiny.json

Each row is a process of its own; seconds and minutes count from its start. Every figure is in the
file as soon as it is measured, and the exit code of the row's process beside it. Rows that the file
has are not measured again, unless with `--again`: the same command, over and over, measures all. No
row begins that would take longer than is left of `--seconds`. Shares are ratios of rows of one run,
which share `--folder`: if that is lost, rows that others are compared with are measured anew, and
those whose packages they need, unless `--folder` has these from another node. `--memory` limits the
GPU to GB of a card; `--before` is a checkout of commit 2ad5d2b6. `--trace` tells what the GPU runs
in so many seconds after an engine's row. `--tiny` tries all on a CPU, with meaningless figures.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import pynvml
from rich.console import Console
from rich.table import Table

from first_minute import processes
from rows.groups import Figures, add_figures, change_figures, quotient

RESULTS = Path(__file__).parents[1] / "results"

#: A row that takes so many times as long as it should is ended.
OVERTIME = 1.4


@dataclass(frozen=True, slots=True)
class Row:
    """A process that measures."""

    #: About as long as it takes on an H200.
    seconds: float
    #: Rows of the same run that come before: what they leave, and rates to compare with.
    needs: tuple[str, ...] = ()
    #: The folder of packages that it leaves: with these, others do not need it.
    leaves: str = ""


_BAG = ("bag_sizes_without_kernels", "uniform_again")

#: In the order in which they are measured.
ROWS = {
    "models": Row(90),
    "uniform": Row(200, ("models",), leaves="uniform"),
    "worker_cold": Row(120, ("uniform",)),
    "worker_one_size_cold": Row(210, ("models",)),
    "worker_one_size": Row(100, ("worker_one_size_cold",)),
    "bag_sizes_without_kernels": Row(420, ("models",), leaves="sizes"),
    "uniform_again": Row(75, ("models", "bag_sizes_without_kernels")),
    "bag_one_size": Row(140, _BAG),
    "bag_sizes": Row(140, _BAG),
    "bag_few_steps": Row(140, _BAG),
    "four_steps": Row(150),
    "uniform_over_before": Row(320),
    "unlike_memory": Row(180, ("uniform",)),
    "endings": Row(240, ("models",)),
    "library": Row(260),
    "company": Row(80),
    "sdxl_models": Row(120),
    "sdxl_cold": Row(620, ("sdxl_models",), leaves="sdxl"),
    "sdxl_uniform": Row(260, ("sdxl_models",)),
    "sdxl_bag_sizes": Row(200, ("sdxl_cold", "sdxl_uniform")),
}


class Share(NamedTuple):
    """A figure of a row over another row's, or its own over nothing."""

    what: str
    row: str
    key: str
    over_row: str = ""
    over_key: str = ""


_ROWS, _PIXELS = "rows_per_second", "row_pixels_per_second"
_STEPS = "step_pixels_per_second"

FIGURES = {
    "beside_compiler": Share(
        "uniform jobs beside the compiler, of compiled",
        "uniform",
        f"compiling_{_ROWS}",
        "uniform",
        _ROWS,
    ),
    "worker_cold_90_seconds": Share(
        "a whole worker, cold, three sizes, first 90 s, of uniform",
        "worker_cold",
        _PIXELS,
        "uniform",
        _PIXELS,
    ),
    "first_picture_seconds": Share(
        "seconds to a job's first picture, packages in the storage",
        "worker_one_size",
        "first_picture_seconds",
    ),
    "ready_seconds": Share(
        "seconds to full speed, one size, packages in the storage",
        "worker_one_size",
        "ready_seconds",
    ),
    "first_picture_seconds_cold": Share(
        "seconds to a job's first picture, cold",
        "worker_one_size_cold",
        "first_picture_seconds",
    ),
    "ready_seconds_cold": Share(
        "seconds to full speed, one size, cold", "worker_one_size_cold", "ready_seconds"
    ),
    "bag_one_size": Share(
        "unlike jobs of one size, minute 2, of uniform, by UNet calls",
        "bag_one_size",
        _ROWS,
        "uniform_again",
        _ROWS,
    ),
    "bag_sizes": Share(
        "unlike jobs of three sizes, minute 2, by pixels and steps",
        "bag_sizes",
        _PIXELS,
        "uniform_again",
        _PIXELS,
    ),
    "bag_few_steps": Share(
        "the same, a quarter of them in four steps",
        "bag_few_steps",
        _STEPS,
        "uniform_again",
        _STEPS,
    ),
    "bag_sizes_without_kernels": Share(
        "three sizes without packages, minute 4",
        "bag_sizes_without_kernels",
        _PIXELS,
        "uniform_again",
        _PIXELS,
    ),
    "sdxl_bag_sizes": Share(
        "SDXL, three sizes near 1024, minute 3, by pixels and steps",
        "sdxl_bag_sizes",
        _PIXELS,
        "sdxl_uniform",
        _PIXELS,
    ),
    "sdxl_ready_seconds": Share(
        "SDXL: seconds to full speed, packages in the storage",
        "sdxl_bag_sizes",
        "ready_seconds",
    ),
    "uniform_over_before": Share(
        "images/s of uniform jobs over those of 2ad5d2b6",
        "uniform_over_before",
        "uniform_over_before",
    ),
    "four_steps_over_engine": Share(
        "4 steps from a queue 300 ms away, of the engine alone",
        "four_steps",
        "worker_images_per_second",
        "four_steps",
        "engine_images_per_second",
    ),
    "four_steps_idle_fraction": Share(
        "its idle fraction", "four_steps", "worker_idle_fraction"
    ),
    "library_over_worker": Share(
        "a program of the library over a worker", "library", "library_over_worker"
    ),
    "company_psnr_db": Share(
        "an image in company against alone, dB", "company", "company_psnr_db"
    ),
    "graphs_compiled": Share(
        "graphs compiled by ten nodes of unlike memory, packages there",
        "unlike_memory",
        "graphs_compiled",
    ),
    "endings_failed": Share(
        "of 50 endings while it compiles: crashes, wrong exit codes and orphans",
        "endings",
        "endings_failed",
    ),
    "graphs_compiled_cold": Share(
        "graphs compiled for unlike jobs of three sizes, cold",
        "bag_sizes_without_kernels",
        "graphs_compiled",
    ),
}


def summarise(results: Figures) -> Figures:
    """All figures; one whose rows are of two runs stays as it was measured."""
    rows: Mapping[str, Figures] = results.get("rows", {})
    found: Figures = {}
    for name, (_, row, key, over_row, over_key) in FIGURES.items():
        one, other = rows.get(row, {}), rows.get(over_row, {})
        value = one.get(key)
        if over_row:
            value = quotient(value, other.get(over_key))
            if one.get("run") != other.get("run"):
                value = results.get(name)
        found[name] = round(value, 4) if isinstance(value, float) else value
    return found


def table(results: Figures) -> str:
    """The figures that were measured, as a document shows them."""
    lines = ["| what | figure |", "| --- | --- |"]
    for name, share in FIGURES.items():
        if results.get(name) is not None:
            lines.append(f"| {share.what} | {results[name]:.4g} |")
    return "\n".join(lines)


def to_measure(
    asked: Sequence[str],
    rows: Mapping[str, Figures],
    run: str,
    packages: Collection[str] = (),
    *,
    again: bool = False,
) -> Iterator[str]:
    """The rows that are missing, and before each those that it needs of this *run*.

    *packages*: the folders of those that are there.
    """
    given: set[str] = set()

    def ordered(names: Sequence[str], *, of_run: str | None) -> Iterator[str]:
        for name in names:
            row = rows.get(name, {})
            is_there = row.get("is_complete") and of_run in {None, row.get("run")}
            if name in given or (is_there and not (again and name in asked)):
                continue
            needs = [
                each for each in ROWS[name].needs if ROWS[each].leaves not in packages
            ]
            yield from ordered(needs, of_run=run)
            given.add(name)
            yield name

    yield from ordered(asked, of_run=None)


async def measure_row(
    name: str, arguments: argparse.Namespace, run: str, seconds: float
) -> bool:
    """Keeps a row's figures as they come; False if it did not measure all."""
    row: Figures = {"run": run}
    began_at = time.monotonic()
    told = processes.command(name, arguments)
    async with contextlib.aclosing(processes.figures_of(told, seconds)) as printed:
        async for figures in printed:
            print(f"{name}: {json.dumps(figures)}", flush=True)
            row |= figures
            keep(arguments.out, name, row | {"seconds": time.monotonic() - began_at})
    return bool(row.get("is_complete"))


def keep(path: Path, name: str, row: Figures) -> None:
    """Writes a row's figures and all shares; one without figures replaces none that has some."""
    is_empty = not row.keys() - {"run", "seconds", "exit_code", "ended_after_seconds"}

    def change(results: Figures) -> Figures:
        rows = dict(results.get("rows", {}))
        if not is_empty or name not in rows:
            rows[name] = row
        results |= {"rows": rows}
        return results | summarise(results)

    change_figures(path, change)


async def measure(arguments: argparse.Namespace) -> None:
    ends_at = time.monotonic() + arguments.seconds
    arguments.folder.mkdir(parents=True, exist_ok=True)
    mark = arguments.folder / "run"
    if not mark.exists():
        mark.write_text(secrets.token_hex(4))
    run = mark.read_text()
    rows = add_figures(arguments.out, {}).get("rows", {})
    packages = [each.name for each in arguments.folder.glob("packages/*")]
    missing = to_measure(arguments.rows, rows, run, packages, again=arguments.again)
    failed: set[str] = set()
    for name in list(missing):
        left = ends_at - time.monotonic()
        needed = failed.intersection(ROWS[name].needs)
        if needed or left < ROWS[name].seconds * (not arguments.tiny):
            print(f"{name}: left out, {left:.0f} s are left", flush=True)
            failed.add(name)
            continue
        seconds = min(left, OVERTIME * ROWS[name].seconds)
        if not await measure_row(name, arguments, run, seconds):
            failed.add(name)


def card() -> str:
    """What the first GPU is called in file names, such as "h200"."""
    try:
        pynvml.nvmlInit()
        name = str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return "cpu"
    numbered = [word for word in name.split() if any(map(str.isdigit, word))]
    return numbered[0].lower()


def row_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"unknown row {unknown[0]!r}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    processes.add_options(parser)
    parser.add_argument(
        "--rows", type=row_names, default=list(ROWS), help="comma-separated"
    )
    parser.add_argument("--again", action="store_true", help="also what is measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of everything")
    arguments = parser.parse_args()
    arguments.out = arguments.out or RESULTS / f"first-minute-{card()}.json"
    asyncio.run(measure(arguments))
    results = add_figures(arguments.out, {})
    shown = Table("figure", "measured")
    for name in FIGURES:
        shown.add_row(name, str(results.get(name)))
    Console().print(shown)
    print(json.dumps({name: results.get(name) for name in FIGURES}))


if __name__ == "__main__":
    main()
