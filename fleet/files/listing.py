"""What is in a folder of the storage, as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import PurePosixPath

from fleet import console
from fleet.files import transfer
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings


@dataclass(frozen=True, slots=True)
class Row:
    """A file in the storage; *kind* and *sha256* are known of those that `add` stored."""

    name: str
    kind: str | None
    bytes: int
    added_at: datetime
    sha256: str | None


async def read(settings: StorageSettings, folder: str, suffixes: tuple[str, ...]) -> list[Row]:
    """The files of *folder*, by name."""
    async with open_storage(settings) as storage:
        await storage.files.check()
        return [
            Row(
                name=PurePosixPath(each.name).relative_to(folder).as_posix(),
                kind=each.metadata.get(transfer.KIND),
                bytes=each.size_bytes,
                added_at=each.created_at,
                sha256=each.metadata.get(transfer.SHA256),
            )
            for each in await transfer.records(storage, folder, suffixes)
        ]


def show(
    settings: StorageSettings, folder: str, *suffixes: str, if_empty: str, as_json: bool
) -> None:
    """Prints the files of *folder* as a table or JSON; without any the sentence *if_empty*."""
    rows = console.run(read(settings, folder, suffixes))
    if as_json:
        console.print_json({folder: [asdict(row) for row in rows]})
    else:
        _print(rows, if_empty)


def _print(rows: Sequence[Row], if_empty: str) -> None:
    if not rows:
        console.print_note(if_empty)
        return
    table = console.table(
        console.name_column("name"), "kind", console.number_column("MB"), "added", "SHA-256"
    )
    for row in rows:
        table.add_row(
            console.untrusted(row.name),
            console.untrusted(row.kind or "-"),
            console.number(row.bytes / 1e6, 1),
            f"{row.added_at:%Y-%m-%d %H:%M}",
            console.untrusted((row.sha256 or "-")[:12]),
        )
    console.print_tables(table)
