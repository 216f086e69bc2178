"""The objects of the drawn world: each is a short list of parts in a unit box."""

from collections.abc import Callable

import numpy as np

from demo_world.geometry import (
    Part,
    arc,
    ellipse,
    mirrored,
    moved,
    polygon,
    rectangle,
    regular_star,
    rounded_rectangle,
    smooth,
    symmetric,
)


def _circle() -> list[Part]:
    return [
        Part(ellipse(0, 0, 0.9)),
        Part(
            moved(ellipse(0, 0, 0.24, 0.13), -0.38, -0.45, degrees=-40), "tint", False
        ),
    ]


def _square() -> list[Part]:
    return [
        Part(rounded_rectangle(-0.8, -0.8, 0.8, 0.8, 0.12)),
        Part(rounded_rectangle(-0.64, -0.66, 0.2, -0.5, 0.06), "tint", False),
    ]


def _triangle() -> list[Part]:
    return [
        Part(polygon((0, -0.88), (0.95, 0.75), (-0.95, 0.75))),
        Part(
            polygon((-0.02, -0.5), (0.1, -0.32), (-0.4, 0.5), (-0.6, 0.5)),
            "tint",
            False,
        ),
    ]


def _star() -> list[Part]:
    return [
        Part(regular_star(5, 1.0, 0.46, y=0.06)),
        Part(regular_star(5, 0.42, 0.2, y=0.06), "tint", False),
    ]


def _heart() -> list[Part]:
    right = [
        (0, -0.42),
        (0.22, -0.74),
        (0.55, -0.82),
        (0.88, -0.58),
        (0.92, -0.18),
        (0.62, 0.32),
    ]
    return [
        Part(smooth(symmetric([*right, (0, 0.9)]))),
        Part(moved(ellipse(0, 0, 0.2, 0.11), -0.5, -0.45, degrees=-40), "tint", False),
    ]


def _moon() -> list[Part]:
    crescent = np.concatenate(
        [arc(-0.05, 0, 0.92, 0.92, 50, 310, 34), arc(0.36, 0, 0.6, 0.71, 270, 90, 26)]
    )
    craters = ((-0.66, 0.1, 0.11), (-0.4, 0.55, 0.09), (-0.48, -0.42, 0.1))
    return [Part(crescent)] + [
        Part(ellipse(x, y, r), "shade", False) for x, y, r in craters
    ]


def _sun() -> list[Part]:
    rays = [
        Part(
            moved(polygon((-0.13, -0.6), (0, -0.98), (0.13, -0.6)), 0, 0, degrees=angle)
        )
        for angle in range(0, 360, 36)
    ]
    return [
        *rays,
        Part(ellipse(0, 0, 0.56)),
        Part(ellipse(-0.12, -0.14, 0.26), "tint", False),
    ]


def _cloud() -> list[Part]:
    puffs = (
        (-0.52, 0.2, 0.38),
        (-0.12, -0.16, 0.48),
        (0.36, -0.02, 0.4),
        (0.62, 0.26, 0.32),
    )
    return [
        *(Part(ellipse(x, y, r)) for x, y, r in puffs),
        Part(rounded_rectangle(-0.86, 0.12, 0.92, 0.58, 0.22)),
        Part(ellipse(-0.2, -0.3, 0.22, 0.14), "tint", False),
    ]


def _house() -> list[Part]:
    return [
        Part(rectangle(0.36, -0.78, 0.58, -0.2), "shade"),
        Part(rectangle(-0.66, -0.12, 0.66, 0.9)),
        Part(polygon((0, -0.95), (0.95, -0.08), (-0.95, -0.08)), "shade"),
        Part(rounded_rectangle(-0.16, 0.34, 0.2, 0.9, 0.06), "wood", False),
        Part(rectangle(-0.54, 0.1, -0.26, 0.4), "glass", False),
        Part(rectangle(0.3, 0.1, 0.56, 0.4), "glass", False),
    ]


def _tree() -> list[Part]:
    puffs = (
        (-0.42, -0.08, 0.42),
        (0.42, -0.08, 0.42),
        (0, -0.44, 0.5),
        (0, 0.02, 0.42),
    )
    return [
        Part(polygon((-0.15, 0.95), (-0.11, 0.1), (0.11, 0.1), (0.15, 0.95)), "wood"),
        *(Part(ellipse(x, y, r)) for x, y, r in puffs),
        Part(ellipse(-0.2, -0.52, 0.2, 0.15), "tint", False),
        Part(ellipse(0.3, 0.06, 0.16, 0.11), "shade", False),
    ]


