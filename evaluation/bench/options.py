"""The options of `imagefleet bench`, and which of its measurements takes which."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from fleet import options
from imagefleet import errors
from imagefleet.pricing import families, prices

Kind = Literal["engine", "latency", "scaling"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured, and how."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint, as for the worker. By default SD1.5 with random weights on a GPU"
            " (2 GB in the temporary folder), and the small demo checkpoint on a CPU."
        ),
    ] = None
    family: Annotated[
        str,
        typer.Option(
            metavar="|".join(families.FAMILIES),
            help="engine, latency: of the checkpoint with random weights. SDXL takes 7 GB in the"
            " temporary folder.",
        ),
    ] = families.SD1.slug
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; scaling: auto or cpu.")
    ] = "auto"
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, help="engine, scaling: images at once. [default: by free memory]"
        ),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="engine, scaling: per measured rate. [default: 20 and 60 on a GPU, 3 and 20 on a"
            " CPU]",
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=150,
            help="latency, scaling: of each image. [default: 15 of SD1.5, else 20]",
        ),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="scaling: a field of each job, sampler_name=PLMS say; repeatable.",
        ),
    ] = None
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="scaling: numbers of workers, 1,2,4. [default: powers of two up to the GPUs, or"
            " with --device cpu up to the cores]",
        ),
    ] = None
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="engine: also diffusers + peft, one job at a time."),
    ] = False
    fp16_accumulate: Annotated[
        bool, typer.Option("--fp16-accumulate", help="engine: as the worker's setting.")
    ] = False
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="DOLLARS", help="engine: this machine's price in $/h."),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="engine: GPU class, for its price. [default: this machine's]"
        ),
    ] = None
    priority: Annotated[
        str,
        typer.Option(metavar="|".join(prices.PRIORITIES), help="engine: SaladCloud's priority."),
    ] = "batch"


@dataclass(frozen=True, slots=True)
class Shown:
    """How the figures are shown."""

    form: Annotated[
        Literal["table", "markdown"], typer.Option("--format", help="markdown: scaling.")
    ] = "table"
    json_file: options.JsonFile = None
    as_json: options.AsJson = False


_OF_ALL = frozenset({"model", "device"})
_OF: dict[Kind, frozenset[str]] = {
    "engine": _OF_ALL
    | {"family", "slots", "seconds", "baseline", "fp16_accumulate"}
    | {"price_per_hour", "gpu", "priority"},
    "latency": _OF_ALL | {"family", "steps"},
    "scaling": _OF_ALL | {"slots", "steps", "seconds", "set_", "workers"},
}


def check(kind: Kind, asked: Asked, shown: Shown) -> None:
    """Raises SetupError for options of another measurement than *kind*."""
    for field in dataclasses.fields(asked):
        if field.name not in _OF[kind] and getattr(asked, field.name) != field.default:
            raise errors.SetupError(
                f"{options.flag(field.name.rstrip('_'))} is not for `bench {kind}`"
            )
    if shown.form != "table" and kind != "scaling":
        raise errors.SetupError(f"--format {shown.form} is for `bench scaling`")
