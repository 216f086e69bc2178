"""Measures drawing in few unguided steps with the demo's LoRA: quality and cost.

    python benchmarks/scoring/few_steps.py --picture few-steps.png --curves .

The held-out captions of `measure_demo_model.py`, read by the same judge: as jobs draw them, and in
few Euler steps of one row ("trailing" timesteps, which A1111 calls SGM Uniform), with the LoRA and
without; and the world's own pictures of them, of which even as few have an FID. Dollars are those
of `imagefleet plan` for SD1.5's images of as many steps and rows. Prints a table; the last line is
one JSON object. `--picture` shows the first captions, `--curves` FID and CLIP score over dollars.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler
from PIL import Image
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [f"{ROOT}/demo_model/training", str(ROOT)]

from demo_world import answers, world
from evaluation.score import figures, metrics, reference
from evaluation.score.demo.judge import load_judge
from evaluation.score.networks import load
from fleet.plan import command as planning
from fleet.plan import work
from imagefleet.files import demo
from imagefleet.job.message import Job
from imagefleet.validation import JSONDict
from measure_demo_model import BATCH, GUIDANCE, Case, Painter, held_out_cases

#: As the LoRA was trained.
ACCELERATED_STEPS = 4
STEPS = (1, 2, 4, 8)
GUIDED_STEPS = (15, 5, 10, 20)
PICTURES = 8
GPU = "RTX 4090"
MILLION = 1_000_000


class Sampling(NamedTuple):
    """Sampling of pictures: steps, guidance, and whether the LoRA is used."""

    name: str
    steps: int
    guidance: float = 1.0
    has_lora: bool = True


GUIDED = tuple(
    Sampling(
        f"Euler a, cfg_scale {GUIDANCE:g}",
        steps,
        GUIDANCE,
        has_lora=False,
    )
    for steps in GUIDED_STEPS
)
AS_JOBS_DO = GUIDED[0]
WITH_LORA = tuple(Sampling("with the LoRA", steps) for steps in STEPS)
WITHOUT = Sampling("without it", ACCELERATED_STEPS, has_lora=False)
SHOWN = (
    AS_JOBS_DO,
    *(way for way in WITH_LORA if way.steps == ACCELERATED_STEPS),
    WITHOUT,
)


class DrawnPictures(NamedTuple):
    """Pictures [cases, 3, 128, 128] and the seconds of each, the median of batches."""

    way: Sampling
    pictures: Tensor
    seconds: float


def draw(painter: Painter, cases: list[Case], lora: Path) -> Iterator[DrawnPictures]:
    """Each way's pictures of the same captions and noise."""
    pipeline = painter.pipeline
    contexts = painter.encode_plain([case.caption for case in cases])
    negatives = painter.encode_plain([""] * len(cases))
    seeds = [case.seed for case in cases]
    own = pipeline.scheduler
    trailing = EulerDiscreteScheduler.from_config(
        own.config, timestep_spacing="trailing"
    )
    for way in (*GUIDED, WITHOUT, *WITH_LORA):
        pipeline.scheduler = own if way.guidance > 1 else trailing
        if way == WITH_LORA[0]:
            pipeline.load_lora_weights(lora)
            pipeline.fuse_lora()
        pictures, seconds = [], []
        for start in range(0, len(cases), BATCH):
            part = slice(start, start + BATCH)
            began_at = time.perf_counter()
            pictures.append(
                painter.draw(
                    contexts[part],
                    negatives[part],
                    seeds[part],
                    way.steps,
                    way.guidance,
                )
            )
            seconds.append((time.perf_counter() - began_at) / len(seeds[part]))
        yield DrawnPictures(way, torch.cat(pictures), statistics.median(seconds))


def as_images(pictures: Tensor) -> list[Image.Image]:
    pixels = np.round(pictures.permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)
    return [Image.fromarray(image) for image in pixels]


