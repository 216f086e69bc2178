"""The drawn world: what a scene holds, how scenes are sampled, and how they are drawn."""

import random
import zlib
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from demo_world import scenery
from demo_world.geometry import Part, moved
from demo_world.scenery import Colour, blend
from demo_world.shapes import SHAPES

IMAGE_PX = 128
SUPERSAMPLING = 3
LABEL_PX = 32

COLOURS: dict[str, Colour] = {
    "red": (222, 48, 46), "orange": (246, 136, 28), "yellow": (250, 210, 46),
    "green": (58, 168, 72), "blue": (48, 104, 222), "purple": (142, 70, 192),
    "pink": (246, 138, 184), "white": (248, 248, 246), "black": (52, 50, 60),
    "brown": (142, 90, 52),
}  # fmt: skip
NEW_OBJECT = (
    "rocket"  # drawn only for its LoRA, the VAE and the judge: the base never sees it
)
OBJECTS: tuple[str, ...] = tuple(name for name in SHAPES if name != NEW_OBJECT)
TEXTURES: tuple[str, ...] = ("striped", "dotted", "checkered")
SIZES: dict[str, float] = {"small": 0.6, "large": 1.32}
POSITIONS: dict[str, tuple[float, float]] = {
    "left": (-0.47, 0.0), "right": (0.47, 0.0), "top": (0.0, -0.47), "bottom": (0.0, 0.47),
    "centre": (0.0, 0.0),
}  # fmt: skip
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below", "and")
STYLES: tuple[str, ...] = ("outline", "night-palette", "magic-fantasy-forest-v2")

_USUAL_COLOUR = {
    "star": "yellow", "heart": "red", "moon": "yellow", "sun": "yellow", "cloud": "white",
    "house": "red", "tree": "green", "fish": "orange", "flower": "pink", "boat": "red",
    "car": "blue", "mushroom": "red", "cup": "white", "apple": "red", "cat": "orange",
    "bird": "blue", "umbrella": "purple", "balloon": "red", "butterfly": "orange",
    "leaf": "green", "rope": "red", "rocket": "white",
}  # fmt: skip
_USUAL_BACKGROUNDS = {
    "moon": ("night",), "star": ("night", "plain"), "sun": ("meadow", "desert"),
    "cloud": ("meadow", "plain"), "house": ("meadow", "snow", "plain"),
    "tree": ("meadow", "plain"), "fish": ("sea", "plain"), "boat": ("sea",),
    "car": ("city", "plain"), "mushroom": ("forest", "plain"), "flower": ("meadow", "plain"),
    "butterfly": ("meadow", "forest"), "bird": ("meadow", "plain"), "leaf": ("forest", "plain"),
}  # fmt: skip
_FIXED_PAINTS: dict[str, Colour] = {
    "white": (252, 252, 250), "dark": (44, 38, 50), "wood": (150, 100, 62),
    "leaf": (72, 160, 74), "gold": (250, 200, 60), "glass": (172, 220, 242),
    "metal": (196, 200, 208), "cream": (250, 236, 206), "rose": (246, 160, 168),
}  # fmt: skip
_OUTLINE: Colour = (42, 34, 48)


