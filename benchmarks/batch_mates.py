"""PSNR of an image drawn alone and the same image drawn with seven others.

    python benchmarks/batch_mates.py --out benchmarks/results/batch-mates-h200.json

float16 on a GPU; float32 with fewer steps on a CPU, as a trial. The last line is JSON; the exit
code is 1 if a pair has 40 dB or less.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from engine_rows import decibels
from evaluation.bench import machine, work
from fleet import demo_jobs
from worker.engine import contract, load
from worker.engine import device as devices

LIMIT_DB = 40.0
MODEL = demo_jobs.TRAINED
LONG = "a red house in a meadow, (under a blue sky:1.2), " * 5
NEGATIVE = "blurry, ugly, low quality"

Loras = tuple[contract.Lora, ...]


def lora(name: str, text_encoder: float, unet: float) -> contract.Lora:
    return contract.Lora(name, MODEL / "loras" / f"{name}.safetensors", text_encoder, unet)


FOREST = lora("magic-fantasy-forest-v2", 0.8, 0.8)
NIGHT = lora("night-palette", 0.5, 0.5)
OUTLINE = lora("outline-style", 1.0, 1.0)
ROCKET = lora("rocket", 1.0, 1.0)


def ask(
    prompt: str, seed: int, steps: int, loras: Loras = (), **more: object
) -> contract.ImageRequest:
    fields = {
        "negative_prompt": NEGATIVE,
        "sampler": "euler_ancestral",
        "cfg_scale": 7.0,
        "width": 128,
        "height": 128,
        **more,
    }
    return contract.ImageRequest(prompt=prompt, seed=seed, steps=steps, loras=loras, **fields)


def targets(steps: int) -> dict[str, contract.ImageRequest]:
    return {
        "short": ask("a red boat at sea", 1, steps),
        "two chunks": ask(LONG, 2, steps),
        "one LoRA": ask("an orange mushroom in a forest", 3, steps, (FOREST,)),
        "two LoRAs": ask(
            "a white rocket at night", 4, steps, (ROCKET, NIGHT), sampler="dpmpp_2m_karras"
        ),
    }


def mates(target: contract.ImageRequest) -> list[contract.ImageRequest]:
    """Seven others: four with the target's LoRAs and steps, three with other ones."""
    steps, loras = target.steps, target.loras
    return [
        ask("a striped green balloon", 11, steps, loras, cfg_scale=3.0),
        ask(LONG * 2, 12, steps, loras, sampler="euler"),
        ask("", 13, steps, loras, negative_prompt=LONG),
        ask("three (red:1.3) apples BREAK in the snow", 14, steps, loras, negative_prompt=""),
        ask("a car", 15, steps, (OUTLINE,)),
        ask("a blue bird above a red mushroom", 16, steps - 2, (NIGHT,)),
        ask("a yellow star at night", 17, steps + 3),
    ]


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15 if on_gpu else 5)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    arguments = parser.parse_args()
    engine = load.load_engine(MODEL, slots=8, precision=arguments.precision, compile="off")
    pairs = [
        compare(engine, name, target, place=2 * number + 1)
        for number, (name, target) in enumerate(targets(arguments.steps).items())
    ]
    device = devices.find_device("auto")
    record = {
        "engine": "slots",
        "dtype": str(devices.find_dtype(arguments.precision, device)).removeprefix("torch."),
        "steps": arguments.steps,
        "limit_db": LIMIT_DB,
        "worst_db": min(pair["psnr_db"] for pair in pairs),
        "pairs": pairs,
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 0 if record["worst_db"] > LIMIT_DB else 1


def compare(
    engine: contract.Engine, name: str, target: contract.ImageRequest, place: int
) -> dict[str, Any]:
    (alone,) = work.draw(engine, [target])
    others = mates(target)
    together = work.draw(engine, [*others[:place], target, *others[place:]])
    with_others = together.pop(place)
    pair = {
        "image": name,
        "psnr_db": round(decibels(alone, with_others), 2),
        "largest_difference_of_255": int(np.abs(alone.astype(int) - with_others.astype(int)).max()),
        # For comparison: the PSNR of two different images.
        "psnr_db_of_the_most_alike_other": round(
            max(decibels(alone, image) for image in together), 2
        ),
    }
    print(
        f"{name:11} {pair['psnr_db']:.1f} dB, at most {pair['largest_difference_of_255']}/255;"
        f" the most similar other image: {pair['psnr_db_of_the_most_alike_other']:.1f} dB"
    )
    return pair


if __name__ == "__main__":
    sys.exit(main())
