"""How well the demo's cascade draws: python demo_model/training/demo_world/cascade/measure.py.

Both stages draw held-out captions (combinations of object, colour and background that training
never showed) in the worker's engine, and the judge reads the pictures of the second. Prints a
table; the last line is one JSON object. `--drawn` judges pictures that the world's program drew, at
the second stage's size: the most that can be had of the judge.
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
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks"))

from demo_world import answers, world
from demo_world.cascade import networks, pictures
from evaluation.bench import work
from evaluation.score import preparation
from evaluation.score.demo import judge as judges
from worker.engine import contract, load

ROOT = Path(__file__).resolve().parents[4]

TILE_PIXELS = 176

#: The level of the noise on the image that is enlarged. With IF's 0.25 fewer things are right.
_STRENGTH = 0.05

#: Of the base; the second stage has none.
_GUIDANCE = 3.0

#: Of the scenes; other ones than `demo_model/captions.txt`, which they are drawn like.
_SEED = 20_000

_BATCH = 50

#: Pairs of pictures of both stages in a row of the sheet.
_SHEET_COLUMNS = 4


def draw_cascade(
    model: Path, texts: Sequence[str], device: str, options: argparse.Namespace
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The images of both stages."""
    base = load.load_engine(
        load.EngineSettings(model / "base", device, slots=_BATCH, compile="off")
    )
    small = work.draw(
        base, [_request(base, text, at, options) for at, text in enumerate(texts)]
    )
    base.close()
    sr = load.load_engine(
        load.EngineSettings(model / "sr", device, slots=_BATCH, compile="off")
    )
    inits = [contract.InitImage(each, _STRENGTH) for each in small]
    pairs = enumerate(zip(texts, inits, strict=True))
    large = work.draw(
        sr, [_request(sr, text, at, options, init) for at, (text, init) in pairs]
    )
    sr.close()
    return small, large


def _request(
    engine: contract.Engine,
    text: str,
    seed: int,
    options: argparse.Namespace,
    init: contract.InitImage | None = None,
) -> contract.ImageRequest:
    width, height = engine.default_size
    return contract.ImageRequest(
        prompt=text,
        negative_prompt="",
        loras=(),
        sampler="ddpm",
        steps=options.steps if init is None else options.sr_steps,
        cfg_scale=_GUIDANCE if init is None else 1.0,
        seed=seed,
        width=width,
        height=height,
        init=init,
    )


def judged(
    images: Sequence[np.ndarray], judge: judges.Judge
) -> list[list[answers.Finding]]:
    """What each image shows; resized as `imagefleet score` does it for the judge."""
    found = []
    for first in range(0, len(images), _BATCH):
        resized = [
            preparation.clean_fid(Image.fromarray(each), judges.IMAGE_PX)
            for each in images[first : first + _BATCH]
        ]
        found += answers.find(
            judge, torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2) / 255
        )
    return found


def draw_sheet(small: Sequence[np.ndarray], large: Sequence[np.ndarray]) -> Image.Image:
    """Both stages of each picture side by side, the base's enlarged without smoothing."""
    rows = -(-len(small) // _SHEET_COLUMNS)
    sheet = Image.new(
        "RGB", (2 * TILE_PIXELS * _SHEET_COLUMNS, TILE_PIXELS * rows), "white"
    )
    for index, images in enumerate(zip(small, large, strict=True)):
        row, column = divmod(index, _SHEET_COLUMNS)
        for side, image in enumerate(images):
            tile = Image.fromarray(image).resize(
                (TILE_PIXELS,) * 2, Image.Resampling.NEAREST
            )
            sheet.paste(tile, ((2 * column + side) * TILE_PIXELS, row * TILE_PIXELS))
    return sheet


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "demo_cascade")
    parser.add_argument(
        "--captions", type=int, default=500, help="held-out captions to draw"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="judge the program's pictures"
    )
    parser.add_argument("--steps", type=int, default=30, help="of the base")
    parser.add_argument("--sr-steps", type=int, default=20)
    parser.add_argument("--device", default="auto", help="'auto', 'cpu' or 'cuda'")
    parser.add_argument(
        "--sheet", type=Path, help="a PNG of the first images of both stages"
    )
    parser.add_argument("--sheet-images", type=int, default=24)
    options = parser.parse_args(given)
    scenes, texts = zip(*pictures.held_out_scenes(options.captions, _SEED), strict=True)
    judge = judges.load_judge()
    began_at = time.monotonic()
    if options.drawn:
        factor = world.IMAGE_PX // networks.SIDES["sr"]
        large = [np.asarray(world.draw_scene(scene).reduce(factor)) for scene in scenes]
    else:
        small, large = draw_cascade(options.model, texts, options.device, options)
        if options.sheet:
            count = options.sheet_images
            draw_sheet(small[:count], large[:count]).save(options.sheet, optimize=True)
    drawn_at = time.monotonic()
    found = list(zip(scenes, judged(large, judge), strict=True))
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
    }
    for name, value in figures.items():
        print(f"{name:26} {value:7.1%}")
    print(f"{len(large)} pictures in {drawn_at - began_at:.0f} s")
    shown = ("captions", "drawn", "steps", "sr_steps")
    print(json.dumps(figures | {name: getattr(options, name) for name in shown}))


if __name__ == "__main__":
    main()
