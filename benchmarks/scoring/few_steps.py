"""What few steps without guidance draw with the demo's LoRA.

    python benchmarks/scoring/few_steps.py --picture few-steps.png

The held-out captions of `demo_model.py`, read by the same judge: as jobs draw them, and in few
Euler steps of one row ("trailing" timesteps, which A1111 calls SGM Uniform), with the LoRA and
without. Prints a table; the last line is one JSON object. `--picture` shows the first captions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import demo_model
from demo_model import Case, Painter, held_out_cases
from demo_world import answers
from demo_world.training import train_few_steps
from evaluation.score.demo.judge import load_judge

STEPS = (1, 2, 4, 8)
PICTURES = 8


class Way(NamedTuple):
    """How pictures are drawn."""

    name: str
    steps: int
    guidance: float = 1.0
    has_lora: bool = True


AS_JOBS_DO = Way("Euler a, guidance 7", demo_model.STEPS, demo_model.GUIDANCE, has_lora=False)
WITH_LORA = tuple(Way("with the LoRA", steps) for steps in STEPS)
WITHOUT = Way("without it", train_few_steps.STEPS, has_lora=False)
SHOWN = (AS_JOBS_DO, *(way for way in WITH_LORA if way.steps == train_few_steps.STEPS), WITHOUT)


class Drawn(NamedTuple):
    pictures: Tensor
    seconds: float


def draw(painter: Painter, cases: list[Case], lora: Path) -> dict[Way, Drawn]:
    """Each way's pictures [cases, 3, 128, 128] of the same captions and noise."""
    pipeline = painter.pipeline
    contexts = painter.encode_plain([case.caption for case in cases])
    negatives = painter.encode_plain([""] * len(cases))
    seeds = [case.seed for case in cases]
    own = pipeline.scheduler
    trailing = EulerDiscreteScheduler.from_config(own.config, timestep_spacing="trailing")
    drawn = {}
    for way in (AS_JOBS_DO, WITHOUT, *WITH_LORA):
        pipeline.scheduler = own if way.guidance > 1 else trailing
        if way == WITH_LORA[0]:
            pipeline.load_lora_weights(lora)
            pipeline.fuse_lora()
        batch = slice(demo_model.BATCH)  # not timed: the first is slower
        sampling = {"steps": way.steps, "guidance": way.guidance}
        painter.draw(contexts[batch], negatives[batch], seeds[batch], **sampling)
        began_at = time.perf_counter()
        pictures = painter.draw(contexts, negatives, seeds, **sampling)
        drawn[way] = Drawn(pictures, (time.perf_counter() - began_at) / len(cases))
    return drawn


def save_picture(drawn: dict[Way, Drawn], file: Path) -> None:
    """A row for each of SHOWN, a column for each of the first captions."""
    rows = [torch.cat(list(drawn[way].pictures[:PICTURES]), 2) for way in SHOWN]
    pixels = torch.cat(rows, 1).permute(1, 2, 0).numpy()
    picture = Image.fromarray(np.round(pixels * 255).astype(np.uint8))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(256).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captions", type=int, default=200, help="held-out captions to draw")
    parser.add_argument("--model", type=Path, default=demo_model.ROOT / "demo_model")
    parser.add_argument("--picture", type=Path, help="a PNG to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    lora = given.model / "loras" / f"{train_few_steps.RECIPE.name}.safetensors"
    cases, judge = held_out_cases(given.captions), load_judge()
    drawn = draw(Painter(given.model, given.device), cases, lora)
    figures = []
    for way, (pictures, seconds) in drawn.items():
        found = list(zip(cases, answers.find(judge, pictures), strict=True))
        figures.append(
            {
                "way": way.name,
                "steps": way.steps,
                "objects_right": answers.share(
                    [answers.objects_right(c.scene, f) for c, f in found]
                ),
                "both_right": answers.share([answers.both_right(c.scene, f) for c, f in found]),
                "seconds": round(seconds, 4),
            }
        )
    wanted = figures[0]["objects_right"]
    print(f"{'drawn':20} steps  things right  of 15 guided  and colours  seconds each")
    for row in figures:
        row["objects_over_15_steps"] = round(row["objects_right"] / wanted, 4) if wanted else None
        print(
            f"{row['way']:20} {row['steps']:5}  {row['objects_right']:12.1%}"
            f"  {row['objects_over_15_steps'] or 0:12.1%}  {row['both_right']:11.1%}"
            f"  {row['seconds']:12.4f}"
        )
    if given.picture:
        save_picture(drawn, given.picture)
    print(json.dumps({"captions": given.captions, "device": given.device, "rows": figures}))


if __name__ == "__main__":
    main()
