"""The duration and cost of a batch on a mix of GPU classes, from inputs that name their source."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from fleet.plan.work import Work
from imagefleet import errors, redaction, validation
from imagefleet.pricing import families, prices

DEFAULT_GPU = "RTX 3060 Ti"

_SECONDS_PER_HOUR = 3600

Basis = Literal["measured", "given", "listed", "assumed", "estimated"]


@dataclass(frozen=True, slots=True)
class Input:
    """A number and its source."""

    value: float
    kind: Basis
    source: str


@dataclass(frozen=True, slots=True)
class Bench:
    """The JSON of `imagefleet bench engine` on one machine."""

    path: Path
    gpu: str
    images_per_second: Input
    start_up: Input
    family: families.Family = families.SD1
    tflop_per_image: float = families.SD1.image_tflop()


_NO_START_UP = Input(0.0, "assumed", "not included without --bench")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the machines: prices, reports, and the operator's own figures."""

    table: prices.PriceTable
    benches: Sequence[Bench]
    priority: prices.Priority
    dollars_per_hour: float | None
    images_per_second: float | None


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """The images of one model, and how fast one GPU draws them."""

    model: str | None
    family: str
    images: int
    images_per_second: Input

    @property
    def seconds(self) -> float:
        """Seconds that one GPU takes for all images."""
        return self.images / self.images_per_second.value


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one GPU class, with the speed, price and billed start-up of each."""

    gpu: str
    replicas: int
    images_per_second: Input
    dollars_per_hour: Input
    start_up_seconds: Input
    models: Sequence[ModelSpeed] = ()

    @property
    def images_per_dollar_gpu_only(self) -> float:
        """Images per dollar after start-up."""
        return self.images_per_second.value * _SECONDS_PER_HOUR / self.dollars_per_hour.value

    def images_in(self, seconds: float) -> float:
        """The images that all replicas make in *seconds*."""
        return self.replicas * self.images_per_second.value * seconds


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one model's images take of a plan, start-up included."""

    model: str | None
    family: str
    images: int
    gpu_hours: float
    gpu_dollars: float
    images_per_dollar_gpu_only: float


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
    models: Sequence[ModelCost] = ()


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
        models=_model_costs(mix, hours),
    )


def _model_costs(mix: Sequence[Part], hours: float) -> list[ModelCost]:
    """Every GPU draws each model's images in the same proportions."""
    costs = []
    for at, each in enumerate(mix[0].models):
        gpu_hours = gpu_dollars = 0.0
        for part in mix:
            seconds = [model.seconds for model in part.models]
            share = hours * part.replicas * seconds[at] / sum(seconds)
            gpu_hours += share
            gpu_dollars += share * part.dollars_per_hour.value
        costs.append(
            ModelCost(
                each.model,
                each.family,
                each.images,
                gpu_hours,
                gpu_dollars,
                each.images / gpu_dollars,
            )
        )
    return costs


def make_mix(named: Sequence[tuple[str, int]], works: Sequence[Work], known: Known) -> list[Part]:
    """Replicas of each class, with speed and price; raises SetupError for what is not known."""
    benches, dollars, rate = known.benches, known.dollars_per_hour, known.images_per_second
    if len(named) > 1 and (dollars is not None or rate is not None):
        raise errors.SetupError(
            "--price-per-hour and --images-per-second apply to one GPU class; for a mix use"
            " --price-file and --bench"
        )
    mix = []
    for name, count in named:
        found = name
        if dollars is None or rate is None:  # a class with a report need not be in the table
            measured = prices.matching_gpus(name, [each.gpu for each in benches])
            found = measured[0] if measured else prices.find_gpu(name, known.table.gpus)
        speeds = find_speeds(found, works, rate, benches)
        price = find_price(found, known.priority, dollars, known.table)
        made_on = bench_of(found, benches, works[0].family)
        start_up = made_on.start_up if made_on else _NO_START_UP
        mix.append(Part(found, count, mean_speed(speeds), price, start_up, speeds))
    refuse_unused(benches, {part.gpu for part in mix})
    return mix


def sources(part: Part) -> list[str]:
    """The figures of a part and their sources, a sentence each."""
    inputs = [
        (f"{model.images_per_second.value:.3g} {_described(model)}/s", model.images_per_second)
        for model in part.models
    ]
    inputs.append((f"${part.dollars_per_hour.value:g}/h", part.dollars_per_hour))
    start_up = part.start_up_seconds
    inputs.append((f"{start_up.value:g} s of start-up", start_up))
    return [f"{part.gpu}: {text}: {each.kind}: {each.source}." for text, each in inputs]


def _described(model: ModelSpeed) -> str:
    if model.model is not None:
        return f"images of {redaction.printable(model.model)}"
    is_sd1 = model.family == families.SD1.slug
    return "images" if is_sd1 else f"{families.find(model.family).name} images"


def mix_for(images: int, mix: Sequence[Part], deadline_hours: float) -> list[Part]:
    """The fewest replicas, in *mix*'s proportions, for the deadline; raises SetupError if none."""
    seconds = deadline_hours * _SECONDS_PER_HOUR
    made = sum(part.images_in(max(0.0, seconds - part.start_up_seconds.value)) for part in mix)
    if not made:
        raise errors.SetupError("no replica is ready within the deadline: start-up is longer")
    return [replace(part, replicas=math.ceil(part.replicas * images / made)) for part in mix]


class _Hardware(BaseModel):
    device: str
    memory_bytes: int = 0


