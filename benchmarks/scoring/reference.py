"""Makes what the demo checkpoint's images are scored with: python benchmarks/scoring/reference.py.

Scenes that training never showed are drawn by the program that drew its training set: their
captions go to `demo_model/captions.txt`, their features to `evaluation/score/demo/reference.npz`.
"""

import argparse
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "demo_model" / "training"))

from demo_world import captions, world
from demo_world.world import SceneOptions
from evaluation.score import metrics
from evaluation.score.networks import load
from evaluation.score.statistics import Statistics

ROOT = Path(__file__).resolve().parents[2]
PICTURES = 2_000
SEED = 30_000
BATCH = 50

#: Of features: 2,000 rows take 1 MB.
STORED = np.float16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--captions", type=Path, default=ROOT / "demo_model/captions.txt"
    )
    parser.add_argument(
        "--reference", type=Path, default=ROOT / "evaluation/score/demo/reference.npz"
    )
    parser.add_argument("--count", type=int, default=0, help="of pictures")
    arguments = parser.parse_args()
    count = arguments.count or PICTURES
    rng = random.Random(SEED)
    options = SceneOptions(held_out=True, emphasis_share=0)
    scenes = [world.sample_scene(rng, options) for _ in range(count)]
    lines = [captions.plain_caption(scene, rng) for scene in scenes]
    arguments.captions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    extractor = load.load_extractor("demo")
    clip = load.load_text_extractor("demo")
    features, seen = [], []
    for first in range(0, count, BATCH):
        pictures = [world.draw_scene(scene) for scene in scenes[first : first + BATCH]]
        features.append(extractor.features(pictures))
        seen.append(clip.features(pictures))
    rows = np.concatenate(features)
    statistics = Statistics.of(rows)
    np.savez_compressed(
        arguments.reference,
        count=count,
        mu=statistics.mean,
        sigma=statistics.covariance,
        features=rows.astype(STORED),
        clip_features=np.concatenate(seen).astype(STORED),
        extractor=extractor.facts.sha256,
        clip_extractor=clip.facts.sha256,
    )
    scores = metrics.clip_score(np.concatenate(seen), clip.text_features(lines))
    print(f"{count} pictures; their score with their captions: {scores.mean():.2f}")


if __name__ == "__main__":
    main()
