"""Stores files of one kind: all are checked first, then stored, then listed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fleet.files import kernels, models, transfer
from fleet.files.listed import Listing
from fleet.files.transfer import Ready, Stored
from imagefleet import errors
from imagefleet.files import kinds
from imagefleet.files.kinds import FileKind
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings


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
    manifest: Annotated[
        bool,
        typer.Option(
            "--manifest",
            help="List its hash in the folder's manifest.json even if there is none yet; with a"
            " signing key, also sign one that is not signed, with all that it lists.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class Added:
    """The files that are stored, what else is known of each, and whether they are listed."""

    files: list[tuple[Ready, Stored]]
    in_manifest: bool


async def add(
    settings: SignerSettings,
    kind: FileKind,
    sources: list[str],
    given: AddOptions,
    *,
    dry_run: bool,
) -> Added:
    """Stores files and lists their hashes.

    Raises:
        SetupError: one is of another kind, or its name is taken; none was stored of that kind.
        TransientError: the storage did not answer.
    """
    if len(sources) > 1 and (given.name or given.sha256):
        raise errors.SetupError("--name and --sha256 are for one file")
    keys = settings.keys()
    # Signing what others have listed needs --manifest.
    create = given.manifest or (kind.needs_list and not keys.signing)
    async with contextlib.AsyncExitStack() as stack:
        if kind is kinds.KERNELS:
            ready = kernels.archives(sources)
        else:
            found = [_ready(kind, source, given, dry_run=dry_run) for source in sources]
            ready = [await stack.enter_async_context(each) for each in found]
        storage = await stack.enter_async_context(open_storage(settings))
        listing = Listing(storage, kind.folder, keys, create=create)
        if not dry_run:
            await storage.create()
            await listing.check()
        files = []
        for file in ready:
            stored = await transfer.store(
                storage, kind, file, replace=given.replace, dry_run=dry_run
            )
            files.append((file, stored))
        if dry_run:
            return Added(files, in_manifest=False)
        hashes = {kind.listed_name(file.name): stored.sha256 for file, stored in files}
        is_listed = await listing.change(hashes)
        for blob, data in (each for file in ready for each in file.beside.items()):
            await transfer.overwrite(storage, blob, data, "application/json")
        return Added(files, is_listed)


@contextlib.asynccontextmanager
async def _ready(
    kind: FileKind, source: str, given: AddOptions, *, dry_run: bool
) -> AsyncIterator[Ready]:
    async with transfer.local_file(source, given.sha256, kind, given.cache) as path:
        if kind is kinds.MODEL:
            is_tried = given.test and not dry_run
            async with models.ready(path, given.name, given.cache, is_tried=is_tried) as model:
                yield model
            return
        content = transfer.check_file(path, kind)
        name = kind.stem(given.name or path.name)
        if not SAFE_NAME.fullmatch(name):
            raise errors.SetupError(
                f"the name {name[:80]!r} is refused: give a --name of letters, digits, spaces and"
                " _ . + ( ) - only, as prompts may have it"
            )
        yield Ready(path, f"{name}{kind.suffixes[0]}", content)