def _fish() -> list[Part]:
    back = [(-0.95, 0.05), (-0.5, -0.42), (0.05, -0.48), (0.5, -0.12)]
    belly = [(0.5, 0.16), (0.05, 0.5), (-0.5, 0.44)]
    tail = smooth([(0.36, 0.02), (0.92, -0.5), (0.8, 0.02), (0.92, 0.52)])
    return [
        Part(tail, "shade"),
        Part(polygon((-0.3, -0.36), (0.05, -0.8), (0.3, -0.3)), "shade"),
        Part(smooth([*back, *belly])),
        Part(polygon((-0.02, 0.08), (0.3, 0.3), (-0.02, 0.36)), "shade", False),
        Part(ellipse(-0.56, -0.1, 0.15), "white", False),
        Part(ellipse(-0.59, -0.1, 0.08), "dark", False),
    ]


def _flower() -> list[Part]:
    petals = [
        Part(moved(ellipse(0, -0.34, 0.21, 0.27), 0, -0.3, degrees=angle))
        for angle in range(0, 360, 60)
    ]
    leaf = smooth([(0.04, 0.75), (0.3, 0.4), (0.62, 0.36), (0.44, 0.66)])
    return [
        Part(polygon((0, -0.2), (0, 0.95)), "leaf", True, 0.13),
        Part(leaf, "leaf"),
        Part(moved(mirrored(leaf), 0, 0.1), "leaf"),
        *petals,
        Part(ellipse(0, -0.3, 0.22), "gold", False),
    ]


def _boat() -> list[Part]:
    return [
        Part(rectangle(-0.05, -0.92, 0.05, 0.4), "wood"),
        Part(
            smooth([(0.05, -0.88), (0.5, -0.4), (0.76, 0.2), (0.05, 0.22)], steps=4),
            "white",
        ),
        Part(polygon((-0.07, -0.7), (-0.07, 0.22), (-0.66, 0.22)), "tint"),
        Part(
            smooth([(-0.95, 0.36), (0.95, 0.36), (0.64, 0.84), (-0.64, 0.84)], steps=4)
        ),
        Part(rectangle(-0.78, 0.44, 0.78, 0.53), "white", False),
    ]


def _car() -> list[Part]:
    cabin = polygon((-0.52, -0.06), (-0.32, -0.52), (0.3, -0.52), (0.6, -0.06))
    wheels = [
        Part(ellipse(x, 0.46, radius), paint, outlined)
        for x in (-0.5, 0.5)
        for radius, paint, outlined in ((0.25, "dark", True), (0.11, "metal", False))
    ]
    return [
        Part(cabin),
        Part(rounded_rectangle(-0.96, -0.12, 0.96, 0.46, 0.2)),
        Part(
            polygon((-0.4, -0.08), (-0.26, -0.42), (-0.03, -0.42), (-0.03, -0.08)),
            "glass",
            False,
        ),
        Part(
            polygon((0.07, -0.08), (0.07, -0.42), (0.26, -0.42), (0.46, -0.08)),
            "glass",
            False,
        ),
        Part(ellipse(0.84, 0.08, 0.09), "gold", False),
        *wheels,
    ]


def _mushroom() -> list[Part]:
    cap = np.concatenate(
        [arc(0, 0.06, 0.92, 0.92, 180, 360), arc(0, 0.06, 0.92, 0.2, 0, 180)]
    )
    spots = (
        (-0.45, -0.22, 0.15),
        (0.08, -0.5, 0.19),
        (0.5, -0.14, 0.14),
        (-0.02, 0.04, 0.1),
    )
    return [
        Part(
            smooth([(-0.26, 0.1), (0.26, 0.1), (0.36, 0.8), (0, 0.92), (-0.36, 0.8)]),
            "cream",
        ),
        Part(cap),
        *(Part(ellipse(x, y, r, r * 0.85), "white", False) for x, y, r in spots),
    ]


def _cup() -> list[Part]:
    rim, foot = [(-0.72, -0.46), (0.6, -0.46)], [(0.3, 0.78), (-0.42, 0.78)]
    return [
        Part(arc(0.55, 0.06, 0.34, 0.34, -100, 100), "main", True, 0.15),
        Part(smooth([*rim, (0.54, 0.5), *foot, (-0.66, 0.5)], steps=5)),
        Part(ellipse(-0.06, -0.46, 0.66, 0.2), "tint"),
        Part(ellipse(-0.06, -0.43, 0.54, 0.13), "wood", False),
    ]


