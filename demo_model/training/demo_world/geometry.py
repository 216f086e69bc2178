"""Outlines of simple shapes as point lists in a unit box (x to the right, y down, -1 to 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """One filled polygon, or a thick line where `line_width` is above 0.

    `paint` names a colour relative to the object ("main", "shade", "tint") or a fixed one;
    `outlined` parts together make the object's silhouette.
    """

    points: Points
    paint: str = "main"
    outlined: bool = True
    line_width: float = 0.0


def polygon(*corners: tuple[float, float]) -> Points:
    return np.array(corners, dtype=np.float64)


def ellipse(
    x: float, y: float, radius_x: float, radius_y: float | None = None, points: int = 36
) -> Points:
    return arc(
        x, y, radius_x, radius_x if radius_y is None else radius_y, 0, 360, points
    )


def arc(
    x: float,
    y: float,
    radius_x: float,
    radius_y: float,
    start_degrees: float,
    end_degrees: float,
    points: int = 24,
) -> Points:
    """Points along an ellipse, clockwise on the screen from `start_degrees` (0 = right)."""
    full_turn = abs(end_degrees - start_degrees) >= 360
    angles = np.radians(
        np.linspace(start_degrees, end_degrees, points, endpoint=not full_turn)
    )
    return np.stack(
        [x + radius_x * np.cos(angles), y + radius_y * np.sin(angles)], axis=1
    )


def rectangle(left: float, top: float, right: float, bottom: float) -> Points:
    return polygon((left, top), (right, top), (right, bottom), (left, bottom))


def rounded_rectangle(
    left: float, top: float, right: float, bottom: float, radius: float
) -> Points:
    corners = (
        (right - radius, top + radius, -90),
        (right - radius, bottom - radius, 0),
        (left + radius, bottom - radius, 90),
        (left + radius, top + radius, 180),
    )
    return np.concatenate(
        [arc(x, y, radius, radius, start, start + 90, 7) for x, y, start in corners]
    )


def regular_star(points: int, outer: float, inner: float, y: float = 0.0) -> Points:
    angles = -math.pi / 2 + np.arange(2 * points) * math.pi / points
    radii = np.where(np.arange(2 * points) % 2 == 0, outer, inner)
    return np.stack([radii * np.cos(angles), y + radii * np.sin(angles)], axis=1)


def smooth(
    corners: Sequence[tuple[float, float]], closed: bool = True, steps: int = 6
) -> Points:
    """A Catmull-Rom curve through `corners`."""
    anchors = np.array(corners, dtype=np.float64)
    if closed:
        padded = np.concatenate([anchors[-1:], anchors, anchors[:2]])
    else:
        padded = np.concatenate([anchors[:1], anchors, anchors[-1:]])
    t = np.linspace(0, 1, steps, endpoint=False)[:, None]
    pieces = []
    for before, start, end, after in zip(
        padded[:-3], padded[1:-2], padded[2:-1], padded[3:], strict=True
    ):
        pieces.append(
            0.5
            * (
                2 * start
                + (end - before) * t
                + (2 * before - 5 * start + 4 * end - after) * t**2
                + (3 * start - before - 3 * end + after) * t**3
            )
        )
    if not closed:
        pieces.append(anchors[-1:])
    return np.concatenate(pieces)


def mirrored(points: Points) -> Points:
    return points * np.array([-1.0, 1.0])


def symmetric(right_half: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Adds the mirror image of a half that is listed from top to bottom, from the bottom up."""
    left_half = [(-x, y) for x, y in reversed(right_half) if abs(x) > 1e-9]
    return [*right_half, *left_half]


def moved(
    points: Points, x: float, y: float, scale: float = 1.0, degrees: float = 0.0
) -> Points:
    angle = math.radians(degrees)
    rotation = np.array(
        [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    )
    return points * scale @ rotation + np.array([x, y])
