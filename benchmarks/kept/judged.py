"""Measures what judging while drawing saves, and what it costs.

By `plan`, and by a real run: the same jobs of the demo's model are judged while they are drawn, and
stored first and judged then; operations and bytes are counted, the GPU's time is that of the plan.
With --model, mixed LoRAs on a GPU: a worker that scores each image by CLIP over one that does not.
With --early, what early stop saves and wrongly drops: its minimum is chosen by a trial of other
jobs than those that are counted.

    python -m benchmarks.kept.judged [--jobs 400]
    python -m benchmarks.kept.judged --early [--jobs 1500]
    python -m benchmarks.kept.judged --model MODEL [--loras FOLDER] [--clip FILE] [--images 1000]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks import operations
from fleet.plan import command, kept
from fleet.plan.work import of_source, read_models
from imagefleet.files import demo
from imagefleet.keeping.rule import Keep, Scores
from imagefleet.pricing import prices
from imagefleet.records import pictures, reader
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Operations
from imagefleet.storage.settings import StorageSettings
from loadgen.load import Load
from loadgen.settings import LoadSettings
from loadgen.sources import open_source
from worker import process
from worker.engine import load
from worker.engine.slots.engine import SlotEngine
from worker.settings import MachineSettings
from worker.stages import record as recording

RESULT = Path(__file__).resolve().parents[1] / "results" / "kept.json"

#: Of the drawn images, as public data sets of 2025 and 2026 keep.
SHARE = 0.05

#: Jobs that are planned: so many that the start of a replica no longer matters.
PLANNED = 20_000_000

GPU = "RTX 3060 Ti"

USUAL_PIXELS = 512 * 512

#: The demo's.
JUDGE = demo.TRAINED / "judges" / "clip.onnx"

#: Share of the images, at both ends, that are not timed.
EDGE = 0.1

#: Of CLIP ViT-L/14.
CLIP_SIDE = 224

#: How early stop is measured, beside jobs of few steps.
USUAL_STEPS = {"sampler_name": "DPM++ 2M Karras", "steps": 16, "cfg_scale": 5}

#: Share of a trial's images that the estimates' minimum drops: some more than save a quarter.
DROPPED_EARLY = 0.65

#: Share of the jobs that are the trial, and are drawn again with early stop.
PART = 0.2


class Ran(NamedTuple):
    """A campaign that was drawn, and all operations on its storage."""

    operations: Operations
    records: list[Record]
    dropped: int
    #: Rows of the UNet's calls, and those that early stop has saved.
    rows: int
    saved: int

    @property
    def bytes(self) -> int:
        return sum(record.size_bytes or 0 for record in self.records)


def jobs_file(
    folder: Path, prompts: Sequence[str], first: int = 0, **fields: object
) -> Path:
    path = folder / "jobs.jsonl"
    with path.open("w") as file:
        for number, prompt in enumerate(prompts, first):
            file.write(json.dumps({"prompt": prompt, "id": f"{number:06}", **fields}))
            file.write("\n")
    return path


async def drawn(file: Path, rule: str | Keep | None, judge: Path, **worker: Any) -> Ran:
    """Loads a file into a storage of its own and has one worker draw it."""
    with tempfile.TemporaryDirectory() as folder:
        where = StorageSettings(storage=f"local:{folder}/storage")
        settings = LoadSettings(
            storage=where.storage, bundle=1, verify_share=0, concurrency=256
        )
        keep = None if rule is None else Keep.model_validate(rule)
        source = open_source(str(file), campaign="kept", keep=keep)
        engines: list[SlotEngine] = []
        loading = load.load_engine

        def load_engine(settings: load.EngineSettings) -> SlotEngine:
            engines.append(loading(settings))
            return engines[-1]

        async with open_storage(settings) as storage:
            await storage.create()
            name = f"judges/clip{judge.suffix}"
            data = await asyncio.to_thread(judge.read_bytes)
            await storage.files.create(name, data, "application/octet-stream", {})
            # Or the first jobs wait until it has rested, and come again.
            (path,) = await asyncio.to_thread(lambda: [*Path(folder).rglob(name)])
            os.utime(path, (0, 0))
            await Load(storage, source, settings).run(lambda _: None)
            used = Counter(asdict(storage.operations))
        # Records are written as seldom as on Azure, whose prices count here.
        recording.LOCAL_FLUSH_SECONDS = recording.FLUSH_SECONDS
        machine = MachineSettings(
            storage=where.storage,
            until_empty=True,
            port=0,
            cache=Path(folder, "cache"),
            **worker,
        )
        with (
            operations.opened() as opened,
            patch.object(load, "load_engine", load_engine),
        ):
            await process.run_worker(machine)
        used.update(asdict(opened[0].operations))
        async with open_storage(where) as storage:
            counts = await reader.counts(storage, "kept")
            if counts.pending or counts.failed:
                sys.exit(f"not all jobs were drawn: {counts}")
            found = [record async for record in reader.images(storage, "kept")]
            if found and isinstance(await pictures.find(storage, found[:1]), str):
                sys.exit("an image is not stored as its record says")
        (engine,) = engines
        return Ran(
            Operations(**used),
            found,
            counts.dropped,
            engine.unet_rows,
            engine.unet_rows_saved,
        )


def planned(folder: Path, bundle: int) -> kept.KeptPlan:
    """The plan of few-step jobs of SD1.5, of which a share is kept."""
    file = jobs_file(folder, ["a house"], steps=4, cfg_scale=1)
    (work,) = of_source(open_source(str(file)), read_models([], "sd1"))
    work.jobs = work.images = work.bundled = PLANNED
    work.tflop *= PLANNED
    work.pixels *= PLANNED
    machines = command.Machines(
        *([GPU], None, None, None, None, None, None)  # its price and speed by the table
    )
    plan, table = command.planned([work], machines, bundle=bundle)
    return kept.of_plan(plan, table, SHARE)


def over_stored(plan: kept.KeptPlan) -> float:
    """Kept images per dollar, over those of a campaign that is stored and then judged."""
    return plan.images_per_dollar / plan.stored_first_images_per_dollar


async def run_demo(folder: Path, count: int, gpu_dollars: float) -> dict[str, Any]:
    """Judged while drawn over stored first, by a real worker; *gpu_dollars* of an image."""
    lines = (demo.TRAINED / "captions.txt").read_text().splitlines()
    prompts = [lines[number % len(lines)] for number in range(count)]
    file = jobs_file(folder, prompts, steps=4)
    # Tried first, as thresholds are: the scores of all, of which a share is to pass.
    options: dict[str, Any] = {"model": demo.TRAINED, "device": "cpu"}
    options["accelerator"] = str(demo.ACCELERATOR)
    tried = await drawn(file, "clip=0", JUDGE, **options)
    least = quantile([[each.scores] for each in tried.records], "clip", 1 - SHARE)
    judged = await drawn(file, f"clip={least}", JUDGE, **options)
    stored = await drawn(file, None, JUDGE, **options)
    kept_ids = {record.id for record in judged.records}
    wanted = {record.id for record in tried.records if record.scores["clip"] >= least}
    if kept_ids != wanted:
        sys.exit(f"{len(kept_ids ^ wanted)} images were judged in two ways")
    table = prices.BUILT_IN.storage
    # The GPU's price is that of 512x512: so are the bytes, by those of a pixel here.
    (size,) = {(record.width or 1) * (record.height or 1) for record in stored.records}
    month = table.gigabyte_month / 1e9 * USUAL_PIXELS / size
    scoring = kept.SCORING * gpu_dollars * count
    reads = Operations(blob_reads=count)
    first = table.dollars(of_jobs(stored, count)) + table.dollars(reads)
    first += gpu_dollars * count + scoring + stored.bytes * month
    during = table.dollars(of_jobs(judged, count)) + judged.bytes * month
    during += gpu_dollars * count + scoring
    return {
        "jobs": count,
        "kept": len(kept_ids),
        "minimum": least,
        "dollars": during,
        "dollars_stored_first": first,
        "operations": asdict(judged.operations),
        "operations_stored_first": asdict(stored.operations),
        "bytes": judged.bytes,
        "bytes_stored_first": stored.bytes,
        "over_stored": first / during,
    }


def quantile(scores: Sequence[Sequence[Scores]], name: str, share: float) -> float:
    found = [each[name] for (each,) in scores]
    return float(np.quantile(found, share, method="higher"))


async def run_early(folder: Path, count: int) -> dict[str, Any]:
    """What early stop wrongly drops of the jobs, and the calls that it saves in a real run of some.

    Both scores of all are found first; the first ones are the trial that decides the minima.
    """
    lines = (demo.TRAINED / "captions.txt").read_text().splitlines()
    prompts = [lines[number % len(lines)] for number in range(count)]
    options: dict[str, Any] = {"model": demo.TRAINED, "device": "cpu"}
    file = jobs_file(folder, prompts, **USUAL_STEPS)
    tried = await drawn(file, "clip=0,early.clip=0", JUDGE, **options)
    scores = [[each.scores] for each in sorted(tried.records, key=lambda each: each.id)]
    part = round(PART * count)
    counted = scores[part:]
    least = {
        "clip": quantile(scores[:part], "clip", 1 - SHARE),
        "early.clip": quantile(scores[:part], "early.clip", DROPPED_EARLY),
    }
    keep = Keep(minimum=least)
    file = jobs_file(folder, prompts[part : 2 * part], part, **USUAL_STEPS)
    stopped = await drawn(file, keep, JUDGE, **options)
    calls = stopped.rows + stopped.saved
    return {
        "early_stop_calls_saved": round(stopped.saved / calls, 4),
        "early_stop_wrongly_dropped": keep.wrongly_dropped(counted),
        "early_stop": {
            **USUAL_STEPS,
            "minimum": least,
            "jobs": len(counted),
            "kept_without": sum(each["clip"] >= least["clip"] for (each,) in counted),
            "jobs_stopped": part,
        },
    }


def of_jobs(ran: Ran, count: int) -> Operations:
    """Operations with those of the queue that jobs take alone: sent, received, deleted.

    Polls and renewals are counted by the clock, and a slow machine has more of them.
    """
    return replace(ran.operations, queue=3 * count)


def random_clip(folder: Path, *, is_tiny: bool) -> Path:
    """A file with CLIP ViT-L/14's tensors, of random weights: as fast as the published one."""
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPConfig, CLIPModel

    if not is_tiny:
        vision = {"image_size": CLIP_SIDE, "patch_size": 14}
        vision |= {"hidden_size": 1024, "intermediate_size": 4096}
        vision |= {"num_hidden_layers": 24, "num_attention_heads": 16}
        text = {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
        }
        configuration = CLIPConfig(
            text_config={**text, "projection_dim": 768},
            vision_config={**vision, "projection_dim": 768},
            projection_dim=768,
        )
    else:
        narrow = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        narrow["num_attention_heads"] = 1
        configuration = CLIPConfig(
            text_config=narrow,
            vision_config={**narrow, "image_size": 32, "patch_size": 16},
            projection_dim=16,
        )
    torch.manual_seed(0)
    save_file(CLIPModel(configuration).half().state_dict(), folder / "clip.safetensors")
    return folder / "clip.safetensors"


