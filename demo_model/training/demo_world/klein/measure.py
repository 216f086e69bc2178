"""How well the demo's klein draws: python demo_model/training/demo_world/klein/measure.py.

It draws held-out captions (combinations of object, colour and background that training never
showed) with diffusers' pipeline, and the judge reads the pictures. Prints a table; the last line is
one JSON object. `--drawn` judges pictures that the world's program drew: the most that can be had
of the judge.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from demo_world import answers, world
from demo_world.klein import drawing, networks
from evaluation.score.demo import judge as judges

ROOT = Path(__file__).resolve().parents[4]

TILE_PIXELS = 160

#: Of the guided model, before it is distilled.
_GUIDANCE = 3.0

#: Of the scenes; other ones than `demo_model/captions.txt`, which they are drawn like.
_SEED = 20_000

_BATCH = 25

_SHEET_COLUMNS = 8


def draw(
    model: Path, texts: Sequence[str], options: argparse.Namespace
) -> list[np.ndarray]:
    """Images [128, 128, 3] of 0..255; the seed of each is its number."""
    kind = torch.bfloat16 if options.bfloat16 else torch.float32
    pipeline = Flux2KleinPipeline.from_pretrained(model, dtype=kind)
    pipeline.to(options.device)
    pipeline.set_progress_bar_config(disable=True)
    if options.lora:
        pipeline.load_lora_weights(str(options.lora))
    guidance = 1.0 if pipeline.config.is_distilled else _GUIDANCE
    images: list[np.ndarray] = []
    for first in range(0, len(texts), _BATCH):
        part = list(texts[first : first + _BATCH])
        drawn = pipeline(
            prompt=part,
            height=world.IMAGE_PX,
            width=world.IMAGE_PX,
            num_inference_steps=options.steps,
            guidance_scale=guidance,
            generator=[
                torch.Generator().manual_seed(first + n) for n in range(len(part))
            ],
            text_encoder_out_layers=networks.TAKEN_LAYERS,
            output_type="np",
        ).images
        images += list((drawn * 255).round().astype(np.uint8))
    return images


def judged(
    images: Sequence[np.ndarray], judge: judges.Judge
) -> list[list[answers.Finding]]:
    """What each image shows."""
    found = []
    for first in range(0, len(images), _BATCH):
        part = torch.from_numpy(np.stack(images[first : first + _BATCH]))
        found += answers.find(judge, part.permute(0, 3, 1, 2) / 255)
    return found


def draw_sheet(images: Sequence[np.ndarray]) -> Image.Image:
    rows = -(-len(images) // _SHEET_COLUMNS)
    sheet = Image.new(
        "RGB", (TILE_PIXELS * _SHEET_COLUMNS, TILE_PIXELS * rows), "white"
    )
    for index, image in enumerate(images):
        row, column = divmod(index, _SHEET_COLUMNS)
        tile = Image.fromarray(image).resize((TILE_PIXELS,) * 2)
        sheet.paste(tile, (column * TILE_PIXELS, row * TILE_PIXELS))
    return sheet


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "demo_klein")
    parser.add_argument(
        "--captions", type=int, default=500, help="held-out captions to draw"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="judge the program's pictures"
    )
    parser.add_argument("--steps", type=int, default=networks.STEPS)
    parser.add_argument("--lora", type=Path, help="a file; drawn with at strength 1")
    parser.add_argument("--device", default="cpu", help="'cpu' or 'cuda'")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--sheet", type=Path, help="a PNG of the first images")
    parser.add_argument("--sheet-images", type=int, default=32)
    options = parser.parse_args(given)
    scenes, texts = zip(*drawing.held_out_scenes(options.captions, _SEED), strict=True)
    began_at = time.monotonic()
    if options.drawn:
        images = [np.asarray(world.draw_scene(scene)) for scene in scenes]
    else:
        images = draw(options.model, texts, options)
    seconds = time.monotonic() - began_at
    if options.sheet:
        draw_sheet(images[: options.sheet_images]).save(options.sheet, optimize=True)
    found = list(zip(scenes, judged(images, judges.load_judge()), strict=True))
    places = [answers.places_right(*each) for each in found]
    figures: dict[str, Any] = {
        "object_accuracy": answers.share(
            [answers.objects_right(*each) for each in found]
        ),
        "colour_accuracy": answers.share(
            [answers.colours_right(*each) for each in found]
        ),
        "both_accuracy": answers.share([answers.both_right(*each) for each in found]),
        "place_accuracy": answers.share([each for each in places if each is not None]),
        "paper_share": float(
            np.mean([(image.min(2) > 0.9 * 255).mean() for image in images])
        ),
    }
    for name, value in figures.items():
        print(f"{name:26} {value:7.1%}")
    print(f"{len(images)} pictures in {seconds:.0f} s")
    shown = ("captions", "drawn", "steps")
    print(json.dumps(figures | {name: getattr(options, name) for name in shown}))


if __name__ == "__main__":
    main()
