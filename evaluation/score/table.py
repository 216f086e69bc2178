"""The table of scores, a row for each group."""

from __future__ import annotations

from rich.table import Table

from fleet import console
from imagefleet.scoring.scores import GroupScores, Scores

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
