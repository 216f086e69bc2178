"""The duration and cost of a batch on a mix of GPU classes, from inputs that name their source."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from imagefleet import errors, redaction
from imagefleet.pricing import prices

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Input:
    """A number and its source."""

    value: float
    kind: Literal["measured", "given", "listed", "assumed"]
    source: str


@dataclass(frozen=True, slots=True)
class Bench:
    """The JSON of `imagefleet bench engine` on one machine."""

    path: Path
    gpu: str
    images_per_second: Input
    start_up: Input
    steps: int


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one GPU class, with the speed, price and billed start-up of each."""

    gpu: str
    replicas: int
    images_per_second: Input
    dollars_per_hour: Input
    start_up_seconds: Input

    @property
    def images_per_dollar_gpu_only(self) -> float:
        """After start-up."""
        return self.images_per_second.value * _SECONDS_PER_HOUR / self.dollars_per_hour.value

    def images_in(self, seconds: float) -> float:
        """The images that all replicas make in *seconds*."""
        return self.replicas * self.images_per_second.value * seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch on a fleet that starts all at once and is busy until the end."""

    jobs: int
    images: int
    replicas: int
    hours: float
    gpu_dollars: float
    storage_dollars: float
    dollars: float
    images_per_dollar_gpu_only: float
    images_per_dollar: float
    mix: Sequence[Part]


def make_plan(
    jobs: int, images: int, mix: Sequence[Part], table: prices.PriceTable = prices.BUILT_IN
) -> Plan:
    """The plan of a batch on *mix*, whose parts share the work by their speed."""
    missed = sum(part.images_in(part.start_up_seconds.value) for part in mix)
    hours = (images + missed) / sum(part.images_in(_SECONDS_PER_HOUR) for part in mix)
    gpu_dollars = hours * sum(part.replicas * part.dollars_per_hour.value for part in mix)
    storage_dollars = prices.storage_dollars(jobs, images, table)
    return Plan(
        jobs=jobs,
        images=images,
        replicas=sum(part.replicas for part in mix),
        hours=hours,
        gpu_dollars=gpu_dollars,
        storage_dollars=storage_dollars,
        dollars=gpu_dollars + storage_dollars,
        images_per_dollar_gpu_only=images / gpu_dollars,
        images_per_dollar=images / (gpu_dollars + storage_dollars),
        mix=mix,
    )


def mix_for(images: int, mix: Sequence[Part], deadline_hours: float) -> list[Part]:
    """The fewest replicas, in the proportions of *mix*, that meet the deadline.

    Raises:
        SetupError: start-up alone takes longer.
    """
    seconds = deadline_hours * _SECONDS_PER_HOUR
    made = sum(part.images_in(max(0.0, seconds - part.start_up_seconds.value)) for part in mix)
    if not made:
        raise errors.SetupError("no replica is ready within the deadline: start-up is longer")
    return [replace(part, replicas=math.ceil(part.replicas * images / made)) for part in mix]


def read_bench(path: Path, table: prices.PriceTable) -> Bench:
    """Raises SetupError if the file is not such a report."""
    try:
        # The report is the last line of the benchmark's output, so a log will do.
        text = path.read_text(encoding="utf-8").strip()
        facts: dict[str, Any] = json.loads(text if text.startswith("{") else text.splitlines()[-1])
        hardware = facts["hardware"]
        name = str(hardware["device"])
        gpu = prices.gpu_of_driver(name, int(hardware.get("memory_bytes", 0)), table)
        speed, ready = float(facts["worker_images_per_second"]), float(facts["ready_seconds"])
        steps = int(facts["steps"])
        work = f"{facts['width']}x{facts['height']}, {steps} steps, {facts['model']}"
    except OSError as error:
        raise errors.SetupError(f"the report {path}: {error.strerror or error}") from None
    except (
        *(ValueError, KeyError, TypeError, IndexError, AttributeError),
        *(RecursionError, OverflowError),
    ) as error:
        raise errors.SetupError(
            f"{path} is not the JSON of `imagefleet bench engine --json-file FILE`:"
            f" {type(error).__name__}: {redaction.reason(error)}"
        ) from None
    if not 0 < speed < math.inf or not 0 <= ready < math.inf:
        raise errors.SetupError(f"the report {path} measured no speed or no start-up")
    measured = [Input(each, "measured", f"{path}: {name}, {work}") for each in (speed, ready)]
    return Bench(path, gpu, measured[0], measured[1], steps)


def refuse_unused(benches: Sequence[Bench], gpus: Collection[str]) -> None:
    """Raises SetupError for a report of a GPU class that is not among *gpus*."""
    for bench in benches:
        if bench.gpu not in gpus:
            raise errors.SetupError(
                f"{bench.path} was measured on {bench.gpu}, which is not among the GPU classes"
                f" used here ({', '.join(gpus)}): leave it out, or add that class"
            )


def bench_of(gpu: str, benches: Sequence[Bench]) -> Bench | None:
    """The last report that was measured on a *gpu*."""
    return next((bench for bench in reversed(benches) if bench.gpu == gpu), None)


def find_speed(gpu: str, given: float | None, bench: Bench | None) -> Input:
    """Images/s of one *gpu*: given, measured or assumed; raises SetupError if none is known."""
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
    """$/h of one *gpu*, given or listed; raises SetupError if neither is known."""
    if given is not None:
        return Input(given, "given", "--price-per-hour")
    try:
        name = prices.find_gpu(gpu, table.gpus)
    except errors.SetupError as error:
        raise errors.SetupError(f"{error.message}; or give --price-per-hour") from None
    dollars = prices.gpu_dollars_per_hour(name, priority, table)
    return Input(dollars, "listed", f"{priority} priority, {table.gpus[name].source}")
