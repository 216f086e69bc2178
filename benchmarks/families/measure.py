"""Measures SDXL and SD2 at full size with random weights: speed, limits, small cards, exactness.

    python benchmarks/families/measure.py --out benchmarks/results/families-h200.json
    python benchmarks/families/measure.py --rows sdxl --slots 8 --slot-weights factors --out F.json

Each row has a process of its own, as its memory may be limited; they run one after the other, or
with --together load and compile at the same time, where the memory holds them all, and measure one
after the other. The checkpoints stay in --folder for the next run. The results are written after
each row, to those of earlier runs. The row `sdxl` measures another LoRA per job and no LoRA; with
--slot-weights another way to hold LoRAs than the memory decides. `--tiny` tries all on a
CPU, with meaningless figures.
"""

import argparse
import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

from filelock import FileLock

from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs as bench_jobs
from evaluation.bench import machine, random_model, work
from families import lora_kinds, tiny_families
from rows import program
from rows.groups import Figures, quotient
from rows.jobs import weaken
from rows.process import Measure, decibels, limit_memory
from worker.engine import device as devices
from worker.engine import load
from worker.engine.families import table
from worker.engine.slots import memory
from worker.engine.slots.engine import SlotEngine

#: The GB of the cards that the limited rows stand for; they are named by what is usable of them.
CAPS = {
    "sdxl_capped_23": 24,
    "sdxl_capped_15": 16,
    "sdxl_capped_11": 12,
    "sdxl_capped_7": 8,
}

#: More than there are slots: no two images drawn at once share a LoRA.
FILES, TINY_FILES = 24, 5

STEPS, TINY_STEPS, FEW_STEPS = 20, 3, 4

#: What a row takes beside its seconds.
OVERHEAD_SECONDS = 120.0


def build_model(
    arguments: argparse.Namespace, family: tiny_families.FamilyName
) -> Path:
    """A checkpoint with random weights, made once; SD2's predicts v."""
    folder: Path = arguments.folder / (f"tiny-{family}" if arguments.tiny else family)
    with one_builds(arguments):
        if not (folder / "done").exists():
            kind = "v_prediction" if family == "sd2" else "epsilon"
            if arguments.tiny:
                tiny_families.build(folder, family, prediction_type=kind)
            else:
                (found,) = (each for each in table.FAMILIES if each.slug == family)
                random_model.build_random_checkpoint(
                    folder, arguments.device, found, prediction_type=kind
                )
            (folder / "done").touch()
    return folder


def build_workload(
    arguments: argparse.Namespace,
    model: Path,
    kinds: tuple[lora_kinds.LoraFormat, ...] = ("lora",),
) -> bench_jobs.Workload:
    """Jobs with another LoRA each: one file of each kind and rank 32, under many names."""
    count = math.ceil((TINY_FILES if arguments.tiny else FILES) / len(kinds))
    directory = model / "loras"
    with one_builds(arguments):
        files = [
            lora_kinds.build_linked(
                directory, model, count, arguments.device, kind=kind
            )
            for kind in kinds
        ]
    words, negative = bench_jobs.reference_words()
    steps = TINY_STEPS if arguments.tiny else STEPS
    loras = tuple((name,) for each in zip(*files, strict=True) for name in each)
    return bench_jobs.Workload(
        words, negative, ((0, 0),), directory, loras, steps=(steps,)
    )


@contextlib.contextmanager
def one_builds(arguments: argparse.Namespace) -> Iterator[None]:
    """One process makes files that several need; its GPU memory is free afterwards."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(arguments.folder / "lock"):
        yield
    machine.free_memory(arguments.device)


def load_engine(
    arguments: argparse.Namespace, model: Path
) -> tuple[SlotEngine, bench_jobs.Workload]:
    began_at = time.monotonic()
    engine = load.load_engine(
        load.EngineSettings(
            model,
            str(arguments.device),
            slots=arguments.slots,
            compile="auto" if arguments.compile else "off",
            slot_weights=arguments.slot_weights,
        )
    )
    workload = replace(build_workload(arguments, model), sizes=(engine.default_size,))
    bench_engine.draw_a_round(engine, workload)
    print(f"ready after {time.monotonic() - began_at:.0f} s", flush=True)
    return engine, workload


def prepare_rates(
    arguments: argparse.Namespace,
    family: tiny_families.FamilyName,
    *,
    with_none: bool = True,
) -> Measure:
    """Images/s with another LoRA per job, without, and in few steps without guidance."""
    engine, workload = load_engine(arguments, build_model(arguments, family))

    def measure(seconds: float) -> Figures:
        machine.reset_peak(arguments.device)
        mixed = work.drive(engine, workload.requests(), seconds)
        figures: Figures = {
            "mixed_images_per_second": mixed.images_per_second,
            "images": mixed.images,
            "seconds": mixed.seconds,
            "slots": engine.slots,
            **engine.savings._asdict(),
            "peak_memory_bytes": machine.peak_memory_bytes(arguments.device),
            "graphs": dict(engine.graphs),
        }
        if with_none:
            plain = replace(workload, loras=())
            few = replace(plain, steps=(FEW_STEPS,), cfg_scales=(1.0,))
            engine.warm_up(few.request(0))
            for name, jobs in {"no_lora": plain, "few_steps": few}.items():
                driven = work.drive(engine, jobs.requests(), seconds)
                figures[f"{name}_images_per_second"] = driven.images_per_second
        return figures

    return measure


def prepare_capped(arguments: argparse.Namespace, row: str) -> Measure:
    """Measures a row with the GPU's memory limited."""
    build_model(arguments, "sdxl")
    limit_memory(arguments.device, CAPS[row])
    return prepare_rates(arguments, "sdxl", with_none=False)


