"""Scores for people: a row for each group, and what the figures depend on."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from evaluation.score.scores import GroupScores, Scores
from fleet import console

#: Facts of a group that differ in one sweep and not in another.
_VARIED = ("sampler", "steps", "model", "lora", "lora_strength")


def table(scores: Scores) -> Table:
    """The figures by group, with those of its facts that differ from group to group."""
    varied = [name for name in _VARIED if len({getattr(g, name) for g in scores.groups}) > 1]
    rows = console.table(
        console.name_column("group"),
        console.number_column("guidance"),
        *map(console.name_column, (name.replace("_", " ") for name in varied)),
        *map(console.number_column, ("images", "FID", "KID", "CLIP", "CMMD")),
    )
    for group in scores.groups:
        facts = (
            "" if getattr(group, name) is None else str(getattr(group, name)) for name in varied
        )
        rows.add_row(
            console.untrusted(group.group),
            "-" if group.cfg_scale is None else f"{group.cfg_scale:g}",
            *map(console.untrusted, facts),
            f"{group.images:,}",
            *_figures(group),
        )
    return rows


def _figures(group: GroupScores) -> tuple[str, ...]:
    return (
        console.number(group.fid, 3),
        console.number(group.kid, 5),
        console.number(group.clip, 3),
        console.number(group.cmmd, 4),
    )


def facts(scores: Scores) -> dict[str, str]:
    """What the figures depend on."""
    found = {}
    if scores.reference is not None:
        count = scores.reference_images
        images = "" if count is None else f", {console.counted(count, 'image')}"
        found["reference"] = f"{scores.reference}{images}"
    if scores.extractor:
        found["FID, KID"] = _extractor(scores.extractor)
    if scores.clip_extractor:
        found["CLIP, CMMD"] = _extractor(scores.clip_extractor)
    return found


def _extractor(facts: dict[str, Any]) -> str:
    return (
        f"{facts['name']} ({facts['kind']}, {facts['dimensions']:,} features), {facts['size']}"
        f" pixels, {facts['resize']}; SHA-256 {facts['sha256']}"
    )