def rate(records: Sequence[Record]) -> float:
    """Images/s of all but the first and the last ones, by the times at which they are stored."""
    times = sorted(record.at.timestamp() for record in records)
    first = round(EDGE * len(times))
    inner = times[first : len(times) - first]
    return (len(inner) - 1) / (inner[-1] - inner[0])


def house_prompts(count: int, loras: Path | None) -> Iterator[str]:
    """Each with the next of the LoRAs in a folder, if there is one."""
    names = sorted(path.stem for path in loras.glob("*.safetensors")) if loras else []
    for number in range(count):
        prompt = f"a photo of a house, number {number}"
        if names:
            prompt += f" <lora:{names[number % len(names)]}:0.8>"
        yield prompt


async def run_gpu(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """A worker that scores each image over one that does not, with a LoRA for each job."""
    file = jobs_file(folder, [*house_prompts(given.images, given.loras)])
    judge = given.clip or random_clip(folder, is_tiny=given.tiny)
    options: dict[str, Any] = {"model": given.model, "device": given.device}
    if given.loras:
        options["lora_directory"] = given.loras
    # The first run compiles and fills the caches of the machine; it is not counted.
    rules = ("clip=0", None, "clip=0", None, "clip=0")
    ran = [await drawn(file, rule, judge, **options) for rule in rules]
    rates = [rate(each.records) for each in ran]
    _, plain, scored, again, last = rates
    return {
        "scored_over_plain": round((scored + last) / (plain + again), 4),
        "images_per_second": round((plain + again) / 2, 3),
        "images_per_second_scored": round((scored + last) / 2, 3),
    }


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if given.model is not None:
            figures = await run_gpu(folder, given)
            ratio = figures.pop("scored_over_plain")
            return {"scored_over_plain": ratio, "scored": figures}
        if given.early:
            return await run_early(folder, given.jobs)
        plans = {
            name: planned(folder, size)
            for name, size in (("single", 1), ("bundled", 32))
        }
        run = await run_demo(folder, given.jobs, gpu_dollars_of_image(folder))
    return {
        "kept_per_dollar_over_stored": round(over_stored(plans["single"]), 3),
        "kept_plan": {
            name: asdict(plan) | {"ratio": over_stored(plan)}
            for name, plan in plans.items()
        },
        "kept_run": run,
    }


def gpu_dollars_of_image(folder: Path) -> float:
    """Dollars of the GPU's for one planned image."""
    file = jobs_file(folder, ["a house"], steps=4, cfg_scale=1)
    works = of_source(open_source(str(file)), read_models([], "sd1"))
    machines = command.Machines(*([GPU], None, None, None, None, 0.0, None))
    plan, _ = command.planned(works, machines)
    return plan.gpu_dollars / plan.images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--early", action="store_true", help="measure early stop")
    parser.add_argument("--model", help="a checkpoint: measure scoring on its device")
    parser.add_argument("--loras", type=Path)
    parser.add_argument("--clip", type=Path, help="default: random weights of ViT-L/14")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny CLIP, to try it")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    given = parser.parse_args()
    figures = asyncio.run(measure(given))
    if given.write:
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        text = json.dumps(known | figures, indent=2, sort_keys=True)
        RESULT.write_text(text + "\n")
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
