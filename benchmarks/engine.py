"""Measures the engine: images/s with a LoRA per job and without, limits, exactness.

    python benchmarks/engine.py --seconds 270 --out benchmarks/results/engine-h200.json
    python benchmarks/engine.py --rows mixed,no_lora --out /tmp/two-rows.json

Each group of rows has its own process (`engine_rows.py`), so that all load and compile in parallel
and a failure affects no other group. They measure one at a time while the others are stopped, in
the order of the rows' value, until the time is up. The results are written after each row. `--tiny`
tries everything on a CPU, with meaningless figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

ROWS_SCRIPT = Path(__file__).with_name("engine_rows.py")

#: Kept at the end, to stop the processes and write the results.
RESERVE_SECONDS = 3.0

#: With little time left, a row is measured for less, but at least for this share.
LEAST_SHARE = 0.4

#: A row that takes this much longer than expected has failed.
OVERTIME_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: its process, its seconds, and its overhead in seconds.

    A row that *fills* gaps is short and may precede more valuable ones that are not ready. One that
    *tolerates* running processes measures no time.
    """

    name: str
    group: str
    seconds: float
    overhead: float
    fills: bool = False
    tolerates: bool = False


#: In the order of their value.
ROWS = (
    Row("limit", "exact", 0, 3, fills=True),
    Row("psnr", "exact", 0, 10, fills=True, tolerates=True),
    Row("mixed", "engine", 12, 4),
    Row("no_lora", "base", 10, 4),
    Row("mixed_steps", "engine", 18, 6),
    Row("baseline", "plain", 0, 6, fills=True),
    Row("baseline_four_steps", "plain", 0, 6, fills=True),
    Row("worker", "engine", 20, 8),
    Row("cfg_1", "base", 10, 4),
    Row("half_guided", "base", 16, 8),
    Row("all_samplers", "base", 2, 120),
    Row("four_steps_engine", "few_steps", 8, 4),
    Row("four_steps", "few_steps", 20, 8),
    Row("four_steps_lora_engine", "few_steps_lora", 8, 4),
    Row("four_steps_lora", "few_steps_lora", 20, 8),
    Row("rank_32", "loras", 10, 6),
    Row("rank_128", "loras", 10, 8),
    Row("locon_all", "loras", 10, 8),
    Row("three_loras", "loras", 8, 8),
    Row("dora", "loras", 8, 6),
    Row("two_loras", "loras", 8, 6),
    Row("shuffled_ranks", "loras", 8, 8),
    Row("loha", "loras", 8, 6),
    Row("lokr", "loras", 8, 6),
    Row("locon_sixth", "loras", 8, 6),
    Row("one_size", "sizes", 10, 6),
    Row("large_size", "sizes", 10, 6),
    Row("sizes", "sizes", 24, 8),
    Row("prompts", "prompts", 16, 8),
    Row("company", "company", 0, 40, fills=True, tolerates=True),
    Row("psnr_compiled", "exact_compiled", 0, 10, tolerates=True),
    Row("capped", "capped", 10, 5),
    Row("capped_rank_32", "capped_loras", 8, 6),
    Row("capped_rank_128", "capped_loras", 8, 8),
    Row("capped_three_loras", "capped_loras", 8, 8),
    Row("capped_dora", "capped_loras", 8, 6),
    Row("capped_locon_all", "capped_loras", 8, 60),
    Row("capped_sizes", "capped_sizes", 24, 8),
)

#: The group that creates the model.
BUILDER = "engine"


