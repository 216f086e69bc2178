"""The rows of `engine.py`, which starts one process per group of rows.

A process loads and warms up, reports `ready`, and then measures one row per line of JSON on its
standard input. It replies on the original standard output; the libraries' output goes to standard
error. Groups: exact, engine, base, plain, capped, and those of `rows/jobs.py`.
"""

import argparse
import asyncio
import contextlib
import functools
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import torch

from evaluation.bench import baseline, machine, work
from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs as bench_jobs
from imagefleet import errors
from imagefleet.files import demo
from imagefleet.job import samplers
from imagefleet.storage import bundle
from overlap import FarStorage
from rows import jobs as job_rows
from rows.groups import Figures
from rows.process import (
    Channel,
    Options,
    build,
    decibels,
    limit_memory,
    load_engine,
    log,
    rate,
    warm,
)
from worker.engine import contract
from worker.engine import device as devices
from worker.engine.slots.queue import WeightMode

#: The images compared with plain diffusers: every other one has a LoRA, with these weights.
EXACT_WEIGHTS = (0.35, 1.0, 0.8, 1.0)
EXACT_PROMPTS = ("a red star in the desert", "a blue car in the city", "an orange cat",
                 "a green tree in a meadow", "a purple fish at sea", "a yellow house",
                 "a white bird by the sea", "a pink flower")  # fmt: skip

#: The guidance of consecutive jobs: as many with it as without, in no order.
HALF_GUIDED = (7.0, 1.0, 1.0, 7.0, 1.0, 7.0, 7.0, 7.0, 1.0, 1.0)

#: Prompts that are edited, joined by AND, and plain, in turn.
EDITED = (
    "[a red:a blue:0.5] car, {}",
    "[a cat|a dog], {}",
    "{} :0.8 AND a dog :0.5",
    "{}",
)

#: Each with one schedule: others only change numbers. How many calls an image takes of DPM adaptive
#: is known once it is drawn.
SAMPLERS = tuple(
    {
        each.title: key
        for key, each in reversed(samplers.SAMPLERS.items())
        if each.title != "DPM adaptive"
    }.values()
)

#: SD1.5 at the reference's size and steps, even in a trial.
LIMIT_SIZE, LIMIT_STEPS = (512, 512), 15


def exact(options: Options, channel: Channel) -> None:
    """PSNR of the engine's images against plain diffusers' in float32, and the device's limit."""
    if options.builder:
        with contextlib.suppress(errors.SetupError):  # it uses another model
            build(options)
    device = options.torch_device
    flops_per_image = machine.count_image_flops(Path("sd15"), *LIMIT_SIZE, LIMIT_STEPS)
    requests = exact_requests(steps=3 if options.is_tiny else 15)

    compiled: Sequence[WeightMode] = (
        ("per_slot",) if options.group == "exact_compiled" else ()
    )
    engine = load_engine(options, demo.TRAINED, len(requests), compiled)

    def psnr(_: float) -> Figures:
        drawn = work.draw(engine, requests)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        plain = baseline.PlainDiffusers(demo.TRAINED, device, torch.float32)
        each = []
        for request, image in zip(requests, drawn, strict=True):
            plain.use_loras(request.loras)
            (reference,) = plain.draw([request])
            each.append(decibels(image, reference))
        return {"psnr_db": min(each), "psnr_db_each": each}

    def limit(_: float) -> Figures:
        return {
            "matrix_flops_per_second": machine.measure_matrix_rate(
                device, devices.find_dtype("auto", device)
            ),
            "flops_per_image": flops_per_image,
            "hardware": machine.hardware(device),
            "versions": machine.versions(),
        }

    channel.serve({"limit": limit, "psnr": psnr, "psnr_compiled": psnr})


