"""The options of `imagefleet files`, and which kinds of files take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fleet import options
from imagefleet import errors
from imagefleet.storage.settings import SignerSettings
from worker.settings import WorkerSettings

_NAMED = ("model", "lora", "embedding", "controlnet", "upscaler")
#: What `files make` makes.
MADE = ("kernels", "text", "canary")


_Manifest = Annotated[
    bool,
    typer.Option(
        "--manifest",
        help="List its hash in the folder's manifest.json even if there is none yet; with a"
        " signing key, also sign one that is not signed, with all that it lists.",
    ),
]


@dataclass(frozen=True, slots=True)
class AddOptions:
    """The options of `files add`; some are for certain kinds alone."""

    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its name for jobs or workers; by default the file's."),
    ] = None
    sha256: Annotated[
        str | None,
        typer.Option(
            "--sha256",
            "--model-sha256",
            metavar="HEX",
            help="The SHA-256 that the file must have; required for plain http://.",
        ),
    ] = None
    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where a download is kept until it is stored.")
    ] = Path("~/.cache/imagefleet")
    test: Annotated[
        bool,
        typer.Option("--test/--no-test", help="Draw a model's images first, if torch is there."),
    ] = True
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace other kernels for the same GPU.")
    ] = False
    manifest: _Manifest = False


class MakeSettings(WorkerSettings, SignerSettings):
    """Settings of `files make`: a worker's, and the key that signs what is stored."""


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """The options of `files make`; all are for certain kinds alone."""

    form: options.JobFormat = None
    count: Annotated[int | None, typer.Option(min=1, help="Number of jobs; overrides JOBS'.")] = (
        None
    )
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Overrides the template's seed.")
    ] = None
    manifest: _Manifest = False
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the file of kernels is written.")
    ] = Path("kernels")


#: Options of `files add` that not all kinds take, with those that do.
ADD: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("name", "sha256", "cache"), _NAMED),
    "test": ("model",),
    "replace": ("kernels",),
}


#: The same of `files make`, with the worker's settings.
MAKE: Mapping[str, Collection[str]] = {
    **{
        name: ("kernels", "text")
        if name in {*SignerSettings.model_fields, "device"}
        else ("kernels",)
        for name in MakeSettings.model_fields
        if name != "model"
    },
    **dict.fromkeys(("jobs", "form", "count", "seed", "manifest", "signing_key"), ("text",)),
    "output": ("kernels",),
    "dry_run": ("kernels", "text"),
}


def refuse_foreign(
    context: typer.Context, kind: str, takers: Mapping[str, Collection[str]]
) -> None:
    """Raises SetupError for an option on the command line that the kind does not take."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        takes = takers.get(parameter.name or "", (kind,))
        if kind not in takes and source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[0] if parameter.opts[0].startswith("-") else "JOBS"
            raise errors.SetupError(f"{flag} is for {', '.join(takes)}, not for {kind}")
