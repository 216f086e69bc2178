"""The options of `imagefleet bench`, and which of its measurements takes which."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleet import options
from fleet.options import option
from imagefleet import errors
from imagefleet.pricing import families, prices

Kind = Literal["engine", "latency", "scaling"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured, and how."""

    model: Path | None = option(
        "A checkpoint, as for the worker. By default SD1.5 with random weights on a GPU"
        " (2 GB in the temporary folder), and the small demo checkpoint on a CPU."
    )
    family: str = option(
        "engine, latency: of the checkpoint with random weights. SDXL takes 7 GB in the"
        " temporary folder.",
        families.SD1.slug,
        metavar="|".join(families.FAMILIES),
    )
    device: str = option("auto, cpu, cuda or cuda:N; scaling: auto or cpu.", "auto")
    slots: int | None = option(
        "engine, scaling: images at once. [default: by free memory]", min=1, max=256
    )
    seconds: float | None = option(
        "engine, scaling: per measured rate. [default: 20 and 60 on a GPU, 3 and 20 on a CPU]",
        min=0.1,
    )
    steps: int | None = option(
        "Of each image. [default: engine 15, latency the family's, scaling 20]",
        min=1,
        max=150,
    )
    set_: list[str] | None = option(
        "scaling: a field of each job, sampler_name=PLMS say; repeatable.",
        None,
        "--set",
        metavar="FIELD=VALUE",
    )
    workers: str | None = option(
        "scaling: numbers of workers, 1,2,4. [default: powers of two up to the GPUs, or"
        " with --device cpu up to the cores]",
        metavar="LIST",
    )
    baseline: bool = option(
        "engine: also diffusers + peft, one job at a time.", default=False
    )
    fp16_accumulate: bool = option("engine: as the worker's setting.", default=False)
    price_per_hour: float | None = option(
        "engine: this machine's price in $/h.", min=0.0001, metavar="DOLLARS"
    )
    gpu: str | None = option(
        "engine: GPU class, for its price. [default: this machine's]", metavar="NAME"
    )
    priority: prices.Priority = option("engine: SaladCloud's priority.", "batch")


_OF_ALL = frozenset({"model", "device"})
_OF: dict[Kind, frozenset[str]] = {
    "engine": _OF_ALL
    | {"family", "slots", "seconds", "steps", "baseline", "fp16_accumulate"}
    | {"price_per_hour", "gpu", "priority"},
    "latency": _OF_ALL | {"family", "steps"},
    "scaling": _OF_ALL | {"slots", "steps", "seconds", "set_", "workers"},
}


def check(kind: Kind, asked: Asked) -> None:
    """Raises SetupError for options of another measurement than *kind*."""
    for field in dataclasses.fields(asked):
        if field.name not in _OF[kind] and getattr(asked, field.name) != field.default:
            raise errors.SetupError(
                f"{options.flag(field.name.rstrip('_'))} is not for `bench {kind}`"
            )