def exact_requests(steps: int) -> list[contract.ImageRequest]:
    """Images of the demo checkpoint with different steps, every other one with a LoRA."""
    folder = demo.TRAINED / "loras"
    files = set(folder.glob("*.safetensors")) - {
        demo.ACCELERATOR
    }  # it is for no guidance
    names = sorted(path.stem for path in files)
    requests = []
    for number, prompt in enumerate(EXACT_PROMPTS):
        loras: tuple[contract.Lora, ...] = ()
        if number % 2:
            name = names[number // 2 % len(names)]
            weight = EXACT_WEIGHTS[number // 2]
            loras = (
                contract.Lora(name, folder / f"{name}.safetensors", weight, weight),
            )
        requests.append(
            contract.ImageRequest(
                prompt=prompt,
                negative_prompt="green, ugly",
                loras=loras,
                sampler="euler_ancestral",
                steps=steps + number % 3,
                cfg_scale=7.0 if number < len(EXACT_PROMPTS) / 2 else 5.0,
                seed=number,
                width=128,
                height=128,
            )
        )
    return requests


def engine(options: Options, channel: Channel) -> None:
    """Another LoRA per job: with equal steps, with mixed steps, and in a whole worker."""
    setup = build(options)
    mixed = replace(setup.workload, steps=tuple(bench_jobs.MIXED_STEPS))
    from_queue(
        options,
        channel,
        setup,
        {"mixed": setup.workload, "mixed_steps": mixed},
        "worker",
    )


def few_steps(options: Options, channel: Channel) -> None:
    """Four steps without guidance, as distilled models draw: the engine, and in a whole worker."""
    setup = build(options)
    row = "four_steps" if options.group == "few_steps" else "four_steps_lora"
    loras = () if options.group == "few_steps" else setup.workload.loras
    few = replace(setup.workload, loras=loras, steps=(4,), cfg_scales=(1.0,))
    modes: Sequence[WeightMode] = ("per_slot",) if loras else ("shared",)
    from_queue(options, channel, setup, {f"{row}_engine": few}, row, modes)


def from_queue(
    options: Options,
    channel: Channel,
    setup: bench_engine.Setup,
    rows: Mapping[str, bench_jobs.Workload],
    worker_row: str,
    compiled: Sequence[WeightMode] = ("per_slot", "shared"),
) -> None:
    """The rates of an engine that is always full, and of a worker with the first of the jobs."""
    first, *_ = rows

    def serve_and_fill() -> tuple[contract.Engine, list[str]]:
        """Runs on the engine's thread, as in a worker."""
        engine, workload, warmth = warm(
            options, setup, rows[first], options.slots, compiled
        )
        rates: dict[str, float] = {}

        def measure(row: str, seconds: float) -> Figures:
            drawn = replace(rows[row], sizes=workload.sizes)
            figures = rate(engine, drawn, options, warmth, seconds)
            rates[row] = figures["images_per_second"]
            return figures

        seconds = channel.serve(
            {row: functools.partial(measure, row) for row in rows}, until=worker_row
        )
        width = width_of(engine)
        images_per_second = rates.get(first, width / 4)
        jobs = (3 + math.ceil(seconds * images_per_second / width)) * width
        sent = [bundle.Sent(workload.message(at)) for at in range(jobs)]
        return engine, bundle.bundled(sent, options.bundle, bundle.any_name)

    def width_of(engine: Any) -> int:
        size = (engine.default_size,)
        return int(engine.slots_for(replace(rows[first], sizes=size).request(0)))

    settings = bench_engine.worker_settings(setup, worker_row)
    try:
        far, idle_fraction = asyncio.run(
            work.work(settings, serve_and_fill, wrap=FarStorage, width_of=width_of)
        )
    except errors.FleetError as error:
        log.exception("the worker failed")
        channel.reply(row=worker_row, error=f"{type(error).__name__}: {error}"[:500])
        return
    channel.reply(
        row=worker_row,
        images_per_second=far.images_per_second,
        idle_fraction=idle_fraction,
        images=far.images,
        seconds=far.seconds,
    )


def base(options: Options, channel: Channel) -> None:
    """No LoRA: with guidance, without, and half and half; edited; and with each sampler."""
    setup = build(options)
    plain = replace(setup.workload, loras=())
    engine, workload, warmth = warm(options, setup, plain, options.slots, ("shared",))
    unguided = replace(workload, cfg_scales=(1.0,))
    edited = replace(workload, forms=EDITED)
    for each in (unguided.request(0), edited.request(2)):
        engine.warm_up(each)
    measure = functools.partial(
        rate, engine, options=options, warmth=warmth, amount="unet_rows"
    )

    def all_samplers(seconds: float) -> Figures:
        each = {
            name: measure(replace(workload, samplers=(name,)), seconds=seconds)
            for name in SAMPLERS
        }
        rows = {name: figures["unet_rows_per_second"] for name, figures in each.items()}
        by_turns = measure(replace(workload, samplers=SAMPLERS), seconds=seconds)
        return {
            "slowest": min(rows, key=lambda name: rows[name]),
            **by_turns,
            "each": rows,
        }

    def edited_between_plain(seconds: float) -> Figures:
        # A warm card draws slower by what is to be found out.
        before = measure(workload, seconds=seconds / 4)
        figures = measure(edited, seconds=seconds / 2)
        plain = (before, measure(workload, seconds=seconds / 4))
        mean = sum(each["unet_rows_per_second"] for each in plain) / len(plain)
        return {**figures, "plain_unet_rows_per_second": mean}

    jobs = {
        "no_lora": workload,
        "cfg_1": unguided,
        "half_guided": replace(workload, cfg_scales=HALF_GUIDED),
    }
    rows = {
        row: lambda seconds, each=each: measure(each, seconds=seconds)
        for row, each in jobs.items()
    }
    channel.serve(
        {**rows, "edited": edited_between_plain, "all_samplers": all_samplers}
    )


def capped(options: Options, channel: Channel) -> None:
    """Another LoRA per job, on a GPU limited to 8 GB."""
    setup = build(options)
    limit_memory(options.torch_device)
    engine, workload, warmth = warm(
        options, setup, setup.workload, options.capped_slots, ("per_slot",)
    )
    channel.serve(
        {"capped": functools.partial(rate, engine, workload, options, warmth)}
    )


def plain(options: Options, channel: Channel) -> None:
    """Measures the jobs with diffusers + peft."""
    setup, images = (
        build(options),
        1 if options.is_tiny else bench_engine.BASELINE_IMAGES,
    )
    guided = replace(
        setup.workload, sizes=((64, 64) if options.is_tiny else (512, 512),)
    )

    def measure(workload: bench_jobs.Workload, _: float) -> Figures:
        rate = bench_engine.measure_baseline(
            setup.model, options.torch_device, workload, images
        )
        return {"images_per_second": rate, "images": images}

    rows = {
        "baseline": guided,
        "baseline_four_steps": replace(guided, steps=(4,), cfg_scales=(1.0,)),
    }
    channel.serve({row: functools.partial(measure, jobs) for row, jobs in rows.items()})


GROUPS: Mapping[str, Callable[[Options, Channel], None]] = {
    "exact": exact,
    "exact_compiled": exact,
    "engine": engine,
    "few_steps": few_steps,
    "few_steps_lora": few_steps,
    "base": base,
    "plain": plain,
    "capped": capped,
    "loras": job_rows.loras,
    "capped_loras": job_rows.loras,
    "sizes": job_rows.sizes,
    "capped_sizes": job_rows.sizes,
    "prompts": job_rows.prompts,
    "company": job_rows.company,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=list(GROUPS))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--builder", default="", help="the group that creates the model"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--capped-slots", type=int)
    parser.add_argument("--bundle", type=int, default=1)
    parser.add_argument("--tiny", dest="is_tiny", action="store_true")
    options = Options(**vars(parser.parse_args()))
    channel = Channel()
    format_ = f"%(asctime)s {options.group} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=format_)
    GROUPS[options.group](options, channel)


if __name__ == "__main__":
    main()
