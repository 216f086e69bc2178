"""What is stored of a kind of file: as a table or JSON, and what is removed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet import console
from fleet.files import transfer
from fleet.files.listed import Listing
from imagefleet import errors, validation
from imagefleet.files import kinds
from imagefleet.files.kinds import FileKind
from imagefleet.signing import Keys
from imagefleet.storage.open import Storage
from worker.node import reference


@dataclass(frozen=True, slots=True)
class Row:
    """A file in the storage; *content* and *sha256* are known of those that `add` stored."""

    name: str
    content: str | None
    bytes: int
    added_at: datetime
    sha256: str | None


async def read(storage: Storage, kind: FileKind) -> list[Row]:
    """The files of a kind, by name."""
    await storage.files.check()
    start = f"{kind.folder}/"
    rows = [
        Row(
            name=record.name.removeprefix(start),
            content=record.metadata.get(transfer.CONTENT),
            bytes=record.size_bytes,
            added_at=record.created_at,
            sha256=record.metadata.get(transfer.SHA256),
        )
        async for record in storage.files.records(start)
        if record.name.endswith(kind.suffixes)
    ]
    return sorted(rows, key=lambda row: row.name)


def show(rows: Sequence[Row]) -> None:
    """Prints files as a table."""
    table = console.table(
        console.name_column("name"), "content", console.number_column("MB"), "added", "SHA-256"
    )
    for row in rows:
        table.add_row(
            console.untrusted(row.name),
            console.untrusted(row.content or "-"),
            console.number(row.bytes / 1e6, 1),
            f"{row.added_at:%Y-%m-%d %H:%M}",
            console.untrusted((row.sha256 or "-")[:12]),
        )
    console.print_tables(table)


async def find(storage: Storage, kind: FileKind, names: Sequence[str]) -> list[Row]:
    """The files that are called so, with or without their suffix.

    Raises:
        SetupError: there is none of a name, or there are several.
    """
    rows = await read(storage, kind)
    found: dict[str, Row] = {}
    for name in names:
        called = [row for row in rows if name in {row.name, kind.stem(row.name)}]
        if len(called) > 1:
            several = " and ".join(row.name for row in called)
            raise errors.SetupError(f"{name!r} is the name of {several}: give it with its suffix")
        if not called:
            known = {each for row in rows for each in (row.name, kind.stem(row.name))}
            hint = validation.suggestion(name, sorted(known))
            raise errors.SetupError(f"no {kind.noun} {name[:80]!r} in {kind.folder}/{hint}")
        found[called[0].name] = called[0]
    return [*found.values()]


async def remove(storage: Storage, kind: FileKind, rows: Sequence[Row], keys: Keys) -> None:
    """Takes files from the folder's manifest, then deletes them.

    In this order: a file that is listed and gone would be a name that prompts find and workers do
    not. A command that was interrupted in between is repeated.

    Raises:
        SetupError: the manifest is signed with another key, or the token cannot delete.
    """
    listing = Listing(storage, kind.folder, keys)
    await listing.change(remove={kind.listed_name(row.name) for row in rows})
    for row in rows:
        blob = f"{kind.folder}/{row.name}"
        await transfer.delete(storage, blob)
        if kind is kinds.MODEL:
            await transfer.delete(storage, reference.stored_name(blob))
