"""What the verbs of `imagefleet deploy salad` share: their options, the file and the question."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from fleet import console
from fleet.salad import deployment
from fleet.salad import file as salad_file
from imagefleet import errors

#: Looked for in this order: one's own first, then the example of this repository.
DEFAULT_FILES = (Path("fleet.yaml"), Path("deploy/salad/fleet.yaml"))

File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="The fleet's settings [default: fleet.yaml, else deploy/salad/fleet.yaml].",
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(min=1, max=50_000, metavar="COUNT", help="Instead of the file's replicas."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
WaitMinutes = Annotated[
    float, typer.Option(min=0, metavar="MINUTES", help="Longest wait for instances.")
]


def read_file(path: Path | None) -> tuple[salad_file.FleetFile, Path]:
    """The settings, and the folder where the paths of its secrets start.

    Raises:
        SetupError: there is no such file, or it is wrong.
    """
    if path is None:
        path = next((each for each in DEFAULT_FILES if each.is_file()), None)
    if path is None:
        raise errors.SetupError(
            f"neither {' nor '.join(map(str, DEFAULT_FILES))} is here: give the settings' --file"
        )
    return salad_file.read_file(path), path.parent


@contextlib.asynccontextmanager
async def opened(file: salad_file.FleetFile, folder: Path) -> AsyncIterator[deployment.Deployment]:
    """The fleet that *file* describes, as it stands on SaladCloud."""
    from fleet.salad import api as salad_api

    key = file.api_key.read(folder).get_secret_value()
    async with salad_api.connected(file, key) as api:
        yield deployment.Deployment(api, file.name, tell)


def ask(question: str, *, yes: bool) -> None:
    """Goes on with --yes, or when a person says so.

    Raises:
        SetupError: nobody can be asked.
        typer.Exit: the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise errors.SetupError(f"{question} Nobody can be asked here: add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


def tell(words: str) -> None:
    """Progress, beside the command's own output."""
    console.stderr.print(words, highlight=False, markup=False, soft_wrap=True)
