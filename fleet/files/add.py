"""Stores files of one kind: all are checked first, then stored, then listed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict

from fleet.files import kernels, models, transfer
from fleet.files.arguments import AddOptions
from fleet.files.listed import Listing
from fleet.files.transfer import Ready, Report
from imagefleet import errors
from imagefleet.files import kinds
from imagefleet.files.kinds import FileKind
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings


async def add(
    settings: SignerSettings,
    kind: FileKind,
    sources: list[str],
    given: AddOptions,
    *,
    dry_run: bool,
) -> Report:
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
        rows: list[dict[str, object]] = []
        notes: list[str] = []
        lines: list[str] = []
        for file in ready:
            stored = await transfer.store(
                storage, kind, file, replace=given.replace, dry_run=dry_run
            )
            is_listed = False
            if not dry_run:
                is_listed = await listing.change({kind.listed_name(file.name): stored.sha256})
                for blob, data in file.beside.items():
                    await transfer.overwrite(storage, blob, data, "application/json")
            rows.append({**asdict(stored), "in_manifest": is_listed, **file.facts})
            would = "would be " if dry_run and stored.change != "was there" else ""
            notes.append(
                f"{stored.blob}: {would}{stored.change}: {stored.content},"
                f" {stored.bytes / 1e6:,.1f} MB, SHA-256 {stored.sha256}"
                + (f", {listing.described}" if is_listed else "")
                + f"; {kind.use}"
            )
            lines.append(kind.handle.format(stem=stored.name, name=file.name, sha256=stored.sha256))
    return Report({"files": rows, "dry_run": dry_run}, notes, lines)


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
