"""`imagefleet bench`: this machine's speed, its limit and plain diffusers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from evaluation.bench import latency, scaling
from fleet import console, options
from imagefleet.pricing import prices
from worker.node import libraries

if TYPE_CHECKING:
    from evaluation.bench.engine import StartStep

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measures this machine's speed.",
)

_SECONDS_PER_HOUR = 3600


@app.command("engine")
def engine_command(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint, as for the worker. By default SD1.5 with random weights on a GPU"
            " (2 GB in the temporary folder), and the small demo checkpoint on a CPU.",
        ),
    ] = None,
    family: Annotated[
        str,
        typer.Option(
            metavar="sd1|sd2|sdxl",
            help="Of the checkpoint with random weights: SDXL takes 7 GB in the temporary folder.",
        ),
    ] = "sd1",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    slots: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Images at once. [default: by free memory]"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Per measured rate. [default: 20 on a GPU, 3 on a CPU]"),
    ] = None,
    with_baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Also measure diffusers + peft, one job at a time."),
    ] = False,
    fp16_accumulate: Annotated[
        bool, typer.Option("--fp16-accumulate", help="As the worker's setting.")
    ] = False,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="DOLLARS", help="This machine's price in $/h."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="GPU class, for its price. [default: this machine's]"),
    ] = None,
    priority: Annotated[
        str, typer.Option(metavar="|".join(prices.PRIORITIES), help="SaladCloud's priority.")
    ] = "batch",
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measures images/s: with another LoRA per job, without LoRA, and for a whole worker.

    15 Euler ancestral steps with guidance, prompts of the reference message's length, rank-32
    LoRAs. Also prints the share of the limit that this machine's matrix products set, and images
    per dollar.

    imagefleet bench engine

    imagefleet bench engine --baseline --gpu "RTX 4090" --json-file bench.json
    """
    with console.one_line_errors():
        console.check_writable(json_file)
        from worker.files import check

        check.require_path(model)  # before torch is imported
        libraries.require()
        from evaluation.bench import engine as bench_engine
        from evaluation.bench import machine
        from worker.engine import device as devices

        torch_device = devices.find_device(device)
        price = _dollars_per_hour(price_per_hour, gpu, priority, machine.hardware(torch_device))
        measured = bench_engine.Options(
            device,
            slots,
            seconds or bench_engine.SECONDS[torch_device.type],
            with_baseline,
            fp16_accumulate,
        )
        with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as name, _steps() as step:
            folder = Path(name)
            step("creating the LoRAs" if model else "creating the model and the LoRAs", 1)
            setup = bench_engine.prepare(model, folder, device, family=family)
            report = bench_engine.measure(setup, measured, step)
    per_hour = report["worker_images_per_second"] * _SECONDS_PER_HOUR
    report |= {"dollars_per_hour": price, "images_per_dollar": per_hour / price if price else None}
    if json_file is not None:
        with console.one_line_errors():
            console.write_file(json_file, console.json_text(report))
    if as_json:
        console.print_json(report)
    else:
        _show(report)


app.command("latency")(latency.command)
app.command("scaling")(scaling.command)


def _dollars_per_hour(
    given: float | None, gpu: str | None, priority: str, hardware: Mapping[str, str | int]
) -> float | None:
    """This machine's price in $/h, as given or by its class; None if unknown."""
    if given is not None:
        return given
    known = prices.as_priority(priority)
    if gpu is not None:
        return prices.gpu_dollars_per_hour(gpu, known)
    card = prices.gpu_of_driver(str(hardware["device"]), int(hardware.get("memory_bytes", 0)))
    listed = prices.BUILT_IN.gpus.get(card)
    return None if listed is None else prices.gpu_dollars_per_hour(card, known)


@contextmanager
def _steps() -> Iterator[StartStep]:
    """A progress bar per step."""
    columns = TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console.stderr) as progress:

        def step(name: str, total: float) -> Callable[[float], None]:
            for task_id in progress.task_ids:
                progress.update(task_id, total=1, completed=1)
                progress.stop_task(task_id)
            task = progress.add_task(name, total=total)
            return lambda done: progress.update(task, completed=min(done, total))

        yield step
        for task_id in progress.task_ids:
            progress.update(task_id, total=1, completed=1)


def _show(report: Mapping[str, Any]) -> None:
    rows = {
        "machine": "{hardware[device]}",
        "model": "{model}, {width}x{height}, {steps} steps",
        "images at once": "{slots}",
        "ready after": "{ready_seconds:.1f} s",
        "another LoRA per job": "{mixed_lora_images_per_second:.2f} images/s,"
        " {matrix_limit_fraction:.0%} of the limit",
        "no LoRA": "{no_lora_images_per_second:.2f} images/s",
        "whole worker": "{worker_images_per_second:.2f} images/s",
        "engine idle": "{idle_fraction:.1%} of the time",
        "limit": "{matrix_limit_images_per_second:.2f} images/s: {tflop:.4g} TFLOP per image at"
        " {tflop_per_second:.4g} TFLOP/s, as measured",
        "peak memory": "{peak_gib:.2f} GiB",
    }
    if report["over_diffusers_peft"] is not None:
        rows["diffusers + peft"] = (
            "{diffusers_peft_images_per_second:.2f} images/s; this engine is"
            " {over_diffusers_peft:.1f}x as fast"
        )
    rows["images per dollar"] = (
        "{images_per_dollar:,.0f} at ${dollars_per_hour:g}/h"
        if report["images_per_dollar"] is not None
        else "unknown price: give --price-per-hour or --gpu"
    )
    scaled = {
        "tflop": report["flops_per_image"] / 1e12,
        "tflop_per_second": report["matrix_flops_per_second"] / 1e12,
        "peak_gib": report["peak_memory_bytes"] / 2**30,
    }
    for name, row in rows.items():
        line = f"{name:<28}{row.format_map({**report, **scaled})}"
        console.stdout.print(line, soft_wrap=True, highlight=False)