class _Report(BaseModel):
    """What a plan takes from the JSON of `imagefleet bench engine`."""

    hardware: _Hardware
    worker_images_per_second: float = Field(gt=0, allow_inf_nan=False)
    ready_seconds: float = Field(ge=0, allow_inf_nan=False)
    width: int = Field(gt=0, le=2**16)
    height: int = Field(gt=0, le=2**16)
    steps: int = Field(gt=0, le=2**16)
    family: str = families.SD1.slug
    model: str


def read_bench(path: Path, table: prices.PriceTable) -> Bench:
    """Raises SetupError if the file is not such a report."""
    try:
        # The report is the last line of the benchmark's output, so a log will do.
        text = path.read_text(encoding="utf-8").strip()
        report = _Report.model_validate_json(
            text if text.startswith("{") else text.rpartition("\n")[2]
        )
    except OSError as error:
        raise errors.SetupError(f"the report {path}: {error.strerror or error}") from None
    except ValueError as error:
        why = (
            validation.sentence(error)
            if isinstance(error, ValidationError)
            else redaction.reason(error)
        )
        raise errors.SetupError(
            f"{path} is not the JSON of `imagefleet bench engine --json-file FILE`: {why}"
        ) from None
    device = report.hardware.device
    gpu = prices.gpu_of_driver(device, report.hardware.memory_bytes, table)
    family = families.find(report.family)
    source = (
        f"{path}: {device}, {report.width}x{report.height}, {report.steps} steps, {report.model}"
    )
    return Bench(
        path,
        gpu,
        Input(report.worker_images_per_second, "measured", source),
        Input(report.ready_seconds, "measured", source),
        family,
        family.image_tflop(report.width, report.height, report.steps),
    )


def refuse_unused(benches: Sequence[Bench], gpus: Collection[str]) -> None:
    """Raises SetupError for a report of a GPU class that is not among *gpus*."""
    for bench in benches:
        if bench.gpu not in gpus:
            raise errors.SetupError(
                f"{bench.path} was measured on {bench.gpu}, which is not among the GPU classes"
                f" used here ({', '.join(gpus)}): leave it out, or add that class"
            )


def bench_of(
    gpu: str, benches: Sequence[Bench], family: families.Family | None = None
) -> Bench | None:
    """The last report that was measured on a *gpu*, one of *family* if there is any."""
    there = [bench for bench in reversed(benches) if bench.gpu == gpu]
    return next((bench for bench in there if bench.family is family), next(iter(there), None))


def find_speeds(
    gpu: str, works: Sequence[Work], given: float | None, benches: Sequence[Bench]
) -> list[ModelSpeed]:
    """How fast one *gpu* draws each model's images.

    Raises:
        SetupError: no speed is known, a model does not fit the GPU, or the one that is given is for
            several families.
    """
    if given is not None and len({work.family for work in works}) > 1:
        raise errors.SetupError(
            "--images-per-second is for jobs of one model family; for several use --bench, one"
            " report for each"
        )
    for work in works:
        families.refuse_small(gpu, work.family)
    return [
        ModelSpeed(
            work.model,
            work.family.slug,
            work.images,
            find_speed(gpu, given, bench_of(gpu, benches, work.family), work),
        )
        for work in works
    ]


def mean_speed(speeds: Sequence[ModelSpeed]) -> Input:
    """Images/s of one GPU over all models' images."""
    if len(speeds) == 1:
        return speeds[0].images_per_second
    value = sum(each.images for each in speeds) / sum(each.seconds for each in speeds)
    # As sure as the least sure of them.
    kinds = {each.images_per_second.kind for each in speeds}
    order: tuple[Basis, ...] = ("estimated", "assumed", "measured", "given")
    kind = next(each for each in order if each in kinds)
    return Input(value, kind, f"the mean over {len(speeds)} models, weighted by their images")


def find_speed(gpu: str, given: float | None, bench: Bench | None, work: Work) -> Input:
    """Images/s of one *gpu*: given, measured, assumed or estimated; raises SetupError if none."""
    if given is not None:
        return Input(given, "given", "--images-per-second")
    if bench is not None:
        return _scaled(bench.images_per_second, bench.family, bench.tflop_per_image, work)
    if gpu not in prices.ASSUMED_IMAGES_PER_SECOND:
        raise errors.SetupError(
            f"no speed is known for the {gpu}: give --images-per-second or a --bench report"
        )
    record = Input(prices.ASSUMED_IMAGES_PER_SECOND[gpu], "assumed", prices.SPEEDS_SOURCE)
    return _scaled(record, families.SD1, families.SD1.image_tflop(), work)


def _scaled(known: Input, family: families.Family, tflop_per_image: float, work: Work) -> Input:
    """A known speed, in images of this work: by their operations, and the families' rates."""
    if work.family is family and math.isclose(work.tflop_per_image, tflop_per_image):
        return known
    rate = work.family.rate / family.rate
    value = known.value * rate * tflop_per_image / work.tflop_per_image
    by = (
        f"{work.tflop_per_image:,.1f} TFLOP per image against {tflop_per_image:,.1f} of"
        f" {family.name}, {known.value:g} images/s ({known.kind}: {known.source})"
    )
    if work.family is family:
        return Input(value, known.kind, by)
    unsure = [each.rate_source for each in (family, work.family) if not each.is_measured]
    of_rate = "; ".join(unsure) or (
        f"{work.family.name} gets {rate:.2f} of {family.name}'s operations/s, as measured:"
        f" {work.family.rate_source}"
    )
    return Input(value, "estimated", f"{by}; {of_rate}")


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
