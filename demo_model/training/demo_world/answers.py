"""Whether a picture shows what its caption asks for, by what the judge finds in it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from demo_world.world import Scene
from evaluation.score.demo.judge import IMAGE_PX, Judge

#: Cells of a picture, each way.
CELLS = 32

#: Fewer cells than this (of 32x32) are taken for a stray mark, not for an object.
LEAST_CELLS = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of object in a picture; x and y run from -1 to 1, area is a share of the picture."""

    shape: str
    colour: str
    x: float
    y: float
    area: float


@torch.no_grad()
def find(judge: Judge, images: Tensor) -> list[list[Finding]]:
    """What each picture shows, largest first."""
    object_logits, colour_logits = judge(_at_native_size(images))
    cell_objects = object_logits.argmax(1)
    grid = (torch.arange(CELLS, device=images.device) + 0.5) / CELLS * 2 - 1
    pictures = []
    for cells, colours in zip(cell_objects, colour_logits.log_softmax(1), strict=True):
        findings = []
        for number, shape in enumerate(judge.shapes, start=1):
            mask = cells == number
            count = int(mask.sum())
            if count < LEAST_CELLS:
                continue
            colour = judge.colours[int(colours[:, mask].sum(1).argmax())]
            x = float((mask.sum(0) * grid).sum()) / count
            y = float((mask.sum(1) * grid).sum()) / count
            findings.append(Finding(shape, colour, x, y, count / CELLS**2))
        pictures.append(sorted(findings, key=lambda finding: -finding.area))
    return pictures


@torch.no_grad()
def object_scores(judge: Judge, images: Tensor) -> Tensor:
    """[B, objects]: the share of the picture that the judge gives to each object, 0 to 1."""
    object_logits, _ = judge(_at_native_size(images))
    shares: Tensor = object_logits.softmax(1)[:, 1:].mean((2, 3))
    return shares


def _at_native_size(images: Tensor) -> Tensor:
    if images.shape[-2:] == (IMAGE_PX, IMAGE_PX):
        return images.float()
    return functional.interpolate(images.float(), (IMAGE_PX, IMAGE_PX), mode="area")


def objects_right(scene: Scene, findings: list[Finding]) -> bool:
    """The picture's largest objects are those of the scene."""
    wanted = {thing.shape for thing in scene.things}
    return wanted == {finding.shape for finding in findings[: len(wanted)]}


def colours_right(scene: Scene, findings: list[Finding]) -> bool:
    """Each named object that was found has its colour, and at least one was found."""
    wanted = {thing.shape: thing.colour for thing in scene.things}
    found = {f.shape: f.colour for f in findings if f.shape in wanted}
    return bool(found) and all(
        wanted[shape] == colour for shape, colour in found.items()
    )


def places_right(scene: Scene, findings: list[Finding]) -> bool | None:
    """True if the caption's position or relation holds; None if it states none."""
    found = {finding.shape: finding for finding in findings}
    first = found.get(scene.things[0].shape)
    if scene.relation not in (None, "and"):
        second = found.get(scene.things[1].shape)
        if first is None or second is None:
            return False
        return {
            "left of": first.x < second.x, "right of": first.x > second.x,
            "above": first.y < second.y, "below": first.y > second.y,
        }[scene.relation]  # fmt: skip
    if scene.position is None:
        return None
    if first is None:
        return False
    return {
        "left": first.x < -0.2, "right": first.x > 0.2, "top": first.y < -0.2,
        "bottom": first.y > 0.2, "centre": abs(first.x) < 0.25 and abs(first.y) < 0.25,
    }[scene.position]  # fmt: skip


def both_right(scene: Scene, findings: list[Finding]) -> bool:
    return objects_right(scene, findings) and colours_right(scene, findings)


def share(answers: list[bool]) -> float:
    return round(sum(answers) / max(1, len(answers)), 4)
