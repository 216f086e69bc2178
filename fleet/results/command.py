"""`imagefleet results`: shows, writes, downloads or follows the results of a campaign."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

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


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go, and how."""

    as_json: options.AsJsonLines = False
    form: Annotated[
        Literal["csv", "parquet"] | None,
        typer.Option("--format", help="Rows of CSV, or a file of Parquet; not a table."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For the lines or the Parquet, whole or not at all, not stdout."
        ),
    ] = None
    download: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Download the images; what is there is kept."),
    ] = None


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    to: Output,
    campaign: target.Campaign = DEFAULT_CAMPAIGN,
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

    imagefleet results spring --format parquet --output spring.parquet

    imagefleet results spring --download ./spring --follow
    """
    from fleet.results import run

    outcomes = {each.value for each in outcome or Outcome}
    if to.download is not None and not outcome:
        outcomes = {"completed"}
    _check(to, outcomes, follow=follow)
    parquet = to.output if to.form == "parquet" else None
    wanted = run.Wanted(
        target.campaign(campaign),
        frozenset(outcomes),
        limit,
        as_json=to.as_json,
        as_csv=to.form == "csv",
        output=None if parquet else to.output,
        parquet=parquet,
        download=to.download,
        follow=follow,
    )
    console.check_writable(to.output)
    if not console.run(run.run(settings, wanted)):
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


def _check(to: Output, outcomes: set[str], *, follow: bool) -> None:
    """Raises SetupError for options that cannot go together."""
    given = {
        "--json": to.as_json and to.download is None,  # with it, the summary is JSON
        f"--format {to.form}": to.form is not None,
        "--download": to.download is not None,
    }
    chosen = [flag for flag, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise errors.SetupError(f"{' and '.join(chosen)} are different results: choose one")
    if to.download is not None and outcomes != {"completed"}:
        raise errors.SetupError("--download is for images: leave out --outcome")
    if to.output is not None and chosen not in (["--json"], [f"--format {to.form}"]):
        raise errors.SetupError("--output is for --json or --format")
    if to.form == "parquet" and to.output is None:
        raise errors.SetupError("--format parquet needs --output FILE")
    if follow and to.output:
        raise errors.SetupError("--output writes a file at its end: it does not go with --follow")
