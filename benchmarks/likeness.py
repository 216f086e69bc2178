"""Measures how far an image is from itself, drawn another way, and from every wrong one.

    python benchmarks/likeness.py --save h100.json
    python benchmarks/likeness.py --compare h100.json

Draws jobs of the demo checkpoint in each precision, with 1, 4 and 16 slots and compiled (on a
GPU), and spoils them in each way that a broken node does. --compare adds the fingerprints that
--save wrote on another machine. Prints a table, and as its last line one JSON object; the exit code
is 1 if an image drawn wrong is below `SAME_BELOW`.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from evaluation.bench import machine, work
from imagefleet import likeness
from imagefleet.files import demo
from imagefleet.likeness import Fingerprint
from imagefleet.validation import JSONDict
from worker.engine import contract, load
from worker.engine import device as devices

MODEL = demo.TRAINED
THINGS = (
    "star",
    "heart",
    "house",
    "tree",
    "boat",
    "car",
    "mushroom",
    "cup",
    "apple",
    "cat",
)
COLOURS = ("red", "blue", "yellow", "green")
PLACES = ("at night", "in a forest", "at sea", "in the snow")
LORAS = ("night-palette", "outline-style", "magic-fantasy-forest-v2")

Pixels = contract.Pixels


def job(number: int, steps: int) -> contract.ImageRequest:
    """A job with one LoRA."""
    name = LORAS[number % 3]
    weight = (0.35, 0.8, 1.0)[number // 2 % 3]
    path = MODEL / "loras" / f"{name}.safetensors"
    return contract.ImageRequest(
        prompt=f"a {COLOURS[number % 4]} {THINGS[number % 10]} {PLACES[number // 3 % 4]}",
        negative_prompt="blurry",
        loras=(contract.Lora(name, path, weight, weight),),
        sampler=("euler_ancestral", "dpmpp_2m_karras")[number % 2],
        steps=steps,
        cfg_scale=7.0,
        seed=100 + number,
        width=128,
        height=128,
    )


def noise(pixels: Pixels) -> Pixels:
    """2 % of the range."""
    added = np.random.default_rng(0).normal(0, 0.02 * 255, pixels.shape)
    return (pixels + added).round().clip(0, 255).astype(np.uint8)


def garbled_tile(pixels: Pixels) -> Pixels:
    changed = pixels.copy()
    height, width = (side // 8 for side in pixels.shape[:2])
    random = np.random.default_rng(0)
    changed[height : 2 * height, width : 2 * width] = random.integers(
        0, 256, (height, width, 3)
    )
    return changed


def swapped_channels(pixels: Pixels) -> Pixels:
    return pixels[..., ::-1].copy()


SPOILT: dict[str, Callable[[Pixels], Pixels]] = {
    "noise of 2 %": noise,
    "garbled tile": garbled_tile,
    "swapped channels": swapped_channels,
}


def halved_latents(engine: Any) -> None:
    vae = engine.checkpoint.vae
    vae.register_to_config(scaling_factor=2 * vae.config.scaling_factor)


def ways(on_gpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Engines that draw right, by name; the first is the reference."""
    yield "float32, 4 slots", {"precision": "float32", "slots": 4, "compile": "off"}
    for precision in ("float16", "bfloat16") if on_gpu else ("bfloat16",):
        yield (
            f"{precision}, 4 slots",
            {"precision": precision, "slots": 4, "compile": "off"},
        )
    precision = "float16" if on_gpu else "float32"
    for slots in (1, 16):
        settings = {"precision": precision, "slots": slots, "compile": "off"}
        yield f"{precision}, {slots} slots", settings
    if on_gpu:
        yield "float16, 16 slots, compiled", {"precision": "float16", "slots": 16}