def save_picture(shown: Sequence[Tensor], file: Path) -> None:
    """A row for each of SHOWN, a column for each of the first captions."""
    (picture,) = as_images(
        torch.cat([torch.cat(list(row), 2) for row in shown], 1)[None]
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(256).save(file, optimize=True)


class Scorer:
    """Right answers, FID and CLIP score of pictures of the same captions, by the demo's judge."""

    def __init__(self, cases: list[Case]) -> None:
        self._cases, self._judge = cases, load_judge()
        self._extractor, self._clip = (
            load.load_extractor("demo"),
            load.load_text_extractor("demo"),
        )
        told = reference.read(
            "demo", self._extractor.facts, self._clip.facts
        ).statistics
        assert told is not None
        self._reference, self._root = told, metrics.square_root(told)
        self._texts = self._clip.text_features([case.caption for case in cases])

    def figures(self, pictures: Tensor) -> JSONDict:
        found = list(zip(self._cases, answers.find(self._judge, pictures), strict=True))
        images = as_images(pictures)
        fid = metrics.fid(self._extractor.features(images), self._reference, self._root)
        clip = metrics.mean(
            metrics.clip_score(self._clip.features(images), self._texts)
        )
        return {
            "objects_right": answers.share(
                [answers.objects_right(c.scene, f) for c, f in found]
            ),
            "both_right": answers.share(
                [answers.both_right(c.scene, f) for c, f in found]
            ),
            "fid": fid.value,
            "fid_interval": fid.interval,
            "clip": clip.value,
            "clip_interval": clip.interval,
        }


def cost(drawn: DrawnPictures) -> JSONDict:
    """The plan of a million of SD1.5's images, and the speed of those that were drawn here."""
    way, found = drawn.way, dict[str | None, work.ModelJobs]()
    job = Job(
        prompt="a", steps=way.steps, cfg_scale=way.guidance, width=512, height=512
    )
    work.add_stages(found, work.Models({}, None), job, MILLION)
    works = list(found.values())
    plan, _ = planning.planned(works, planning.Machines(gpu=[GPU]))
    return {
        "rows": way.steps * (1 if way.guidance == 1 else 2),
        "images_per_second": round(1 / drawn.seconds, 3),
        "gpu_dollars_per_million": round(plan.gpu_dollars, 3),
        "dollars_per_million": round(plan.dollars, 3),
    }


def save_curves(rows: list[JSONDict], folder: Path) -> None:
    """FID and CLIP score over dollars: a line for each kind, a point for each number of steps."""
    own, *drawn = rows
    for name, title in (("fid", "FID"), ("clip", "CLIP score")):
        lines: dict[str, list[figures.Point]] = {}
        for row in sorted(drawn, key=lambda row: row["steps"]):
            dollars, label = row["gpu_dollars_per_million"], str(row["steps"])
            point = (
                dollars,
                row[name],
                (dollars, dollars),
                row[f"{name}_interval"],
                label,
            )
            lines.setdefault(row["way"], []).append(
                figures.Point(*point, f"{row[name]:.3f}")
            )
        note = f"the world's own: {own[name]:.2f}"
        texts = f"{title} over dollars", "GPU $ per million images", title, note
        (folder / f"few-steps-{name}.svg").write_text(
            figures.plot(lines, *texts), encoding="utf-8"
        )


def show(row: JSONDict) -> None:
    fid_reach, clip_reach = (
        (row[f"{name}_interval"][1] - row[f"{name}_interval"][0]) / 2
        for name in ("fid", "clip")
    )
    print(
        f"{row['way']:20} {row['steps'] or '-':>5} {row.get('rows', '-'):>4}"
        f" {row['objects_right']:7.1%} {row['both_right']:7.1%}"
        f" {row['fid']:8.3f} ±{fid_reach:.3f} {row['clip']:6.2f} ±{clip_reach:.2f}"
        f" {row.get('images_per_second', '-'):>8} {row.get('gpu_dollars_per_million', '-'):>7}"
        f" {row.get('dollars_per_million', '-'):>7}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--captions", type=int, default=200, help="held-out captions to draw"
    )
    parser.add_argument("--model", type=Path, default=demo.TRAINED)
    parser.add_argument("--picture", type=Path, help="a PNG to write")
    parser.add_argument("--curves", type=Path, help="a folder for two SVGs")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads (default: torch's own choice)"
    )
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    lora = given.model / "loras" / demo.ACCELERATOR.name
    cases = held_out_cases(given.captions)
    scorer, rows, shown = Scorer(cases), [], {}
    print(
        "drawn                steps rows  things colours      FID          CLIP    images/s"
        "  GPU $/million  all in"
    )
    own = [world.draw_scene(case.scene) for case in cases]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in own]))
    rows.append({"way": "the world's own", "steps": None})
    rows[0] |= scorer.figures(pixels.permute(0, 3, 1, 2).float() / 255)
    show(rows[0])
    for drawn in draw(Painter(given.model, given.device), cases, lora):
        way = drawn.way
        row = {
            "way": way.name,
            "steps": way.steps,
            **scorer.figures(drawn.pictures),
            **cost(drawn),
        }
        rows.append(row)
        if wanted := rows[1]["objects_right"]:
            row["objects_over_15_steps"] = round(row["objects_right"] / wanted, 4)
        if way in SHOWN:
            shown[way] = drawn.pictures[:PICTURES]
        show(row)
    if given.picture:
        save_picture([shown[way] for way in SHOWN], given.picture)
    if given.curves:
        save_curves(rows, given.curves)
    figures = {
        "captions": given.captions,
        "device": given.device,
        "gpu": GPU,
        "rows": rows,
    }
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
