"""Whether a picture shows what its caption asks for, by what the judge finds in it."""

from __future__ import annotations

from demo_world.world import Scene
from evaluation.score.demo.judge import Finding


def objects_right(scene: Scene, findings: list[Finding]) -> bool:
    """The picture's largest objects are those of the scene."""
    wanted = {thing.shape for thing in scene.things}
    return wanted == {finding.shape for finding in findings[: len(wanted)]}


def colours_right(scene: Scene, findings: list[Finding]) -> bool:
    """Each named object that was found has its colour, and at least one was found."""
    wanted = {thing.shape: thing.colour for thing in scene.things}
    found = {f.shape: f.colour for f in findings if f.shape in wanted}
    return bool(found) and all(wanted[shape] == colour for shape, colour in found.items())


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
