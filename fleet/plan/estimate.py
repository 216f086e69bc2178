"""The duration and cost of a batch on a mix of GPU classes, from inputs that name their source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import AliasPath, BaseModel, Field

from fleet.plan.work import ModelJobs
from imagefleet import redaction, validation
from imagefleet.errors import SetupError
from imagefleet.pricing import families, prices
from imagefleet.pricing.prices import PriceTable, Priority
from imagefleet.storage.protocol import Operations

DEFAULT_GPU = "RTX 3060 Ti"

#: Images whose operations differ by no more than that are drawn at the same speed.
_ALIKE = 0.03

Basis = Literal["measured", "given", "listed", "assumed", "estimated"]


@dataclass(frozen=True)
class Input:
    """A number and its source."""

    value: float
    kind: Basis
    source: str


_COLD = prices.WARM_UPS["like_jobs"]

#: Seconds that a node loses until full speed if no kernels are stored for it.
ASSUMED_START_UP = Input(
    _COLD.lost(_COLD.first_image_seconds, _COLD.full_speed_seconds),
    "assumed",
    _COLD.source,
)


@dataclass(frozen=True)
class Bench:
    """A GPU's speed, and of which images: those of the reference run, unless a report says it."""

    gpu: str
    images_per_second: Input
    start_up: Input = ASSUMED_START_UP
    family: families.Family = families.SD1
    tflop_per_image: float = families.SD1.taken_tflop(families.SD1.image_tflop())


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
        return self.images_per_second.value * 3600 / self.dollars_per_hour.value

    def images_in(self, seconds: float) -> float:
        """The images that all replicas make in *seconds*."""
        return self.replicas * self.images_per_second.value * seconds


@dataclass(frozen=True)
class ModelCost:
    """One model's share of a plan: its images, hours and dollars, start-up included."""

    model: str | None
    family: str
    images: int
    gpu_hours: float
    gpu_dollars: float
    images_per_dollar_gpu_only: float


@dataclass(frozen=True)
class BatchPlan:
    """A batch on a fleet that starts all at once and is busy until the end."""

    jobs: int
    images: int
    replicas: int
    hours: float
    gpu_dollars: float
    #: What of the GPUs' dollars each replica's one start-up takes.
    start_up_dollars: float
    storage_dollars: float
    storage_operations: Operations
    #: Dollars for a month of the images by their format.
    storage_month_dollars: Mapping[str, float]
    dollars: float
    images_per_dollar_gpu_only: float
    images_per_dollar: float
    mix: Sequence[Part]
    #: Shares of the paid time, by the cases of `prices.WARM_UPS`: before the first image, before
    #: full speed, and lost.
    cold: Mapping[str, Sequence[float]]
    models: Sequence[ModelCost] = ()


