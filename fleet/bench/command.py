"""`imagefleet bench`: this machine's speed, its limit and plain diffusers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fleet import console, worker
from imagefleet.pricing import prices

if TYPE_CHECKING:
    from fleet.bench.engine import EngineReport, StartStep
    from fleet.bench.latency import LatencyReport

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measures this machine: images/s, or seconds per image.",
)

_SECONDS_PER_HOUR = 3600

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="A checkpoint, as for the worker. By default SD1.5 with random weights on a GPU"
        " (2 GB in the temporary folder), and the small demo checkpoint on a CPU.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Also write the results to this file, as JSON."),
]


@app.command("engine")
def engine_command(
    model: ModelOption = None,
    device: DeviceOption = "auto",
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
    report_file: ReportOption = None,
) -> None:
    """Measures images/s: with another LoRA per job, without LoRA, and for a whole worker.

    15 Euler ancestral steps with guidance, prompts of the reference message's length, rank-32
    LoRAs. Also prints the share of the limit that this machine's matrix products set, and images
    per dollar.

    imagefleet bench engine

    imagefleet bench engine --baseline --gpu "RTX 4090" --report bench.json
    """
    with console.one_line_errors():
        worker.require_libraries()
        from fleet.bench import engine as bench_engine
        from fleet.bench import machine
        from worker.engine import device as devices

        torch_device = devices.find_device(device)
        price = _dollars_per_hour(price_per_hour, gpu, priority, machine.hardware(torch_device))
        options = bench_engine.Options(
            device,
            slots,
            seconds or bench_engine.SECONDS[torch_device.type],
            with_baseline,
            fp16_accumulate,
        )
        with _folder() as folder, _steps() as step:
            step("creating the LoRAs" if model else "creating the model and the LoRAs", 1)
            report = bench_engine.measure(
                bench_engine.prepare(model, folder, device), options, step
            )
    images_per_dollar = (
        report.worker_images_per_second * _SECONDS_PER_HOUR / price if price else None
    )
    _show_engine(report, price, images_per_dollar)
    figures = asdict(report) | {
        "dollars_per_hour": price,
        "images_per_dollar": images_per_dollar,
    }
    _write(report_file, figures)


@app.command("latency")
def latency_command(
    model: ModelOption = None,
    device: DeviceOption = "auto",
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="Images at once; repeatable. [default: 1, 2, 4]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=150, help="PLMS steps.")] = 50,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements, for their median.")] = 3,
    report_file: ReportOption = None,
) -> None:
    """Measures seconds per batch of one or a few images, compared with plain diffusers.

    From text encoding to the decoded image, PLMS, without LoRA: the figure that the vendors of
    models and GPUs publish.

    imagefleet bench latency

    imagefleet bench latency --batch 1 --report latency.json
    """
    with console.one_line_errors():
        worker.require_libraries()
        from fleet.bench import engine as bench_engine
        from fleet.bench import latency

        with _folder() as folder, _steps() as step:
            step("creating the model", 1)
            setup = bench_engine.prepare(model, folder, device, loras=0)
            report = latency.measure(setup, device, batch or [1, 2, 4], steps, repeats, step)
    _show_latency(report)
    _write(report_file, asdict(report))


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
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as folder:
        yield Path(folder)


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


def _show_engine(
    report: EngineReport, price: float | None, images_per_dollar: float | None
) -> None:
    limit = report.matrix_limit_images_per_second
    rows = {
        "machine": str(report.hardware["device"]),
        "model": f"{report.model}, {report.width}x{report.height}, {report.steps} steps",
        "images at once": f"{report.slots}",
        "ready after": f"{report.ready_seconds:.1f} s",
        "another LoRA per job": f"{report.mixed_lora_images_per_second:.2f} images/s,"
        f" {report.matrix_limit_fraction:.0%} of the limit",
        "no LoRA": f"{report.no_lora_images_per_second:.2f} images/s",
        "whole worker": f"{report.worker_images_per_second:.2f} images/s",
        "engine idle": f"{report.idle_fraction:.1%} of the time",
        "limit": f"{limit:.2f} images/s: {report.flops_per_image / 1e12:.4g} TFLOP per image at"
        f" {report.matrix_flops_per_second / 1e12:.4g} TFLOP/s, as measured",
        "peak memory": f"{report.peak_memory_bytes / 2**30:.2f} GiB",
    }
    if report.over_diffusers_peft is not None:
        rows["diffusers + peft"] = (
            f"{report.diffusers_peft_images_per_second:.2f} images/s; this engine is"
            f" {report.over_diffusers_peft:.1f}x as fast"
        )
    if images_per_dollar is not None:
        rows["images per dollar"] = f"{images_per_dollar:,.0f} at {price:g} $/h"
    else:
        rows["images per dollar"] = "unknown price: give --price-per-hour or --gpu"
    _show(rows)


def _show_latency(report: LatencyReport) -> None:
    table = Table("images", "this engine", "diffusers", "speed-up")
    for row in report.rows:
        table.add_row(
            f"{row.batch}",
            f"{row.engine_seconds:.3f} s",
            f"{row.diffusers_seconds:.3f} s",
            f"{row.diffusers_seconds / row.engine_seconds:.1f}",
        )
    console.stdout.print(table)
    console.stdout.print(
        f"{report.hardware['device']}, {report.model}, {report.width}x{report.height},"
        f" {report.steps} PLMS steps",
        soft_wrap=True,
        highlight=False,
    )


def _show(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        console.stdout.print(f"{name:<28}{value}", soft_wrap=True, highlight=False)


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