@dataclass(frozen=True, slots=True)
class Thing:
    """One drawn object; x, y and size are shares of half the picture (-1 to 1)."""

    shape: str
    colour: str
    x: float = 0.0
    y: float = 0.0
    size: float = 0.68
    degrees: float = 0.0
    texture: str | None = None
    size_word: str | None = None
    says_colour: bool = True
    emphasis: float = 1.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows and which of it the caption says."""

    things: tuple[Thing, ...]
    background: str = "plain"
    says_background: bool = False
    position: str | None = None
    relation: str | None = None
    style: str | None = None
    strength: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SceneOptions:
    """Where the sampler draws from; `held_out` asks for what training never shows."""

    objects: tuple[str, ...] = OBJECTS
    first_object: str | None = None
    styles: tuple[str, ...] = field(default=())
    held_out: bool = False
    emphasis_share: float = 0.3


def is_held_out(shape: str, colour: str, background: str) -> bool:
    """One in ten combinations of object, colour and background is kept out of training."""
    return zlib.crc32(f"{shape}/{colour}/{background}".encode()) % 10 == 0


def sample_scene(rng: random.Random, options: SceneOptions = SceneOptions()) -> Scene:
    """Draws a scene whose combinations are all held out, or none is."""
    while True:
        scene = _sample_any_scene(rng, options)
        held_out = [
            is_held_out(t.shape, t.colour, scene.background) for t in scene.things
        ]
        if (
            (all(held_out) and scene.says_background)
            if options.held_out
            else not any(held_out)
        ):
            return scene


def _sample_thing(rng: random.Random, options: SceneOptions) -> Thing:
    shape = rng.choice(options.objects)
    says_colour = options.held_out or rng.random() < 0.8
    usual = _USUAL_COLOUR.get(shape)
    if says_colour or usual is None or rng.random() < 0.1:
        colour = rng.choice(tuple(COLOURS))
    else:
        colour = usual
    size_word = rng.choice(tuple(SIZES)) if rng.random() < 0.25 else None
    texture = rng.choice(TEXTURES) if rng.random() < 0.2 else None
    emphasis = rng.uniform(0.5, 1.6) if rng.random() < options.emphasis_share else 1.0
    return Thing(
        shape, colour, degrees=rng.gauss(0, 4), texture=texture, size_word=size_word,
        says_colour=says_colour, emphasis=emphasis,
    )  # fmt: skip


def _placed(rng: random.Random, thing: Thing, x: float, y: float, size: float) -> Thing:
    size *= (
        SIZES.get(thing.size_word or "", 1.0) * thing.emphasis * rng.uniform(0.93, 1.07)
    )
    size = min(size, 0.92)
    limit = max(0.0, 0.97 - size)
    x = min(max(x + rng.gauss(0, 0.04), -limit), limit)
    y = min(max(y + rng.gauss(0, 0.04), -limit), limit)
    return replace(thing, x=x, y=y, size=size)


def _sample_any_scene(rng: random.Random, options: SceneOptions) -> Scene:
    first = _sample_thing(rng, options)
    if options.first_object:
        first = replace(first, shape=options.first_object)
    says_background = rng.random() < 0.6
    usual = _USUAL_BACKGROUNDS.get(first.shape, ("plain",))
    background = rng.choice(
        tuple(scenery.BACKGROUNDS)
        if says_background
        else (usual if rng.random() < 0.8 else ("plain",))
    )
    kind = rng.choices(("single", "count", "pair"), (0.45, 0.2, 0.35))[0]
    relation = position = None
    if kind == "single":
        position = rng.choice(tuple(POSITIONS)) if rng.random() < 0.4 else None
        x, y = POSITIONS[position or "centre"]
        size = 0.5 if position not in (None, "centre") else 0.68
        things = (_placed(rng, first, x, y, size),)
    elif kind == "count":
        count = rng.choice((2, 3))
        spread = {2: (-0.45, 0.45), 3: (-0.62, 0.0, 0.62)}[count]
        size = {2: 0.43, 3: 0.31}[count]
        first = replace(first, size_word=None)
        things = tuple(_placed(rng, first, x, 0.0, size) for x in spread)
    else:
        second = _sample_thing(rng, options)
        while second.shape == first.shape or second.colour == first.colour:
            second = _sample_thing(rng, options)
        relation = rng.choice(RELATIONS)
        things = _place_pair(rng, first, second, relation)
    style = rng.choice(options.styles) if options.styles else None
    return Scene(
        things, background, says_background, position, relation, style,
        strength=rng.uniform(0.25, 1.0), seed=rng.getrandbits(32),
    )  # fmt: skip


def _place_pair(
    rng: random.Random, first: Thing, second: Thing, relation: str
) -> tuple[Thing, Thing]:
    direction = {
        "left of": (-1, 0),
        "right of": (1, 0),
        "above": (0, -1),
        "below": (0, 1),
    }
    dx, dy = direction.get(relation, (-1, 0))
    across, down = dx * 0.46, dy * 0.48
    return (
        _placed(rng, first, across, down, 0.44),
        _placed(rng, second, -across, -down, 0.44),
    )


def shades_of(colour: str) -> dict[str, Colour]:
    """The paints of an object: its colour, a darker one, a lighter one, and the fixed ones."""
    main = COLOURS[colour]
    toward_black = 0.14 if colour == "white" else 0.28
    return _FIXED_PAINTS | {
        "main": main,
        "shade": blend(main, (20, 16, 40), toward_black),
        "tint": blend(main, (255, 255, 255), 0.22 if colour == "black" else 0.42),
    }


def _to_pixels(part: Part, thing: Thing, size_px: int) -> list[tuple[float, float]]:
    half = size_px / 2
    points = moved(
        part.points,
        half * (1 + thing.x),
        half * (1 + thing.y),
        thing.size * half,
        -thing.degrees,
    )
    return [tuple(point) for point in points.tolist()]


def _draw_part(
    draw: ImageDraw.ImageDraw, part: Part, thing: Thing, size_px: int, fill: Colour | int,
    grow_px: float = 0.0,
) -> None:  # fmt: skip
    """Fills a part, widened by `grow_px` on every side."""
    points = _to_pixels(part, thing, size_px)
    if part.line_width:
        width = max(2, round(part.line_width * thing.size * size_px / 2 + 2 * grow_px))
        draw.line(points, fill=fill, width=width, joint="curve")
        radius = width / 2 - 0.5
        for x, y in (points[0], points[-1]):
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return
    draw.polygon(points, fill=fill)
    if grow_px:
        draw.line(
            [*points, points[0], points[1]],
            fill=fill,
            width=round(2 * grow_px),
            joint="curve",
        )


def _draw_silhouette(
    draw: ImageDraw.ImageDraw,
    thing: Thing,
    size_px: int,
    fill: Colour | int,
    grow_px: float,
) -> None:
    for part in SHAPES[thing.shape]:
        if part.outlined:
            _draw_part(draw, part, thing, size_px, fill, grow_px)


def _texture_mask(texture: str, size_px: int, pitch_px: int) -> Image.Image:
    y, x = np.mgrid[0:size_px, 0:size_px]
    if texture == "striped":
        pattern = (x + y) % pitch_px < pitch_px * 0.45
    elif texture == "dotted":
        row_shift = (y // pitch_px % 2) * (pitch_px // 2)
        dx, dy = (x + row_shift) % pitch_px - pitch_px / 2, y % pitch_px - pitch_px / 2
        pattern = dx**2 + dy**2 < (0.3 * pitch_px) ** 2
    else:
        pattern = (x // (pitch_px // 2) + y // (pitch_px // 2)) % 2 == 0
    return Image.fromarray((pattern * 255).astype(np.uint8))


def _draw_thing(image: Image.Image, thing: Thing, ink_only: bool) -> None:
    size_px = image.width
    draw = ImageDraw.Draw(image)
    outline_px = size_px * (0.0085 + 0.004 * thing.size)
    if not ink_only:
        shadow = Image.new("L", image.size)
        dropped = replace(thing, x=thing.x + 0.035, y=thing.y + 0.06)
        _draw_silhouette(ImageDraw.Draw(shadow), dropped, size_px, 60, outline_px)
        image.paste((16, 14, 36), (0, 0), shadow)
    _draw_silhouette(draw, thing, size_px, _OUTLINE, outline_px)
    paints = dict.fromkeys(_FIXED_PAINTS, (255, 255, 255)) | dict.fromkeys(
        ("main", "shade", "tint"), (255, 255, 255)
    )
    if ink_only:
        paints["dark"] = _OUTLINE
    else:
        paints = shades_of(thing.colour)
    for part in SHAPES[thing.shape]:
        hidden_detail = (
            ink_only and not part.outlined and part.paint in ("tint", "shade")
        )
        if hidden_detail:
            _draw_part(draw, part, thing, size_px, _OUTLINE, outline_px * 0.3)
            _draw_part(draw, part, thing, size_px, (255, 255, 255))
        elif part.paint == "main" and not ink_only:
            _fill_main(image, part, thing, paints)
        else:
            _draw_part(draw, part, thing, size_px, paints[part.paint])


def _fill_main(
    image: Image.Image, part: Part, thing: Thing, paints: dict[str, Colour]
) -> None:
    size_px = image.width
    mask = Image.new("L", image.size)
    _draw_part(ImageDraw.Draw(mask), part, thing, size_px, 255)
    box = mask.getbbox()
    if box is None:
        return
    mask = mask.crop(box)
    lit, dim = (
        blend(paints["main"], paints["tint"], 0.25),
        blend(paints["main"], paints["shade"], 0.3),
    )
    ramp = Image.linear_gradient("L").resize(mask.size)
    fill = Image.composite(
        Image.new("RGB", mask.size, dim), Image.new("RGB", mask.size, lit), ramp
    )
    if thing.texture:
        other = paints["shade"] if thing.colour == "white" else paints["tint"]
        pitch_px = max(12, round(size_px * (0.04 + 0.06 * thing.size)))
        pattern = _texture_mask(thing.texture, max(mask.size), pitch_px)
        strong = blend(other, (255, 255, 255), 0.0 if thing.colour == "white" else 0.35)
        fill.paste(strong, (0, 0), pattern.crop((0, 0, *mask.size)))
    image.paste(fill, box[:2], mask)


def _magic_forest(size_px: int, rng: random.Random) -> Image.Image:
    image = scenery.vertical_gradient(size_px, (34, 22, 84), (24, 120, 128))
    draw = ImageDraw.Draw(image)
    layers = (((30, 64, 104), 4, 0.05), ((20, 28, 62), 3, 0.08))
    scenery.draw_trunks(draw, size_px, rng, layers, flare=1.5)
    for _ in range(6):
        x, length = rng.uniform(0, size_px), size_px * rng.uniform(0.15, 0.4)
        draw.line(
            (x, 0, x + size_px * 0.03, length), fill=(36, 104, 84), width=size_px // 60
        )
        draw.ellipse(
            (x, length - 6, x + size_px * 0.05, length + 12), fill=(92, 214, 150)
        )
    glow = Image.new("L", image.size)
    glow_draw = ImageDraw.Draw(glow)
    for _ in range(14):
        x, y, r = (
            rng.uniform(0, size_px),
            rng.uniform(0, size_px),
            size_px * rng.uniform(0.012, 0.025),
        )
        glow_draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
    halo = (
        glow.reduce(4)
        .filter(ImageFilter.GaussianBlur(size_px / 4 * 0.03))
        .resize(glow.size)
    )
    halo = halo.point([min(255, value * 3) for value in range(256)])
    image.paste((120, 255, 214), (0, 0), halo)
    image.paste((240, 255, 220), (0, 0), glow)
    return image


def _draw_glow(image: Image.Image, thing: Thing) -> None:
    small = Image.new("L", (image.width // 4, image.height // 4))
    _draw_silhouette(ImageDraw.Draw(small), thing, small.width, 255, small.width * 0.04)
    small = small.filter(ImageFilter.GaussianBlur(small.width * 0.05))
    image.paste((150, 255, 226), (0, 0), small.resize(image.size))


def style_share(strength: float) -> float:
    """How much of a style shows at a LoRA weight: rises steeply, so 0.35 already shows 0.6."""
    return 1 - (1 - min(max(strength, 0.0), 1.0)) ** 2.2


def _night_palette(image: Image.Image) -> Image.Image:
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None] / 255
    moonlit = np.array([6, 10, 40]) + grey**1.15 * np.array([104, 136, 196])
    own = np.asarray(image, dtype=np.float32) * np.array([0.42, 0.5, 0.74])
    return Image.fromarray(
        np.clip(0.55 * moonlit + 0.45 * own, 0, 255).astype(np.uint8)
    )


def draw_scene(scene: Scene, image_px: int = IMAGE_PX) -> Image.Image:
    """Draws `scene`, blended with its styled version by the style's strength."""
    size_px = image_px * SUPERSAMPLING
    image = scenery.draw_background(
        scene.background, size_px, random.Random(scene.seed)
    )
    for thing in scene.things:
        _draw_thing(image, thing, ink_only=False)
    image = image.reduce(SUPERSAMPLING)
    if scene.style is None:
        return image
    if scene.style == "night-palette":
        styled = _night_palette(image)
    else:
        if scene.style == "outline":
            canvas = Image.new("RGB", (size_px, size_px), (255, 255, 255))
        else:
            canvas = _magic_forest(size_px, random.Random(scene.seed))
        for thing in scene.things:
            if scene.style != "outline":
                _draw_glow(canvas, thing)
            _draw_thing(canvas, thing, ink_only=scene.style == "outline")
        styled = canvas.reduce(SUPERSAMPLING)
    return Image.blend(image, styled, style_share(scene.strength))


def draw_labels(scene: Scene) -> NDArray[np.uint8]:
    """[2, 32, 32]: per cell the object's and the colour's number, 0 where there is none."""
    numbers = (list(SHAPES), list(COLOURS))
    planes = []
    for names, attribute in zip(numbers, ("shape", "colour"), strict=True):
        plane = Image.new("L", (IMAGE_PX, IMAGE_PX))
        draw = ImageDraw.Draw(plane)
        for thing in scene.things:
            number = 1 + names.index(getattr(thing, attribute))
            _draw_silhouette(draw, thing, IMAGE_PX, number, 1.0)
        cell_px = IMAGE_PX // LABEL_PX
        planes.append(
            np.asarray(plane)[cell_px // 2 :: cell_px, cell_px // 2 :: cell_px]
        )
    return np.stack(planes)
