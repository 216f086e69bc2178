"""Options, files and questions shared by the commands of `imagefleet deploy`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from fleet import console
from fleet.salad import client, deployment
from fleet.salad import file as salad_file
from imagefleet import errors

#: Files in order of precedence: the operator's own, then the example of this repository.
DEFAULT_FILES = (Path("fleet.yaml"), Path("deploy/salad/fleet.yaml"))

File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="The fleet file [default: fleet.yaml, else deploy/salad/fleet.yaml].",
    ),
]
WaitMinutes = Annotated[
    float, typer.Option(min=0, metavar="MINUTES", help="Longest wait for instances.")
]


def read_file(path: Path | None) -> tuple[salad_file.FleetFile, Path]:
    """The fleet file, and the folder that the paths of its secrets are relative to.

    Raises:
        SetupError: the file is missing or invalid.
    """
    if path is None:
        path = next((each for each in DEFAULT_FILES if each.is_file()), None)
    if path is None:
        raise errors.SetupError(
            f"neither {' nor '.join(map(str, DEFAULT_FILES))} exists: give the fleet file as --file"
        )
    return salad_file.read_file(path), path.parent


@contextlib.asynccontextmanager
async def connected(
    file: salad_file.FleetFile, folder: Path
) -> AsyncIterator[deployment.Deployment]:
    """The fleet that *file* describes, as deployed on SaladCloud."""
    key = file.api_key.read(folder).get_secret_value()
    timeout = aiohttp.ClientTimeout(total=client.TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        salad = client.SaladClient(session, file.api, key, file.organization, file.project)
        yield deployment.Deployment(salad, file.name, console.print_note)
