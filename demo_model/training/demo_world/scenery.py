"""Backgrounds of the drawn world, drawn with Pillow at any size."""

import math
import random
from collections.abc import Iterable
from functools import cache

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

PLAIN_TOPS: tuple[Colour, ...] = (
    (232, 226, 214), (205, 222, 238), (224, 224, 228), (208, 230, 214), (222, 212, 234),
)  # fmt: skip


@cache
def _vertical_ramp(height: int) -> Image.Image:
    return Image.linear_gradient("L").resize((1, height))


def blend(a: Colour, b: Colour, share_of_b: float) -> Colour:
    return tuple(round(x + (y - x) * share_of_b) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]


def vertical_gradient(size_px: int, top: Colour, bottom: Colour) -> Image.Image:
    column = Image.composite(
        Image.new("RGB", (1, size_px), bottom),
        Image.new("RGB", (1, size_px), top),
        _vertical_ramp(size_px),
    )
    return column.resize((size_px, size_px))


def _hills(
    draw: ImageDraw.ImageDraw, size_px: int, rng: random.Random, base: float, swing: float,
    colour: Colour,
) -> None:  # fmt: skip
    phase, waves = rng.uniform(0, 6.28), rng.uniform(0.7, 1.4)
    ridge = [
        (
            x * size_px / 16,
            size_px * (base + swing * math.sin(phase + waves * 6.28 * x / 16)),
        )
        for x in range(17)
    ]
    draw.polygon([*ridge, (size_px, size_px), (0, size_px)], fill=colour)


def _specks(
    draw: ImageDraw.ImageDraw, size_px: int, rng: random.Random, count: int, lowest: float,
    radius: tuple[float, float], colour: Colour,
) -> None:  # fmt: skip
    for _ in range(count):
        x, y = rng.uniform(0, size_px), rng.uniform(0, size_px * lowest)
        r = size_px * rng.uniform(*radius)
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)


def _plain(size_px: int, rng: random.Random) -> Image.Image:
    top = rng.choice(PLAIN_TOPS)
    return vertical_gradient(size_px, blend(top, (255, 255, 255), 0.35), top)


def _night(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (16, 20, 58), (58, 52, 118))
    draw = ImageDraw.Draw(image)
    _specks(draw, size_px, rng, 16, 0.7, (0.006, 0.012), (250, 244, 205))
    _hills(draw, size_px, rng, 0.84, 0.035, (18, 22, 50))
    return image


def draw_trunks(
    draw: ImageDraw.ImageDraw,
    size_px: int,
    rng: random.Random,
    layers: Iterable[tuple[Colour, int, float]],
    flare: float,
) -> None:
    """Layers of (colour, count, width as a share of the picture), *flare* times as wide below."""
    for colour, count, width in layers:
        for index in range(count):
            x = size_px * (index + rng.uniform(0.15, 0.85)) / count
            half = size_px * width / 2
            top = [(x - half, 0), (x + half, 0)]
            bottom = [(x + half * flare, size_px), (x - half * flare, size_px)]
            draw.polygon([*top, *bottom], fill=colour)


def _forest(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (176, 214, 160), (104, 164, 104))
    draw = ImageDraw.Draw(image)
    layers = (((124, 168, 118), 4, 0.045), ((70, 92, 62), 3, 0.075))
    draw_trunks(draw, size_px, rng, layers, flare=1.4)
    for index in range(7):
        x, r = (
            size_px * (index + rng.uniform(-0.2, 0.2)) / 6,
            size_px * rng.uniform(0.1, 0.15),
        )
        draw.ellipse((x - r, -r * 1.1, x + r, r * 0.8), fill=(46, 110, 66))
    _hills(draw, size_px, rng, 0.83, 0.02, (50, 104, 54))
    return image


def _sea(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (150, 212, 242), (222, 242, 248))
    draw = ImageDraw.Draw(image)
    for level, colour in (
        (0.5, (64, 156, 206)),
        (0.66, (42, 128, 188)),
        (0.82, (28, 100, 164)),
    ):
        phase = rng.uniform(0, 6.28)
        crest = [
            (
                x * size_px / 40,
                size_px * (level + 0.018 * math.sin(phase + 6.28 * 5 * x / 40)),
            )
            for x in range(41)
        ]
        draw.polygon([*crest, (size_px, size_px), (0, size_px)], fill=colour)
    return image


def _desert(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (252, 206, 140), (255, 236, 196))
    draw = ImageDraw.Draw(image)
    _hills(draw, size_px, rng, 0.6, 0.05, (232, 182, 112))
    _hills(draw, size_px, rng, 0.76, 0.05, (214, 154, 84))
    return image


def _snow(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (146, 176, 206), (206, 222, 236))
    draw = ImageDraw.Draw(image)
    _hills(draw, size_px, rng, 0.66, 0.04, (226, 236, 246))
    _hills(draw, size_px, rng, 0.8, 0.03, (250, 252, 255))
    _specks(draw, size_px, rng, 22, 0.8, (0.009, 0.017), (255, 255, 255))
    return image


def _meadow(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (118, 190, 246), (212, 238, 252))
    draw = ImageDraw.Draw(image)
    _hills(draw, size_px, rng, 0.62, 0.05, (142, 206, 98))
    _hills(draw, size_px, rng, 0.78, 0.035, (106, 182, 76))
    return image


def _city(size_px: int, rng: random.Random) -> Image.Image:
    image = vertical_gradient(size_px, (244, 176, 150), (252, 222, 186))
    draw = ImageDraw.Draw(image)
    columns = 7
    for index in range(columns):
        left, right = size_px * index / columns, size_px * (index + 1) / columns
        top = size_px * rng.uniform(0.3, 0.62)
        tone = rng.choice(((104, 98, 132), (122, 114, 146), (90, 88, 122)))
        draw.rectangle((left, top, right, size_px), fill=tone)
        pane = (right - left) / 5
        for row in range(3):
            for column in (1, 3):
                x, y = left + column * pane, top + (0.6 + 1.7 * row) * pane
                draw.rectangle((x, y, x + pane, y + pane), fill=(250, 220, 140))
    draw.rectangle((0, size_px * 0.86, size_px, size_px), fill=(84, 82, 92))
    return image


BACKGROUNDS = {
    "plain": _plain, "night": _night, "forest": _forest, "sea": _sea, "desert": _desert,
    "snow": _snow, "meadow": _meadow, "city": _city,
}  # fmt: skip


def draw_background(name: str, size_px: int, rng: random.Random) -> Image.Image:
    return BACKGROUNDS[name](size_px, rng)