def prepare_limit(arguments: argparse.Namespace) -> Measure:
    """Images/s that the card's matrix rate allows."""
    model = build_model(arguments, "sdxl")
    dtype = devices.find_dtype("auto", arguments.device)
    side = 64 if arguments.tiny else 1024
    steps = TINY_STEPS if arguments.tiny else STEPS
    return lambda _: {
        "matrix_flops_per_second": machine.measure_matrix_rate(arguments.device, dtype),
        "flops_per_image": machine.count_image_flops(model, side, side, steps),
        "hardware": machine.hardware(arguments.device),
        "versions": machine.versions(),
    }


def prepare_plain(arguments: argparse.Namespace) -> Measure:
    """Images/s of diffusers + peft, one job at a time, with its LoRAs in memory."""
    model = build_model(arguments, "sdxl")
    side = 64 if arguments.tiny else 1024
    workload = replace(build_workload(arguments, model), sizes=((side, side),))
    return lambda _: {
        "images_per_second": bench_engine.measure_baseline(
            model, arguments.device, workload
        )
    }


def prepare_company(arguments: argparse.Namespace) -> Measure:
    """PSNR of images alone against the same beside others, of every family, uncompiled."""
    return lambda _: measure_company(arguments)


def measure_company(arguments: argparse.Namespace) -> Figures:
    figures: Figures = {}
    for family in ("sd1", "sd2", "sdxl"):
        model = build_model(arguments, family)
        workload = build_workload(arguments, model, ("lora", "locon", "loha", "dora"))
        engine = load.load_engine(
            load.EngineSettings(
                model,
                str(arguments.device),
                slots=4,
                compile="off",
                slot_weights=arguments.slot_weights if family == "sdxl" else None,
            )
        )
        workload = replace(workload, sizes=(engine.default_size,))
        requests = [weaken(workload.request(number)) for number in range(4)]
        requests.append(replace(requests[0], loras=()))
        together = work.draw(engine, requests)
        figures[family] = min(
            decibels(work.draw(engine, [request])[0], image)
            for request, image in zip(requests, together, strict=True)
        )
        engine.close()
    return {"psnr_db": min(figures.values()), "psnr_db_each": figures}


ROWS: program.Rows = {
    "limit": prepare_limit,
    "plain": prepare_plain,
    "sdxl": lambda arguments: prepare_rates(arguments, "sdxl"),
    **{row: functools.partial(prepare_capped, row=row) for row in CAPS},
    "sd2": lambda arguments: prepare_rates(arguments, "sd2"),
    "company": prepare_company,
}


def summarise(rows: Mapping[str, Figures]) -> Figures:
    """The main figures; None for what was not measured."""

    def found(row: str, key: str = "mixed_images_per_second") -> float | None:
        return rows.get(row, {}).get(key)

    mixed, none = found("sdxl"), found("sdxl", "no_lora_images_per_second")
    limit = quotient(
        found("limit", "matrix_flops_per_second"), found("limit", "flops_per_image")
    )
    return {
        "sdxl_mixed_over_diffusers_peft": quotient(
            mixed, found("plain", "images_per_second")
        ),
        "sdxl_mixed_over_no_lora": quotient(mixed, none),
        "sdxl_4_over_20": quotient(found("sdxl", "few_steps_images_per_second"), none),
        "sdxl_matrix_limit_fraction": quotient(mixed, limit),
        "sdxl_no_lora_matrix_limit_fraction": quotient(none, limit),
        "sdxl_capped_23_over_uncapped": quotient(found("sdxl_capped_23"), mixed),
        "sdxl_capped_11_images_per_second": found("sdxl_capped_11"),
        "sdxl_capped_7_images_per_second": found("sdxl_capped_7"),
        "sd2_mixed_over_no_lora": quotient(
            found("sd2"), found("sd2", "no_lora_images_per_second")
        ),
        "company_psnr_db": found("company", "psnr_db"),
    }


def main() -> None:
    parser = program.options(__doc__, ROWS, "/tmp/imagefleet-families")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--slot-weights", choices=get_args(memory.SlotWeights))
    program.run(__file__, parser.parse_args(), ROWS, summarise, OVERHEAD_SECONDS)


if __name__ == "__main__":
    main()
