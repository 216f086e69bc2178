"""`imagefleet gate`: passes two ways of drawing the same jobs, or fails them."""

from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.table import Table

from cli import console, options
from cli.options import argument, option
from evaluation.gate import page, run, sides
from evaluation.gate.options import DrawOptions, GateRequest, JudgeOptions
from evaluation.gate.page import Result
from evaluation.gate.verdict import Bounds, Verdict
from imagefleet.storage.settings import StorageSettings


@options.flat
def command(
    settings: StorageSettings,
    *,
    a: str = argument("The reference.", metavar="A"),
    b: str = argument("What is compared with it.", metavar="B"),
    drawn: DrawOptions,
    judged: JudgeOptions,
    output: Path | None = option(
        "Also write a page with the worst pairs.", metavar="FILE"
    ),
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Compares images of the same jobs that were drawn in two ways.

    A and B are each a campaign, a folder of images (with a slash: ./images), or settings to draw
    with here and now: float32, float16, bfloat16, compiled, uncompiled, fp16-accumulate, factors,
    merged (of LoRAs), slots=N, several with commas. Settings draw --jobs, or the jobs of the
    images they are compared with. Exit code 4: a figure is out of bounds.

    imagefleet gate float32 float16

    imagefleet gate spring float16,uncompiled --model dreamshaper-8.safetensors --output gate.html

    imagefleet gate spring spring --other-storage local:other-gpu
    """
    for path in (output, json_file):
        console.check_writable(path)
    bounds = Bounds.read(judged.set_ or ())
    storages = settings, run.other_storage(settings, drawn.other_storage)
    plan = GateRequest(sides.read(a), sides.read(b), storages, drawn, judged, bounds)
    result = run.run(plan, with_pictures=output is not None, quiet=as_json)
    _warn(result)
    record = result.as_json()
    if json_file is not None:
        console.write_file(json_file, console.json_text(record))
    if output is not None:
        console.write_file(output, page.render(result, datetime.now(UTC)))
    if as_json:
        console.print_json(record)
    else:
        _show(result)
        if output is not None:
            console.print_plain(f"Page: {output}")
    if not result.verdict.passed:
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


def _show(result: Result) -> None:
    judged = result.verdict
    console.print_plain(f"A: {result.labels[0]}\nB: {result.labels[1]}\n")
    checks = (
        (
            check.title,
            check.figure_text,
            check.bound_text,
            "" if check.passed else "out of bounds",
        )
        for check in judged.checks
    )
    console.print_tables(
        console.table(["figure"], ["found", "bound"], [""], rows=checks)
    )
    rows = {
        "pairs": f"{judged.pairs:,}",
        "of them identical": f"{judged.identical:,}",
        f"FID of A and B against {result.fid_against}": _both(
            judged.fid_a, judged.fid_b
        ),
        "FID between A and B": console.number(judged.fid_between, 4),
        "CLIP score of A and B": _both(judged.clip_a, judged.clip_b),
    }
    console.print_tables(
        "", console.totals({name: text for name, text in rows.items() if text != "-"})
    )
    if judged.worst:
        console.print_tables("", _worst(judged))
    failed = ", ".join(check.title for check in judged.checks if not check.passed)
    console.print_plain(f"\nfailed: {failed}" if failed else "\npassed")


def _worst(judged: Verdict) -> Table:
    """Shown of those that pass, too: the bounds may not be the reader's."""
    figures = ["PSNR", "SSIM, worst region", "sharpness", "colours", "light"]
    rows = (
        (
            pair.key,
            "identical" if pair.psnr is None else f"{pair.psnr:.1f} dB",
            console.number(pair.ssim_worst_region, 3),
            f"{round(pair.sharpness_percent, 1) + 0.0:+.1f} %",
            f"{pair.colour_percent:.1f} %",
            f"{pair.light_levels:.1f}",
            pair.caption or "",
        )
        for pair in judged.worst
    )
    return console.table(["worst pairs"], figures, ["caption"], rows=rows)


def _both(a: float | None, b: float | None) -> str:
    return "-" if a is None else f"{console.number(a, 3)} and {console.number(b, 3)}"


def _warn(result: Result) -> None:
    """Says what the figures do not."""
    comparison = result.comparison
    if result.left_out:
        console.print_warning(f"left out: {' and '.join(result.left_out)}")
    if comparison.other_fields:
        fields = "; ".join(
            f"{name}: {a!r} and {b!r}"
            for name, (a, b) in comparison.other_fields.items()
        )
        console.print_warning(
            f"the jobs of A and B differ in more than the engine: {fields}"
        )
    if comparison.unknown_jobs:
        console.print_warning(
            f"{console.counted(comparison.unknown_jobs, 'pair')} compared by name alone: an image"
            " does not say its caption and seed"
        )
