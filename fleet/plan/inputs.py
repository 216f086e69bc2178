"""The inputs of a plan, each with its source: measured, given, listed or assumed."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from imagefleet import errors
from imagefleet.pricing import prices

Kind = Literal["measured", "given", "listed", "assumed"]


@dataclass(frozen=True, slots=True)
class Input:
    """A number and its source."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Bench:
    """A report of `imagefleet bench engine --report` on one machine."""

    path: Path
    gpu: str
    images_per_second: Input
    start_up: Input


def read_bench(path: Path, table: prices.PriceTable) -> Bench:
    """Raises SetupError if the file is not such a report."""
    try:
        # The report is the last line of the benchmark's output, so a log will do.
        text = path.read_text(encoding="utf-8").strip()
        facts: dict[str, Any] = json.loads(text if text.startswith("{") else text.splitlines()[-1])
        hardware = facts["hardware"]
        name = str(hardware["device"])
        gpu = prices.gpu_of_driver(name, int(hardware.get("memory_bytes", 0)), table)
        speed, ready_seconds = float(facts["worker_images_per_second"]), facts["ready_seconds"]
        work = f"{facts['width']}x{facts['height']}, {facts['steps']} steps, {facts['model']}"
    except OSError as error:
        raise errors.SetupError(f"the report {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise errors.SetupError(
            f"{path} is not a report of `imagefleet bench engine --report FILE`: {error!r}"
        ) from None
    if not speed > 0:
        raise errors.SetupError(f"the report {path} measured a speed of zero")
    source = f"{path}: {name}, {work}"
    measured_speed = Input(speed, "measured", source)
    return Bench(path, gpu, measured_speed, Input(ready_seconds, "measured", source))


def refuse_unused(benches: Sequence[Bench], gpus: Collection[str]) -> None:
    """Raises SetupError for a report of a GPU class that is not among *gpus*."""
    for bench in benches:
        if bench.gpu not in gpus:
            raise errors.SetupError(
                f"{bench.path} was measured on {bench.gpu}, which is not among the GPU classes"
                f" used here ({', '.join(gpus)}): leave it out, or add that class"
            )


def find_speed(gpu: str, given: float | None, bench: Bench | None) -> Input:
    """Images/s of one *gpu*: given, measured or assumed, in this order.

    Raises:
        SetupError: none of them is known.
    """
    if given is not None:
        return Input(given, "given", "--images-per-second")
    if bench is not None:
        return bench.images_per_second
    if gpu not in prices.ASSUMED_IMAGES_PER_SECOND:
        raise errors.SetupError(
            f"no speed is known for the {gpu}: give --images-per-second or a --bench report"
        )
    return Input(prices.ASSUMED_IMAGES_PER_SECOND[gpu], "assumed", prices.SPEEDS_SOURCE)


def find_price(
    gpu: str, priority: prices.Priority, given: float | None, table: prices.PriceTable
) -> Input:
    """$/h of one *gpu*.

    Raises:
        SetupError: no price is known.
    """
    if given is not None:
        return Input(given, "given", "--price-per-hour")
    try:
        name = prices.find_gpu(gpu, table)
    except errors.SetupError as error:
        raise errors.SetupError(f"{error.message}; or give --price-per-hour") from None
    dollars = prices.gpu_dollars_per_hour(name, priority, table)
    return Input(dollars, "listed", f"{priority} priority, {table.gpus[name].source}")


def bench_of(gpu: str, benches: Sequence[Bench]) -> Bench | None:
    """The last report that was measured on a *gpu*."""
    return next((bench for bench in reversed(benches) if bench.gpu == gpu), None)