def _apple() -> list[Part]:
    right = [
        (0, -0.36),
        (0.34, -0.54),
        (0.72, -0.4),
        (0.88, 0.04),
        (0.68, 0.58),
        (0.32, 0.88),
    ]
    return [
        Part(polygon((0, -0.38), (0.1, -0.86)), "wood", True, 0.12),
        Part(smooth([(0.1, -0.62), (0.36, -0.92), (0.7, -0.86), (0.46, -0.6)]), "leaf"),
        Part(smooth(symmetric([*right, (0, 0.78)]))),
        Part(
            moved(ellipse(0, 0, 0.24, 0.12), -0.46, -0.12, degrees=-60), "tint", False
        ),
    ]


def _cat() -> list[Part]:
    ear = polygon((-0.78, -0.92), (-0.72, -0.1), (-0.14, -0.5))
    inner_ear = polygon((-0.68, -0.72), (-0.62, -0.36), (-0.36, -0.52))
    eye = ellipse(-0.32, 0.02, 0.13, 0.17)
    pupil = ellipse(-0.32, 0.04, 0.06, 0.13)
    whiskers = [
        Part(polygon((side * 0.4, y), (side * 0.92, y + slope)), "dark", False, 0.04)
        for side in (-1, 1)
        for y, slope in ((0.36, -0.08), (0.46, 0.06))
    ]
    return [
        Part(ear),
        Part(mirrored(ear)),
        Part(ellipse(0, 0.14, 0.84, 0.74)),
        Part(inner_ear, "rose", False),
        Part(mirrored(inner_ear), "rose", False),
        *(Part(shape, "white", False) for shape in (eye, mirrored(eye))),
        *(Part(shape, "dark", False) for shape in (pupil, mirrored(pupil))),
        Part(polygon((-0.1, 0.28), (0.1, 0.28), (0, 0.4)), "rose", False),
        *whiskers,
    ]


def _bird() -> list[Part]:
    back = [(-0.5, -0.5), (-0.15, -0.6), (0.1, -0.25), (0.6, 0.05)]
    belly = [(0.5, 0.42), (0.05, 0.62), (-0.45, 0.42), (-0.66, -0.1)]
    return [
        Part(polygon((-0.56, -0.38), (-0.98, -0.2), (-0.58, -0.08)), "gold"),
        Part(polygon((0.38, 0.06), (0.98, -0.2), (0.9, 0.16), (0.46, 0.4)), "shade"),
        *(Part(polygon((x, 0.5), (x, 0.9)), "gold", True, 0.09) for x in (-0.12, 0.16)),
        Part(smooth([*back, *belly])),
        Part(
            smooth([(-0.22, 0.0), (0.34, 0.02), (0.42, 0.3), (0.02, 0.36)]),
            "shade",
            False,
        ),
        Part(ellipse(-0.4, -0.26, 0.12), "white", False),
        Part(ellipse(-0.43, -0.26, 0.065), "dark", False),
    ]


def _umbrella() -> list[Part]:
    canopy = np.concatenate(
        [arc(0, 0.06, 0.95, 0.9, 180, 360)]
        + [arc(x, 0.06, 0.19, 0.12, 0, -180, 8) for x in (0.76, 0.38, 0, -0.38, -0.76)]
    )
    handle = np.concatenate(
        [polygon((0, -0.05), (0, 0.74)), arc(0.15, 0.74, 0.15, 0.15, 180, 20, 8)]
    )
    return [
        Part(polygon((0, -0.96), (0, -0.8)), "wood", True, 0.08),
        Part(handle, "wood", True, 0.1),
        Part(canopy),
        Part(
            np.concatenate(
                [arc(0, 0.06, 0.42, 0.9, 180, 360), polygon((0.19, 0), (-0.19, 0))]
            ),
            "tint",
            False,
        ),
    ]


def _balloon() -> list[Part]:
    string = smooth([(0, 0.5), (0.1, 0.66), (-0.08, 0.82), (0.04, 0.98)], closed=False)
    right = [(0, -0.98), (0.5, -0.78), (0.66, -0.32), (0.42, 0.16), (0, 0.42)]
    return [
        Part(string, "dark", False, 0.05),
        Part(polygon((0, 0.36), (0.13, 0.56), (-0.13, 0.56)), "shade"),
        Part(smooth(symmetric(right))),
        Part(moved(ellipse(0, 0, 0.22, 0.1), -0.3, -0.56, degrees=-50), "tint", False),
    ]


