"""`imagefleet score`: what a campaign's images are worth, by group of its sweep."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evaluation.score import metrics, session, table
from evaluation.score.extractors import DEMO
from fleet import console, options
from fleet.campaigns import target
from imagefleet import errors
from imagefleet.scoring import curve as drawing
from imagefleet.scoring.scores import Scores, facts
from imagefleet.storage.settings import StorageSettings

#: More only wait for the storage, and each has the networks in memory.
_MOST_PROCESSES = 4

_PART = re.compile(r"([1-9]\d{0,3})/([1-9]\d{0,3})")


@dataclass(frozen=True, slots=True)
class Networks:
    """What the images are compared with, and by which networks."""

    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|STATISTICS",
            help="Pictures to compare with, or an .npz of theirs: of --write-reference, or with"
            " `mu` and `sigma` of pytorch-fid or clean-fid, for FID alone.",
        ),
    ] = None
    extractor: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Network for FID and KID: TorchScript (Inception's, say) or ONNX. `demo`: that of"
            " the demo checkpoint, for all figures.",
        ),
    ] = None
    clip: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="CLIP of transformers or open_clip, for CLIP score and CMMD."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"


@dataclass(frozen=True, slots=True)
class Work:
    """How the features are computed."""

    processes: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="At the same time. [default: the cores, at most 4]"),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Features, to go on after an interruption [default: NAME-score]."
        ),
    ] = None
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Only one of N parts of the features: for several machines, whose folders --state"
            " are then copied into one.",
        ),
    ] = None
    follow: Annotated[bool, typer.Option("--follow", help="Wait until the campaign has ended.")] = (
        False
    )


@options.from_settings(StorageSettings)
@console.one_line_errors()
def command(
    settings: StorageSettings,
    campaign: target.Campaign,
    networks: Networks,
    work: Work,
    write_reference: Annotated[
        Path | None,
        typer.Option(metavar="STATISTICS", help="Write those of the folder --reference."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="SVG", help="Draw FID over the CLIP score.")
    ] = None,
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Scores a campaign's images: FID, KID, CLIP score, CMMD.

    The figures are by group of the sweep that the campaign is; another campaign is one group. What
    was interrupted goes on with the same command, and ends with the same figures to the last digit.
    Exit code 4: images are missing or not as they were recorded; they are left out, and named.

    imagefleet score curve --extractor demo --output curve.svg

    imagefleet score coco --reference val2014 --extractor inception.pt --clip clip-vit-large-patch14
    """
    target.campaign(campaign)
    reference, clip, extractor = networks.reference, networks.clip, networks.extractor
    if extractor == DEMO:
        clip, reference = clip or DEMO, reference or DEMO
    _check(reference, extractor, clip, write_reference)
    for path in (write_reference, output, json_file):
        console.check_writable(path)
    folder = work.state or Path(f"{campaign}-score")
    asked = session.Asked(
        settings,
        campaign,
        reference,
        extractor,
        clip,
        networks.device,
        folder,
        work.processes or min(os.cpu_count() or 1, _MOST_PROCESSES),
        _read_part(work.part),
        write_reference,
        work.follow,
        quiet=as_json,
    )
    with console.only_one(folder, f"{folder} is being scored in"):
        scores = session.run(asked)
    if scores is None:
        return
    _show(scores, output, json_file, as_json=as_json)
    if any(group.left_out for group in scores.groups):
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


def _check(
    reference: str | None, extractor: str | None, clip: str | None, write_reference: Path | None
) -> None:
    """Raises SetupError for options that cannot go together."""
    if extractor is None and clip is None:
        raise errors.SetupError(
            "nothing to score with: give --extractor for FID and KID, --clip for CLIP score and"
            " CMMD, or --extractor demo for the demo checkpoint"
        )
    if extractor is not None and reference is None:
        raise errors.SetupError("FID compares with pictures: give their folder with --reference")
    if write_reference is not None and not (reference and Path(reference).is_dir()):
        raise errors.SetupError("--write-reference needs --reference with a folder of pictures")


def _read_part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    found = _PART.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise errors.SetupError(
            f"--part {text[:20]}: should be K/N, such as 2/3 for the second third"
        )
    return int(found[1]), int(found[2])


def _show(scores: Scores, curve: Path | None, json_file: Path | None, *, as_json: bool) -> None:
    figures = scores.model_dump()
    if json_file is not None:
        console.write_file(json_file, console.json_text(figures))
    if curve is not None:
        drawn = drawing.svg(scores)
        if not drawn:
            raise errors.SetupError(
                "--output needs FID and CLIP score: give --extractor and --clip"
            )
        console.write_file(curve, drawn)
    _warn(scores)
    if as_json:
        console.print_json(figures)
        return
    console.print_tables(table.table(scores))
    console.print_plain("")
    console.print_facts(facts(scores))


def _warn(scores: Scores) -> None:
    if left_out := sum(group.left_out for group in scores.groups):
        names = ", ".join(scores.left_out)
        console.print_error(
            f"{console.counted(left_out, 'image')} missing, not as recorded or no images: {names}"
        )
    if scores.of_no_group:
        console.print_warning(
            f"{console.counted(scores.of_no_group, 'image')} of no group of the sweep left out"
        )
    few = [
        group.group
        for group in scores.groups
        if group.fid is not None and group.images < metrics.KID_SUBSET_SIZE
    ]
    if few:
        console.print_note(
            f"fewer than {metrics.KID_SUBSET_SIZE:,} images in {', '.join(few[:3])}"
            f"{' and others' if len(few) > 3 else ''}: FID is biased upwards, and KID's subsets are"  # noqa: PLR2004
            " as small"
        )