def make_plan(
    works: Sequence[ModelJobs],
    mix: Sequence[Part],
    table: PriceTable = prices.BUILT_IN,
    bundle: int = 1,
) -> BatchPlan:
    """The plan of a batch on *mix*, whose parts share the work by their speed.

    *bundle*: jobs in a message at most, of those that are bundled.
    """
    jobs = sum(work.jobs for work in works)
    images = sum(work.images for work in works)
    bundled = packs = 0
    for work in works:
        if (size := min(bundle, work.most_in_bundle)) > 1:
            bundled += work.bundled
            packs += -(-work.bundled // size)
    missed = sum(part.images_in(part.start_up_seconds.value) for part in mix)
    hours = (images + missed) / sum(part.images_in(3600) for part in mix)
    gpu_dollars = start_up_dollars = 0.0
    for part in mix:
        per_hour = part.replicas * part.dollars_per_hour.value
        gpu_dollars += hours * per_hour
        start_up_dollars += part.start_up_seconds.value / 3600 * per_hour
    operations = prices.operations(jobs - bundled, images - bundled, packs)
    storage_dollars = table.storage.dollars(operations)
    gigabytes = sum(work.pixels for work in works) / 1e9
    return BatchPlan(
        jobs=jobs,
        images=images,
        replicas=sum(part.replicas for part in mix),
        hours=hours,
        gpu_dollars=gpu_dollars,
        start_up_dollars=start_up_dollars,
        storage_dollars=storage_dollars,
        storage_operations=operations,
        storage_month_dollars={
            form: gigabytes * each * table.storage.gigabyte_month
            for form, each in prices.BYTES_PER_PIXEL.items()
        },
        dollars=gpu_dollars + storage_dollars,
        images_per_dollar_gpu_only=images / gpu_dollars,
        images_per_dollar=images / (gpu_dollars + storage_dollars),
        mix=mix,
        cold=_cold(hours),
        models=_model_costs(mix, hours),
    )


def _cold(hours: float) -> dict[str, list[float]]:
    """A replica starts once, and again after each interruption."""
    starts = (1 / hours + prices.INTERRUPTIONS_PER_HOUR) / 3600
    shares = {}
    for case, warm_up in prices.WARM_UPS.items():
        starting = min(1.0, starts * warm_up.first_image_seconds)
        cold = min(1.0, starts * warm_up.full_speed_seconds)
        shares[case] = [starting, cold, warm_up.lost(starting, cold)]
    return shares


def _model_costs(mix: Sequence[Part], hours: float) -> list[ModelCost]:
    """Every GPU draws each model's images in the same proportions."""
    costs = []
    for at, priced in enumerate(mix[0].models):
        gpu_hours = gpu_dollars = 0.0
        for part in mix:
            seconds = [model.seconds for model in part.models]
            share = hours * part.replicas * seconds[at] / sum(seconds)
            gpu_hours += share
            gpu_dollars += share * part.dollars_per_hour.value
        costs.append(
            ModelCost(
                priced.model,
                priced.family,
                priced.images,
                gpu_hours,
                gpu_dollars,
                priced.images / gpu_dollars,
            )
        )
    return costs


def sources(part: Part) -> list[str]:
    """The figures of a part and their sources, a sentence each."""
    inputs = [
        (
            f"{model.images_per_second.value:.3g} {_described(model)}/s",
            model.images_per_second,
        )
        for model in part.models
    ]
    inputs.append((f"${part.dollars_per_hour.value:g}/h", part.dollars_per_hour))
    start_up = part.start_up_seconds
    inputs.append((f"{start_up.value:.3g} s of start-up", start_up))
    said = [
        f"{part.gpu}: {text}: {found.kind}: {found.source}." for text, found in inputs
    ]
    for model in part.models:
        family = families.find(model.family)
        if family.is_held_in_int8(part.gpu):
            said.append(
                f"{part.gpu}: too small for {family.name} in bfloat16: workers hold most of its"
                " weights in int8, which takes some of the speed."
            )
    return said


def old_prices(mix: Sequence[Part], table: PriceTable, today: date) -> list[str]:
    """A sentence for each listed price that is older than `prices.MAX_AGE_DAYS`."""
    days = {
        part.gpu: table.gpus[part.gpu].as_of
        for part in mix
        if part.dollars_per_hour.kind == "listed"
    }
    days["storage"] = table.storage.as_of
    return [
        f"the price of {name} is of {day}, {(today - day).days:,} days ago: give today's with"
        " --price-file"
        for name, day in days.items()
        if day is not None and (today - day).days > prices.MAX_AGE_DAYS
    ]


def _described(model: ModelSpeed) -> str:
    if model.model is not None:
        return f"images of {redaction.printable(model.model)}"
    is_sd1 = model.family == families.SD1.slug
    return "images" if is_sd1 else f"{families.find(model.family).name} images"


def mix_for(images: int, mix: Sequence[Part], deadline_hours: float) -> list[Part]:
    """The fewest replicas, in *mix*'s proportions, for the deadline; raises SetupError if none."""
    seconds = deadline_hours * 3600
    made = sum(
        part.images_in(max(0.0, seconds - part.start_up_seconds.value)) for part in mix
    )
    if not made:
        raise SetupError("no replica is ready within the deadline: start-up is longer")
    return [
        replace(part, replicas=math.ceil(part.replicas * images / made)) for part in mix
    ]


class _Report(BaseModel):
    """The figures of the JSON of `imagefleet bench` that a plan uses."""

    device: str = Field(validation_alias=AliasPath("hardware", "device"))
    memory_bytes: int = Field(
        default=0, validation_alias=AliasPath("hardware", "memory_bytes")
    )
    worker_images_per_second: float = Field(gt=0, allow_inf_nan=False)
    ready_seconds: float = Field(ge=0, allow_inf_nan=False)
    width: int = Field(gt=0, le=2**16)
    height: int = Field(gt=0, le=2**16)
    steps: int = Field(gt=0, le=2**16)
    family: str = families.SD1.slug
    model: str


def read_bench(path: Path, table: PriceTable) -> Bench:
    """Raises SetupError if the file is not such a report."""
    report = validation.read_file(
        _Report, path, "is not the JSON of `imagefleet bench --json-file FILE`"
    )
    if report is None:
        raise SetupError(f"there is no report {path}")
    source = (
        f"{path}: {report.device}, {report.width}x{report.height}, {report.steps} steps,"
        f" {report.model}"
    )
    family = families.find(report.family)
    tflop = family.image_tflop(report.width, report.height, report.steps)
    return Bench(
        prices.gpu_of_driver(report.device, report.memory_bytes, table),
        Input(report.worker_images_per_second, "measured", source),
        Input(report.ready_seconds, "measured", source),
        family,
        family.taken_tflop(tflop, (report.width, report.height), has_other_loras=True),
    )


def bench_of(gpu: str, benches: Sequence[Bench], work: ModelJobs) -> Bench | None:
    """The report of a *gpu* whose images are most like those of *work*; or the assumed speed.

    Reports of its family come first, then those that are nearest in operations.
    """
    there = [bench for bench in reversed(benches) if bench.gpu == gpu]
    if not there and gpu in prices.ASSUMED_IMAGES_PER_SECOND:
        speed = prices.ASSUMED_IMAGES_PER_SECOND[gpu]
        return Bench(gpu, Input(speed, "assumed", prices.SPEEDS_SOURCE))

    def distance(bench: Bench) -> tuple[bool, float]:
        more = bench.tflop_per_image - work.tflop_per_image
        return bench.family is not work.family, abs(more)

    return min(there, key=distance, default=None)


def mean_speed(speeds: Sequence[ModelSpeed]) -> Input:
    """Images/s of one GPU over all models' images."""
    if len(speeds) == 1:
        return speeds[0].images_per_second
    images = sum(each.images for each in speeds)
    value = images / sum(each.seconds for each in speeds)
    # As sure as the least sure of them.
    order = ("estimated", "assumed", "measured", "given")
    kind = min((each.images_per_second.kind for each in speeds), key=order.index)
    return Input(
        value, kind, f"the mean over {len(speeds)} models, weighted by their images"
    )


def find_speed(
    gpu: str, given: float | None, bench: Bench | None, work: ModelJobs
) -> Input:
    """Images/s of one *gpu*: given, measured, assumed or estimated; raises SetupError if none.

    A speed of other images counts by their operations, and by the families' rates.
    """
    if given is not None:
        return Input(given, "given", "--images-per-second")
    if bench is None:
        raise SetupError(
            f"no speed is known for the {gpu}: give --images-per-second or a --bench report"
        )
    speed = bench.images_per_second
    family = bench.family
    tflop = bench.tflop_per_image
    # A report's rate is with another LoRA for each job.
    is_alike = math.isclose(work.tflop_per_image, tflop, rel_tol=_ALIKE)
    if work.family is family and is_alike:
        return speed
    rate = work.family.rate / family.rate
    value = speed.value * rate * tflop / work.tflop_per_image
    by = (
        f"{work.tflop_per_image:,.1f} TFLOP per image against {tflop:,.1f} of"
        f" {family.name}, {speed.value:g} images/s ({speed.kind}: {speed.source})"
    )
    if work.family is family:
        return Input(value, speed.kind, by)
    unsure = [
        each.rate_source for each in (family, work.family) if not each.is_measured
    ]
    of_rate = "; ".join(unsure) or (
        f"{work.family.name} gets {rate:.2f} of {family.name}'s operations/s, as measured:"
        f" {work.family.rate_source}"
    )
    return Input(value, "estimated", f"{by}; {of_rate}")


def find_price(
    gpu: str, priority: Priority, given: float | None, table: PriceTable
) -> Input:
    """$/h of one *gpu*, given or listed; raises SetupError if neither is known."""
    if given is not None:
        return Input(given, "given", "--price-per-hour")
    try:
        dollars = prices.gpu_dollars_per_hour(gpu, priority, table)
    except SetupError as error:
        raise SetupError(f"{error.message}; or give --price-per-hour") from None
    return Input(dollars, "listed", f"{priority} priority, {table.gpus[gpu].source}")