def draw(
    settings: dict[str, Any],
    requests: list[contract.ImageRequest],
    fault: Callable[[Any], None] | None = None,
) -> list[Pixels]:
    print(f"drawing {len(requests)} jobs: {settings}", file=sys.stderr, flush=True)
    engine = load.load_engine(load.EngineSettings(MODEL, **settings))
    if fault is not None:
        fault(engine)
    drawn: list[Pixels] = []
    for first in range(0, len(requests), engine.capacity):
        drawn += work.draw(engine, requests[first : first + engine.capacity])
    engine.close()
    return drawn


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=40 if on_gpu else 8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--save", type=Path, help="write the fingerprints to this file")
    parser.add_argument("--compare", type=Path, help="fingerprints of another machine")
    arguments = parser.parse_args()
    if not on_gpu:
        torch.set_num_threads(1)  # several wait for each other on a busy machine
    requests = [job(number, arguments.steps) for number in range(arguments.jobs)]
    right = {name: draw(settings, requests) for name, settings in ways(on_gpu)}
    first = next(iter(right))
    settings = dict(ways(on_gpu))[first]
    rows: dict[str, JSONDict] = {}
    own = prints(right[first])
    for name in list(right)[1:]:
        rows[name] = row(own, prints(right[name]), is_right=True)
    saved = {name: [each.tolist() for each in prints(right[name])] for name in right}
    if arguments.compare:
        for name, texts in json.loads(arguments.compare.read_text())["images"].items():
            found = [np.array(cells, np.float32) for cells in texts]
            rows[f"other machine: {name}"] = row(own, found, is_right=True)
    for name, spoil in SPOILT.items():
        rows[name] = row(own, prints(map(spoil, right[first])), is_right=False)
    others = [
        dataclasses.replace(request, seed=request.seed + 1000) for request in requests
    ]
    plain = [dataclasses.replace(request, loras=()) for request in requests]
    for name, changed in {"another seed": others, "LoRA left out": plain}.items():
        rows[name] = row(own, prints(draw(settings, changed)), is_right=False)
    rows["halved latents"] = row(
        own, prints(draw(settings, requests, halved_latents)), is_right=False
    )
    rows["cached image"] = row(own[1:], own[:1] * len(own), is_right=False)
    record = {
        "same_below": likeness.SAME_BELOW,
        "jobs": len(requests),
        "steps": arguments.steps,
        "rows": rows,
        "hardware": machine.hardware(devices.find_device("auto")),
        "versions": machine.versions(),
    }
    show(record)
    if arguments.save:
        arguments.save.write_text(
            json.dumps({**record, "images": saved}), encoding="utf-8"
        )
    print(json.dumps(record))
    wrong = [each for each in rows.values() if not each["is_right"]]
    return 1 if any(each["jobs_misjudged"] for each in wrong) else 0


def prints(drawn: Iterable[Pixels]) -> list[Fingerprint]:
    return list(map(likeness.fingerprint, drawn))


def row(
    one: list[Fingerprint], other: list[Fingerprint], *, is_right: bool
) -> JSONDict:
    """Distances of pairs, and how many are on the wrong side of `SAME_BELOW`."""
    jobs = [likeness.distance(*pair) for pair in zip(one, other, strict=False)]
    return {
        "is_right": is_right,
        "jobs_min": round(min(jobs, default=0.0), 2),
        "jobs_median": round(float(np.median(jobs)), 2) if jobs else 0.0,
        "jobs_max": round(max(jobs, default=0.0), 2),
        "jobs_misjudged": sum(
            (each < likeness.SAME_BELOW) != is_right for each in jobs
        ),
    }


def show(record: JSONDict) -> None:
    print(f"{'drawn':38} {'jobs: min':>9} {'median':>7} {'max':>7} {'wrong':>6}")
    for name, each in record["rows"].items():
        print(
            f"{name:38} {each['jobs_min']:9.2f} {each['jobs_median']:7.2f} {each['jobs_max']:7.2f}"
            f" {each['jobs_misjudged']:6}"
        )
    print(f"below {record['same_below']:g} is the same")


if __name__ == "__main__":
    sys.exit(main())
