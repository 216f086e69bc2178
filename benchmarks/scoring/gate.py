"""Measures how surely the gate sees damage, without networks: python benchmarks/scoring/gate.py.

Draws 400 pictures of the demo's world, damages a share of their redraws on purpose, and counts
how often the gate fails them. An untouched redraw differs as float16 and float32 do with the demo's
checkpoint, by 53 dB.
"""

import argparse
import io
import json
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [f"{ROOT}/demo_model/training", str(ROOT)]

from demo_world import world
from evaluation.gate import compare, verdict
from evaluation.gate.compare import Comparison, Measures
from evaluation.gate.images import Drawing, Pixels

#: Of a redraw, in levels of 255: 53 dB.
REDRAWN_LEVELS = 0.57

Damage = Callable[[Pixels, Pixels, np.random.Generator], Pixels]


def grey(drawn: Pixels, _other: Pixels, _random: np.random.Generator) -> Pixels:
    return np.full_like(drawn, 128)


def swapped(_drawn: Pixels, other: Pixels, _random: np.random.Generator) -> Pixels:
    return other


def blurred(radius: float) -> Damage:
    return lambda drawn, _other, _random: _filtered(drawn, radius)


def smeared(drawn: Pixels, _other: Pixels, _random: np.random.Generator) -> Pixels:
    """A quarter of the picture as if it were not drawn to its end."""
    height, width = (side // 2 for side in drawn.shape[:2])
    damaged = drawn.copy()
    smooth = _filtered(drawn, drawn.shape[0] / 16)
    damaged[:height, :width] = smooth[:height, :width]
    return damaged


def garbage(parts: int) -> Damage:
    """Noise somewhere in one of so many parts of the picture."""

    def damage(drawn: Pixels, _other: Pixels, numbers: np.random.Generator) -> Pixels:
        height = int(drawn.shape[0] / parts**0.5)
        width = int(drawn.shape[1] / parts**0.5)
        top = numbers.integers(drawn.shape[0] - height + 1)
        left = numbers.integers(drawn.shape[1] - width + 1)
        damaged = drawn.copy()
        damaged[top : top + height, left : left + width] = numbers.integers(
            256, size=(height, width, 3), dtype=np.uint8
        )
        return damaged

    return damage


def levels(*channels: int) -> Damage:
    return lambda drawn, _other, _random: _clipped(
        drawn + np.array(channels, np.float64)
    )


def grey_tones(drawn: Pixels, _other: Pixels, _random: np.random.Generator) -> Pixels:
    return np.asarray(Image.fromarray(drawn).convert("L").convert("RGB"))


def other_channels(
    drawn: Pixels, _other: Pixels, _random: np.random.Generator
) -> Pixels:
    return np.ascontiguousarray(drawn[..., ::-1])


def hue_turned(by: int) -> Damage:
    """Of 256, which are a full turn."""

    def damage(drawn: Pixels, _other: Pixels, _random: np.random.Generator) -> Pixels:
        hue, *others = Image.fromarray(drawn).convert("HSV").split()
        turned = hue.point(lambda value: (value + by) % 256)
        return np.asarray(Image.merge("HSV", (turned, *others)).convert("RGB"))

    return damage


def noise(deviation: float) -> Damage:
    return lambda drawn, _other, random: _clipped(
        drawn + random.normal(0, deviation, drawn.shape)
    )


def contrast(factor: float) -> Damage:
    return lambda drawn, _other, _random: _clipped(128 + (drawn - 128.0) * factor)


def moved(drawn: Pixels, _other: Pixels, _random: np.random.Generator) -> Pixels:
    return np.roll(drawn, 1, axis=1)


def jpeg(quality: int) -> Damage:
    def damage(drawn: Pixels, _other: Pixels, _random: np.random.Generator) -> Pixels:
        stored = io.BytesIO()
        Image.fromarray(drawn).save(stored, "JPEG", quality=quality)
        return np.asarray(Image.open(stored))

    return damage


@dataclass(frozen=True, slots=True)
class DamageCase:
    """A kind of damage, and the share of the pictures that have it; 0 is a single one."""

    name: str
    share: float
    damage: Damage | None
    #: None: the table says what the gate does, and nobody is promised anything.
    must_fail: bool | None = None


KINDS = (
    DamageCase("nothing", 0, None, must_fail=False),
    DamageCase("wholly grey", 0, grey, must_fail=True),
    DamageCase("another job's picture", 0, swapped, must_fail=True),
    DamageCase("noise in 1/16 of it", 0, garbage(16), must_fail=True),
    DamageCase("noise in 1/16 of it", 0.01, garbage(16), must_fail=True),
    DamageCase("noise in 1/64 of it", 0, garbage(64)),
    DamageCase("a quarter smeared", 0, smeared),
    DamageCase("blurred by 1 pixel", 0, blurred(1), must_fail=True),
    DamageCase("blurred by 1/2 pixel", 0, blurred(0.5)),
    DamageCase("blurred by 1/2 pixel", 1, blurred(0.5), must_fail=True),
    DamageCase("in grey tones", 0, grey_tones, must_fail=True),
    DamageCase("red and blue swapped", 0, other_channels, must_fail=True),
    DamageCase("hue turned by 20 of 256", 0, hue_turned(20), must_fail=True),
    DamageCase("brighter by 20 of 255", 0, levels(20, 20, 20), must_fail=True),
    DamageCase("brighter by 6 of 255", 0, levels(6, 6, 6), must_fail=True),
    DamageCase("redder by 3 of 255", 0, levels(3, 0, 0)),
    DamageCase("contrast of 95 %", 0, contrast(0.95)),
    DamageCase("brighter by 6 of 255", 1, levels(6, 6, 6), must_fail=True),
    DamageCase("redder by 3 of 255", 1, levels(3, 0, 0), must_fail=True),
    DamageCase("contrast of 95 %", 1, contrast(0.95), must_fail=True),
    DamageCase("moved by 1 pixel", 1, moved, must_fail=True),
    DamageCase("noise of 3 of 255", 1, noise(3)),
    DamageCase("noise of 8 of 255", 1, noise(8), must_fail=True),
    DamageCase("JPEG of quality 75", 1, jpeg(75)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    drawn = _of_world(asked.count)
    numbers = np.random.default_rng(0)
    redrawn = [_pair(drawn, place, numbers, None) for place in range(len(drawn))]
    rows = [
        _row(kind, drawn, redrawn, asked.trials, seed)
        for seed, kind in enumerate(KINDS)
    ]
    if asked.json:
        print(json.dumps(rows, indent=1))
    else:
        print("| damage | in | seen | by |\n| --- | --- | --- | --- |")
        for row in rows:
            print(
                "| {damage} | {pictures} of {of} | {seen} of {trials} | {by} |".format(
                    **row
                )
            )
    if wrong := [
        f"{row['damage']} in {row['pictures']}"
        for row in rows
        if not row["as_promised"]
    ]:
        sys.exit(f"not as promised: {'; '.join(wrong)}")


def _row(
    kind: DamageCase,
    drawn: list[Pixels],
    redrawn: list[Comparison],
    trials: int,
    seed: int,
) -> dict[str, object]:
    damaged = max(1, round(kind.share * len(drawn)))
    # What is done to all of them is the same in each trial but for the noise.
    trials = trials if damaged < len(drawn) else max(1, trials // 10)
    seen, by = 0, Counter[str]()
    for trial in range(trials):
        numbers = np.random.default_rng((seed, trial))
        # Without damage, the redraws are what a trial draws anew.
        chosen = numbers.permutation(len(drawn))[
            : damaged if kind.damage else len(drawn)
        ]
        pairs = list(redrawn)
        for place in chosen:
            pairs[place] = _pair(drawn, place, numbers, kind.damage)
        judged = _judge(pairs)
        seen += not judged.passed
        by.update(check.title for check in judged.checks if not check.passed)
    promised = None if kind.must_fail is None else trials * kind.must_fail
    return {
        "damage": kind.name,
        "pictures": damaged if kind.damage else 0,
        "of": len(drawn),
        "seen": seen,
        "trials": trials,
        "by": ", ".join(by) or "-",
        "as_promised": promised is None or seen == promised,
    }


def _pair(
    drawn: list[Pixels], place: int, numbers: np.random.Generator, damage: Damage | None
) -> Comparison:
    pixels = drawn[place]
    redrawn = _clipped(pixels + numbers.normal(0, REDRAWN_LEVELS, pixels.shape))
    if damage is not None:
        redrawn = damage(redrawn, drawn[place - 1], numbers)
    found = Comparison()
    sides = (Drawing(each, None, None) for each in (pixels, redrawn))
    compare.add_pair(found, *sides, key=str(place))
    return found


def _judge(pairs: list[Comparison]) -> verdict.Verdict:
    shift = reduce(operator.add, (each.shift for each in pairs if each.shift))
    together = Comparison([figures for each in pairs for figures in each.pairs], shift)
    return verdict.judge(together, Measures(None, None, None), verdict.Bounds())


def _of_world(count: int) -> list[Pixels]:
    numbers = random.Random(39)
    return [
        np.asarray(world.draw_scene(world.sample_scene(numbers))) for _ in range(count)
    ]


def _filtered(drawn: Pixels, radius: float) -> Pixels:
    return np.asarray(Image.fromarray(drawn).filter(ImageFilter.GaussianBlur(radius)))


def _clipped(exact: np.ndarray) -> Pixels:
    return np.rint(exact).clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    main()
