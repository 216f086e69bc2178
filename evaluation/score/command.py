"""`imagefleet score`: what a campaign's images are worth, by group of its sweep."""

import tempfile
from dataclasses import replace
from pathlib import Path

import typer
from rich.table import Table

from cli import console, options, target
from cli.options import option
from evaluation.score import figures as drawing
from evaluation.score import session
from evaluation.score.extractors import DEMO
from evaluation.score.figures import Scores, facts
from evaluation.score.sample import svg, take
from evaluation.score.session import Computing, Networks
from imagefleet.errors import SetupError
from imagefleet.keeping.rule import Keep
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

#: Facts of a group that differ in one sweep and not in another.
_VARIED = ("sampler", "steps", "model", "lora", "lora_strength")


@options.flat
def command(
    settings: StorageSettings,
    campaign: target.Campaign,
    networks: Networks,
    computing: Computing,
    write_reference: Path | None = option(
        "Write those of the folder --reference.", metavar="STATISTICS"
    ),
    output: Path | None = option(
        "Draw FID over the CLIP score; with --sample, what minima keep.", metavar="SVG"
    ),
    sample: int | None = option(
        "Show how the scores of so many drawn images, dropped ones too, are spread, and what each"
        " minimum keeps and costs.",
        min=1,
        metavar="COUNT",
    ),
    keep: Keep | None = options.keep(
        "With --sample: what this rule keeps, and scores of images without."
    ),
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Scores a campaign's images: FID, KID, CLIP score, CMMD.

    The figures are by group of the sweep that the campaign is; another campaign is one group. What
    was interrupted goes on with the same command, and ends with the same figures to the last digit.
    Exit code 4: images are missing or not as they were recorded; they are left out, and named.

    imagefleet score curve --extractor demo --output curve.svg

    imagefleet score coco --reference val2014 --extractor inception.pt --clip clip-vit-large-patch14

    imagefleet score trial --sample 200 --keep clip=25,aesthetic=5
    """
    target.campaign(campaign)
    if sample is not None:
        console.check_writable(output)
        figures = console.run(_sampled(settings, campaign, sample, keep))
        _show_sample(figures, output, as_json=as_json)
        return
    reference = networks.reference
    clip = networks.clip
    extractor = networks.extractor
    if extractor == DEMO:
        clip = clip or DEMO
        reference = reference or DEMO
    _check(reference, extractor, clip, write_reference)
    for path in (write_reference, output, json_file):
        console.check_writable(path)
    networks = replace(networks, reference=reference, clip=clip)
    asked = session.ScoreRequest(
        settings, campaign, networks, computing, write_reference, quiet=as_json
    )
    with console.only_one(asked.folder):
        scores = session.run(asked)
    _show(scores, output, json_file, as_json=as_json)
    if any(group.left_out for group in scores.groups):
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


async def _sampled(
    settings: StorageSettings, campaign: str, count: int, rule: Keep | None
) -> JSONDict:
    async with console.connected(settings) as fleet:
        await target.check_campaign(fleet.storage, campaign)
        with tempfile.TemporaryDirectory() as cache:
            return await take(fleet.storage, campaign, count, rule, Path(cache))


def _show_sample(figures: JSONDict, drawing_to: Path | None, *, as_json: bool) -> None:
    if drawing_to is not None:
        console.write_file(drawing_to, svg(figures))
    if as_json:
        console.print_json(figures)
        return
    heads = ("minimum", "kept", "$ a 1,000 kept")
    for spread in figures["scores"]:
        rows = [(f"{each['minimum']:g}", *_kept(each)) for each in spread["minima"]]
        console.print_plain(
            f"{spread['name']} of {console.counted(spread['images'], 'image')}:"
            f" {spread['least']:g} to {spread['most']:g}, {spread['mean']:.3g} in the mean"
        )
        console.print_tables(console.table((), heads, rows=rows), "")
    if "rule" in figures:
        share, dollars = _kept(figures["rule"])
        console.print_plain(f"the rule keeps {share}, ${dollars} a 1,000 kept images")
    if "wrongly_dropped" in figures:
        share = f"{figures['wrongly_dropped']:.1%}"
        console.print_plain(f"its estimates drop {share} of what it would keep")


def _kept(of: JSONDict) -> tuple[str, str]:
    dollars = of["dollars_per_thousand"]
    return f"{of['kept']:.1%}", "-" if dollars is None else console.significant(dollars)


def _check(
    reference: str | None,
    extractor: str | None,
    clip: str | None,
    write_reference: Path | None,
) -> None:
    """Raises SetupError for options that cannot go together."""
    if extractor is None and clip is None:
        raise SetupError(
            "nothing to score with: give --extractor for FID and KID, --clip for CLIP score and"
            " CMMD, or --extractor demo for the demo checkpoint"
        )
    if extractor is not None and reference is None:
        raise SetupError(
            "FID compares with pictures: give their folder with --reference"
        )
    if write_reference is not None and not (reference and Path(reference).is_dir()):
        raise SetupError(
            "--write-reference needs --reference with a folder of pictures"
        )


def _show(
    scores: Scores, curve: Path | None, json_file: Path | None, *, as_json: bool
) -> None:
    figures = scores.model_dump()
    if json_file is not None:
        console.write_file(json_file, console.json_text(figures))
    if curve is not None:
        drawn = drawing.svg(scores)
        if not drawn:
            raise SetupError(
                "--output needs FID and CLIP score: give --extractor and --clip"
            )
        console.write_file(curve, drawn)
    _warn(scores)
    if as_json:
        console.print_json(figures)
        return
    console.print_tables(_table(scores))
    console.print_plain("")
    console.print_facts(facts(scores))


def _table(scores: Scores) -> Table:
    """The figures by group, with those of its facts that differ from group to group."""
    varied = [
        name for name in _VARIED if len({getattr(g, name) for g in scores.groups}) > 1
    ]
    rows = []
    for group in scores.groups:
        facts = (
            "" if getattr(group, name) is None else str(getattr(group, name))
            for name in varied
        )
        guidance = "-" if group.cfg_scale is None else f"{group.cfg_scale:g}"
        figures = map(group.shown, drawing.FIGURES)
        rows.append((group.group, *facts, guidance, group.images, *figures))
    return console.table(
        ["group", *(name.replace("_", " ") for name in varied)],
        ["guidance", "images", "FID", "KID", "CLIP", "CMMD"],
        rows=rows,
    )


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
