"""`imagefleet results`: shows, writes, downloads or follows the results of a campaign."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fleet import console, options
from fleet.campaigns import target
from imagefleet import errors
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.storage.settings import StorageSettings


class Outcome(StrEnum):
    """What became of an image's job, as typer reads it from the command line."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    campaign: target.Campaign = DEFAULT_CAMPAIGN,
    as_json: options.AsJsonLines = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one row per result.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For the lines, whole or not at all, not stdout."),
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Parquet file.")
    ] = None,
    download: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Download the images; what is there is kept."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Go on with new results until the campaign's end or Ctrl-C."),
    ] = False,
    outcome: Annotated[list[Outcome] | None, typer.Option(help="Only these; repeatable.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="COUNT", help="At most so many [default: all; table: 20]."),
    ] = None,
) -> None:
    """Shows a campaign's images, and its failed or cancelled jobs.

    Each is a row with the job, its image's parameters, the worker and the seconds it took, and the
    image's address or the reason. Exit code 4: a download found images missing.

    imagefleet results spring

    imagefleet results spring --outcome failed --json

    imagefleet results spring --parquet spring.parquet

    imagefleet results spring --download ./spring --follow
    """
    from fleet.results import run

    forms = {
        "--json": as_json and download is None,  # with it, the summary is JSON
        "--csv": as_csv,
        "--parquet": parquet is not None,
        "--download": download is not None,
    }
    chosen = [flag for flag, is_given in forms.items() if is_given]
    if len(chosen) > 1:
        raise errors.SetupError(f"{' and '.join(chosen)} are different results: choose one")
    outcomes = {each.value for each in outcome or Outcome}
    if download is not None and not outcome:
        outcomes = {"completed"}
    if download is not None and outcomes != {"completed"}:
        raise errors.SetupError("--download is for images: leave out --outcome")
    if output is not None and chosen not in (["--json"], ["--csv"]):
        raise errors.SetupError("--output is for the lines of --json or --csv")
    if follow and (parquet or output):
        flag = "--parquet" if parquet else "--output"
        raise errors.SetupError(f"{flag} writes a file at its end: it does not go with --follow")
    for file in (output, parquet):
        console.check_writable(file)
    wanted = run.Wanted(
        target.campaign(campaign),
        frozenset(outcomes),
        limit,
        as_json=as_json,
        as_csv=as_csv,
        output=output,
        parquet=parquet,
        download=download,
        follow=follow,
    )
    if not console.run(run.run(settings, wanted)):
        raise typer.Exit(console.EXIT_IMAGES_WRONG)