class Group:
    """One process that measures rows, of `engine_rows.py` or `families/measure.py`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.is_ready = False
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Iterable[str],
        log: IO[bytes] | None,
        *,
        niceness: int = 0,
        script: Path = ROWS_SCRIPT,
    ) -> Group:
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(niceness), sys.executable, str(script), name, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        return cls(name, process)

    async def wait_until_ready(self) -> None:
        """Returns once it is ready or the process has ended."""
        self.is_ready = bool((await self._read()).get("ready"))

    async def measure(self, row: str, seconds: float, timeout_seconds: float) -> dict[str, Any]:
        """The row's figures, or its error."""
        if self._process.stdin is None:
            raise RuntimeError("started without a pipe")
        command = {"row": row, "seconds": seconds}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_seconds):
                figures = await self._read()
        except TimeoutError:
            self.send(signal.SIGKILL)
            figures = {"error": "took far longer than expected"}
        if figures.pop("row", None) != row:
            self.is_ready = False
        return figures

    def send(self, number: signal.Signals) -> None:
        """Signals the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def end(self) -> None:
        self.send(signal.SIGKILL)
        await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("started without a pipe")
        line = await self._process.stdout.readline()
        if not line:
            return {"error": f"the process ended with code {await self._process.wait()}"}
        reply: dict[str, Any] = json.loads(line)
        return reply


class Benchmark:
    """Measures the rows within the given time."""

    def __init__(self, arguments: argparse.Namespace, ends_at: float, folder: Path) -> None:
        self._arguments = arguments
        self._ends_at = ends_at
        self._folder = folder
        self._began_at = time.monotonic()
        self._groups: dict[str, Group] = {}
        self._warming: dict[str, asyncio.Task[None]] = {}
        self._group_names: list[str] = []
        self._options: list[str] = []
        self.rows: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        try:
            await self._start()
            waiting = [row for row in ROWS if row.name in self._arguments.rows]
            while waiting:
                row = self._next(waiting)
                if row is not None:
                    waiting.remove(row)
                    await self._measure(row)
                elif not await self._wait():
                    break
            for row in waiting:
                self._record(row, {"not_measured": "its process was not ready in time"})
        finally:
            for task in self._warming.values():
                task.cancel()
            await asyncio.gather(*(group.end() for group in self._groups.values()))

    async def _start(self) -> None:
        given = self._arguments
        options = [str(self._folder), "--device", given.device]
        for name in ("slots", "capped_slots"):
            if (value := getattr(given, name)) is not None:
                options += [f"--{name.replace('_', '-')}", str(value)]
        options += ["--tiny"] if given.tiny else []
        self._group_names = list(dict.fromkeys(row.group for row in ROWS if row.name in given.rows))
        builds = [name for name in self._group_names if not name.startswith("exact")]
        builder = BUILDER if BUILDER in builds else next(iter(builds), "")
        self._options = [*options, "--builder", builder]
        for name in sorted(self._group_names, key=lambda name: name != BUILDER):
            await self._start_group(name)

    async def _start_group(self, name: str) -> None:
        with self._arguments.log.open("ab") as log:
            niceness = self._group_names.index(name) if name != BUILDER else 0
            group = await Group.start(name, self._options, log, niceness=niceness)
        self._groups[name] = group
        self._warming[name] = asyncio.create_task(group.wait_until_ready(), name=name)

    def _next(self, waiting: list[Row]) -> Row | None:
        """The most valuable row whose process is ready or has failed."""
        is_first = True
        for row in waiting:
            task = self._warming.get(row.group)  # None for groups that start late
            is_warming = task is None or not task.done()
            if not is_warming and (is_first or row.fills or row.tolerates):
                return row
            is_first = is_first and not is_warming
        return None

    async def _wait(self) -> bool:
        """Waits for the next process to be ready; False if there is none or no time."""
        pending = {task for task in self._warming.values() if not task.done()}
        left = self._left()
        if not pending or left <= 0:
            return False
        done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            name = task.get_name()
            self._log(f"{name} is {'ready' if self._groups[name].is_ready else 'gone'}")
        return bool(done)

    async def _measure(self, row: Row) -> None:
        group, left = self._groups[row.group], self._left()
        seconds = min(row.seconds * self._arguments.scale, left - row.overhead)
        if not group.is_ready:
            self._record(row, {"error": "its process failed; see the log"})
        elif seconds < row.seconds * self._arguments.scale * LEAST_SHARE:
            self._record(row, {"not_measured": f"only {left:.0f} s were left"})
        else:
            timeout = min(2 * (seconds + row.overhead) + OVERTIME_SECONDS, left)
            with self._others_stopped(row):
                self._record(row, await group.measure(row.name, seconds, timeout))

    @contextlib.contextmanager
    def _others_stopped(self, row: Row) -> Iterator[None]:
        others = (
            []
            if row.tolerates
            else [group for name, group in self._groups.items() if name != row.group]
        )
        for group in others:
            group.send(signal.SIGSTOP)
        try:
            yield
        finally:
            for group in others:
                group.send(signal.SIGCONT)

    def _record(self, row: Row, figures: dict[str, Any]) -> None:
        self.rows[row.name] = figures
        self._log(f"{row.name}: {json.dumps(figures)[:300]}")
        self.write()

    def write(self) -> dict[str, Any]:
        """Writes the results so far, with null for missing ones."""
        results = summarise(self.rows) | {
            "seconds": round(time.monotonic() - self._began_at, 1),
            "commit": self._arguments.commit,
            "rows": self.rows,
        }
        path: Path = self._arguments.out
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        return results

    def _left(self) -> float:
        return self._ends_at - RESERVE_SECONDS - time.monotonic()

    def _log(self, text: str) -> None:
        elapsed = time.monotonic() - self._began_at
        with self._arguments.log.open("a", encoding="utf-8") as log:
            log.write(f"{elapsed:6.1f} s  {text}\n")


Rows = Mapping[str, Mapping[str, Any]]


def figure(rows: Rows, row: str, key: str = "images_per_second") -> float | None:
    """What a row measured; None if it did not."""
    return rows.get(row, {}).get(key)


def summarise(rows: Rows) -> dict[str, Any]:
    """The main figures, and those they are computed from."""
    found = functools.partial(figure, rows)
    mixed, limit = found("mixed"), rows.get("limit", {})
    from_queue = found("worker") or mixed
    most = quotient(limit.get("matrix_flops_per_second"), limit.get("flops_per_image"))
    recompiles = [
        row["recompiles_after_warmup"]
        for row in rows.values()
        if row.get("recompiles_after_warmup") is not None
    ]
    decibels = [value for row in ("psnr", "psnr_compiled") if (value := found(row, "psnr_db"))]
    return {
        "mixed_lora_images_per_second": rounded(from_queue),
        "no_lora_images_per_second": rounded(found("no_lora")),
        "mixed_over_no_lora": quotient(mixed or found("rank_32"), found("no_lora")),
        "over_diffusers_peft": quotient(from_queue, found("baseline")),
        "idle_fraction_300ms": rounded(found("worker", "idle_fraction")),
        "capped_over_uncapped": quotient(found("capped"), mixed),
        "mixed_steps_over_uniform": quotient(
            found("mixed_steps", "unet_calls_per_second"), found("mixed", "unet_calls_per_second")
        ),
        "recompiles_after_warmup": max(recompiles, default=None),
        "matrix_limit_fraction": quotient(from_queue, most),
        "psnr_db": rounded(min(decibels, default=None)),
        "mixed_lora_measured": "from the queue to the stored PNG" if found("worker") else "engine",
        "engine_mixed_lora_images_per_second": rounded(mixed),
        "matrix_limit_images_per_second": most,
        "diffusers_peft_images_per_second": rounded(found("baseline")),
        **summarise_jobs(rows),
        **summarise_few_steps(rows),
        "hardware": limit.get("hardware"),
        "versions": limit.get("versions"),
    }


#: The rows of `engine_job_rows.py` that are compared with its row of rank 32.
COMPARED = ("rank_128", "shuffled_ranks", "two_loras", "three_loras", "locon_sixth", "locon_all",
            "loha", "lokr", "dora")  # fmt: skip


def summarise_jobs(rows: Rows) -> dict[str, Any]:
    """The main figures of `engine_job_rows.py`."""
    found = functools.partial(figure, rows)
    names = ("rank_32", *COMPARED)
    capped = [quotient(found(f"capped_{row}"), found(row)) for row in names]
    capped.append(quotient(found("capped_sizes"), found("sizes")))
    return {
        **{f"{row}_over_rank_32": quotient(found(row), found("rank_32")) for row in COMPARED},
        "sizes_mixed_by_pixels": quotient(
            found("sizes", "pixels_per_second"), found("one_size", "pixels_per_second")
        ),
        "large_size_by_pixels": quotient(
            found("large_size", "pixels_per_second"), found("one_size", "pixels_per_second")
        ),
        "prompts_mixed_over_rank_32": quotient(found("prompts"), found("rank_32")),
        "company_psnr_db": rounded(found("company", "psnr_db")),
        "least_capped_over_uncapped": min((each for each in capped if each), default=None),
    }


def summarise_few_steps(rows: Rows) -> dict[str, Any]:
    """The main figures of images without guidance, of few steps, and of all samplers."""
    found = functools.partial(figure, rows)
    rows_of = functools.partial(figure, rows, key="unet_rows_per_second")
    each = rows.get("all_samplers", {}).get("each", {})
    guided, unguided = rows_of("no_lora"), rows_of("cfg_1")
    # Half of the images are guided, and have two thirds of the rows.
    unmixed = 3 / (2 / guided + 1 / unguided) if guided and unguided else None
    return {
        "cfg1_over_cfg7": quotient(found("cfg_1"), found("no_lora")),
        "guided_mixed_over_unmixed": quotient(rows_of("half_guided"), unmixed),
        "all_samplers_over_euler_a": quotient(rows_of("all_samplers"), each.get("euler_ancestral")),
        "slowest_sampler_over_euler_a": quotient(
            found("all_samplers", "slowest"), each.get("euler_ancestral")
        ),
        "sd15_4_steps_images_per_second": rounded(found("four_steps")),
        "sd15_4_steps_idle_fraction": rounded(found("four_steps", "idle_fraction")),
        "sd15_4_steps_lora_images_per_second": rounded(found("four_steps_lora")),
        "sd15_4_steps_lora_over_diffusers_peft": quotient(
            found("four_steps_lora"), found("baseline_four_steps")
        ),
    }


def quotient(one: float | None, other: float | None) -> float | None:
    return round(one / other, 4) if one is not None and other else None


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def show(results: Mapping[str, Any]) -> None:
    table = Table("figure", "measured")
    for name, value in results.items():
        if isinstance(value, int | float):
            table.add_row(name, f"{value:g}")
    Console().print(table)
    for name, figures in results["rows"].items():
        if problem := figures.get("error") or figures.get("not_measured"):
            print(f"{name}: {problem}")


def commit() -> str | None:
    """The commit of the source, if it is a checkout."""
    asked = subprocess.run(
        ("git", "-C", str(ROWS_SCRIPT.parent), "rev-parse", "HEAD"),
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or None


def row_names(text: str = "") -> list[str]:
    """Comma-separated names of rows; all by default."""
    known = [row.name for row in ROWS]
    names = text.split(",") if text else known
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown row {unknown[0]!r}; known: {', '.join(known)}")
    return names


def main() -> None:
    began_at = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="total time")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("results") / "engine-h200.json"
    )
    parser.add_argument("--log", type=Path, default=Path("engine-benchmark.log"))
    parser.add_argument("--rows", type=row_names, default=row_names(), help="such as mixed,no_lora")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, help="images at once (default: by free memory)")
    parser.add_argument("--capped-slots", type=int, help="the same with limited memory")
    parser.add_argument("--scale", type=float, default=1, help="factor for each row's seconds")
    parser.add_argument("--commit", default=commit(), help="recorded in the results")
    parser.add_argument("--tiny", action="store_true", help="a trial with a tiny model")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which also ends the processes
    with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as folder:
        benchmark = Benchmark(arguments, began_at + arguments.seconds, Path(folder) / "shared")
        asyncio.run(benchmark.run())
        results = benchmark.write()
    show(results)
    print(json.dumps({name: value for name, value in results.items() if name != "rows"}))


if __name__ == "__main__":
    main()