def _butterfly() -> list[Part]:
    upper = smooth(
        [(0.04, -0.1), (0.3, -0.78), (0.82, -0.84), (0.92, -0.3), (0.5, 0.06)]
    )
    lower = smooth([(0.04, 0.04), (0.5, 0.02), (0.76, 0.36), (0.5, 0.78), (0.16, 0.5)])
    feeler = smooth([(0.02, -0.4), (0.1, -0.7), (0.26, -0.86)], closed=False)
    wings = [Part(wing, "shade") for wing in (lower, mirrored(lower))]
    wings += [Part(wing) for wing in (upper, mirrored(upper))]
    spots = [Part(ellipse(x, -0.5, 0.16), "tint", False) for x in (-0.62, 0.62)]
    feelers = [Part(line, "dark", False, 0.05) for line in (feeler, mirrored(feeler))]
    return [*wings, *spots, *feelers, Part(ellipse(0, 0.02, 0.1, 0.5), "dark")]


def _leaf() -> list[Part]:
    blade = smooth(
        [
            (-0.72, 0.62),
            (-0.72, -0.12),
            (-0.2, -0.66),
            (0.86, -0.86),
            (0.68, 0.2),
            (0.12, 0.7),
        ]
    )
    vein = polygon((-0.62, 0.56), (0.56, -0.58))
    side_veins = [
        Part(polygon((x, -x - 0.04), (x + dx, -x - 0.04 + dy)), "shade", False, 0.06)
        for x in (-0.28, 0.1)
        for dx, dy in ((-0.06, -0.36), (0.36, 0.06))
    ]
    return [
        Part(polygon((-0.62, 0.56), (-0.95, 0.92)), "shade", True, 0.13),
        Part(blade),
        Part(vein, "shade", False, 0.07),
        *side_veins,
    ]


def _rope() -> list[Part]:
    """A jump rope: a crossed loop between two handles."""
    half = [(-0.62, -0.44), (-0.4, -0.04), (0.3, 0.26), (0.66, 0.6), (0.3, 0.88)]
    cord = smooth(symmetric(half), closed=False)
    grip = moved(
        rounded_rectangle(-0.13, -0.34, 0.13, 0.3, 0.1), -0.7, -0.66, degrees=24
    )
    band = moved(rectangle(-0.13, 0.0, 0.13, 0.12), -0.7, -0.66, degrees=24)
    return [
        Part(cord, "main", True, 0.14),
        Part(grip, "wood"),
        Part(mirrored(grip), "wood"),
        Part(band, "gold", False),
        Part(mirrored(band), "gold", False),
    ]


def _rocket() -> list[Part]:
    fin = smooth([(-0.3, 0.14), (-0.72, 0.5), (-0.7, 0.84), (-0.26, 0.56)], steps=4)
    flame = smooth([(-0.2, 0.58), (0.2, 0.58), (0.14, 0.8), (0, 1.02), (-0.14, 0.8)])
    return [
        Part(flame, "gold"),
        Part(fin, "shade"),
        Part(mirrored(fin), "shade"),
        Part(smooth(symmetric([(0, -0.98), (0.3, -0.56), (0.4, 0.0), (0.28, 0.6)]))),
        Part(ellipse(0, -0.2, 0.2), "white", False),
        Part(ellipse(0, -0.2, 0.14), "glass", False),
    ]


_BUILDERS: dict[str, Callable[[], list[Part]]] = {
    "circle": _circle, "square": _square, "triangle": _triangle, "star": _star,
    "heart": _heart, "moon": _moon, "sun": _sun, "cloud": _cloud, "house": _house,
    "tree": _tree, "fish": _fish, "flower": _flower, "boat": _boat, "car": _car,
    "mushroom": _mushroom, "cup": _cup, "apple": _apple, "cat": _cat, "bird": _bird,
    "umbrella": _umbrella, "balloon": _balloon, "butterfly": _butterfly, "leaf": _leaf,
    "rope": _rope, "rocket": _rocket,
}  # fmt: skip

SHAPES: dict[str, list[Part]] = {name: build() for name, build in _BUILDERS.items()}
