"""`imagefleet bench`: this machine's speed, its limit and plain diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli import console, options
from cli.options import argument
from evaluation.bench.options import BenchOptions
from imagefleet.pricing import prices
from imagefleet.validation import JSONDict, JSONObject
from worker.files import check as checkpoint
from worker.settings import require_libraries

if TYPE_CHECKING:
    from evaluation.bench.engine import StartStep

_SECONDS_PER_HOUR = 3600


@options.flat
def command(
    *,
    what: Literal["latency"] | None = argument(
        "latency: the seconds of 1, 2, 4 and 512 images at once (PLMS, 50 steps), beside"
        " diffusers eager; default: rates.",
        None,
        metavar="[latency]",
    ),
    asked: BenchOptions,
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measures this machine's speed.

    Images/s for Euler ancestral steps with another LoRA per job, without LoRA, without guidance,
    and for a whole worker; the share of the limit that this machine's matrix products set; and
    images per dollar.

    imagefleet bench --baseline --gpu "RTX 4090" --json-file bench.json

    imagefleet bench --family sdxl --json-file sdxl.json

    imagefleet bench latency --family sd2 --json-file latency.json
    """
    console.check_writable(json_file)
    if asked.model is not None:  # before torch is imported
        checkpoint.check_path(asked.model)
    require_libraries()
    report = _measure(asked) if what is None else _measure_latency(asked)
    if json_file is not None:
        console.write_file(json_file, console.json_text(report))
    if as_json:
        console.print_json(report)
    elif what is None:
        _show(report)
    else:
        _show_latency(report)


def _measure_latency(asked: BenchOptions) -> JSONDict:
    from evaluation.bench import engine as bench_engine
    from evaluation.bench import latency

    with (
        TemporaryDirectory(prefix="imagefleet-bench-") as name,
        _steps() as step,
    ):
        step("creating the model", 1)
        folder = Path(name)
        family = asked.family
        setup = bench_engine.prepare(
            asked.model, folder, asked.device, loras=1, family=family
        )
        return latency.measure(setup, asked, step)


def _show_latency(report: JSONObject) -> None:
    numbers = ("images at once", "seconds", "diffusers", "over diffusers")
    names = ("seconds", "diffusers_seconds", "over_diffusers")
    rows = [
        (images, *(f"{report[name][images]:.2f}" for name in names))
        for images in report["seconds"]
    ]
    what = "{hardware[device]}: {model}, {width}x{height}, {steps} steps of {sampler}"
    console.print_plain(what.format_map(report))
    console.print_tables(console.table((), numbers, rows=rows))


def _measure(asked: BenchOptions) -> JSONDict:
    from evaluation.bench import engine as bench_engine
    from evaluation.bench import machine
    from worker.engine import device as devices

    torch_device = devices.find_device(asked.device)
    price = _dollars_per_hour(
        asked.price_per_hour, asked.gpu, asked.priority, machine.hardware(torch_device)
    )
    with (
        TemporaryDirectory(prefix="imagefleet-bench-") as name,
        _steps() as step,
    ):
        step(
            "creating the LoRAs" if asked.model else "creating the model and the LoRAs",
            1,
        )
        setup = bench_engine.prepare(
            asked.model, Path(name), asked.device, family=asked.family
        )
        report = bench_engine.measure(setup, asked, step)
    per_dollar = _SECONDS_PER_HOUR / price if price else None
    return report | {
        "dollars_per_hour": price,
        "images_per_dollar": per_dollar
        and per_dollar * report["worker_images_per_second"],
        "unguided_images_per_dollar": per_dollar
        and per_dollar * report["unguided_images_per_second"],
    }


def _dollars_per_hour(
    given: float | None,
    gpu: str | None,
    priority: prices.Priority,
    hardware: Mapping[str, str | int],
) -> float | None:
    """This machine's price in $/h, as given or by its class; None if unknown."""
    if given is not None:
        return given
    if gpu is not None:
        return prices.gpu_dollars_per_hour(gpu, priority)
    card = prices.gpu_of_driver(
        str(hardware["device"]), int(hardware.get("memory_bytes", 0))
    )
    listed = prices.BUILT_IN.gpus.get(card)
    return None if listed is None else prices.gpu_dollars_per_hour(card, priority)


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


def _show(report: JSONObject) -> None:
    rows = {
        "machine": "{hardware[device]}",
        "model": "{model}, {width}x{height}, {steps} steps",
        "images at once": "{slots}",
        "ready after": "{ready_seconds:.1f} s",
        "another LoRA per job": "{mixed_lora_images_per_second:.2f} images/s,"
        " {matrix_limit_fraction:.0%} of the limit",
        "no LoRA": "{no_lora_images_per_second:.2f} images/s",
        "nor guidance": "{unguided_images_per_second:.2f} images/s,"
        " {unguided_over_no_lora:.2f} times as many",
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
        "{images_per_dollar:,.0f} at ${dollars_per_hour:g}/h; engine without guidance"
        " {unguided_images_per_dollar:,.0f}"
        if report["images_per_dollar"] is not None
        else "unknown price: give --price-per-hour or --gpu"
    )
    scaled = {
        "tflop": report["flops_per_image"] / 1e12,
        "tflop_per_second": report["matrix_flops_per_second"] / 1e12,
        "peak_gib": report["peak_memory_bytes"] / 2**30,
    }
    for name, row in rows.items():
        console.stdout.print(
            f"{name:<28}{row.format_map({**report, **scaled})}",
            soft_wrap=True,
            highlight=False,
        )
