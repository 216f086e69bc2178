"""What is stored of a kind of file, and the manifest of its folder, which workers read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet import console
from fleet.files import transfer
from imagefleet import errors, validation
from imagefleet.files import kinds
from imagefleet.files.kinds import FileKind
from imagefleet.signing import Keys
from imagefleet.storage.open import Storage
from worker.files import manifest
from worker.node import reference

#: Others may change the manifest at the same time.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Listing:
    """The manifest of *folder*; *create* starts one, and signs a plain one for a key."""

    storage: Storage
    folder: str
    keys: Keys
    create: bool = False

    @property
    def blob(self) -> str:
        return f"{self.folder}/{manifest.NAME}"

    @property
    def where(self) -> str:
        return f"{self.blob} in the container {self.storage.files.name!r}"

    @property
    def described(self) -> str:
        """What is said of a file that was listed."""
        return f"listed {'and signed ' if self.keys.signing else ''}in {self.blob}"

    async def read(self) -> tuple[manifest.Contents | None, str | None]:
        """What is there, whoever may change it, and its version."""
        part = await self.storage.files.read_part(self.blob, 0, manifest.MAX_BYTES + 1)
        if part is None:
            return None, None
        return manifest.parse(self.where, part.data), part.version

    async def check(self, names: Collection[str] = ()) -> Mapping[str, str]:
        """The hashes that it lists; raises SetupError if *names* may not be listed as well.

        Before a long upload, rather than after.
        """
        contents, _ = await self._read()
        listed = contents.files if contents else {}
        is_kept = contents is not None or self.create or self.keys.signing
        if is_kept and len({*listed, *names}) > manifest.MAX_FILES:
            raise manifest.too_large(self.blob)
        return listed

    async def change(self, add: Mapping[str, str] = {}, remove: Collection[str] = ()) -> bool:
        """Lists files' hashes and no longer some others; False without a manifest.

        None is created where nothing is added, or without a key and *create*. Raises SetupError if
        it is signed, and not with these keys, or not signed; TransientError if others change it.
        """
        for _ in range(_TRIES):
            contents, version = await self._read()
            if contents is None and not (add and (self.create or self.keys.signing)):
                return False
            before = contents.files if contents else {}
            files = {name: before[name] for name in before if name not in remove} | dict(add)
            is_as_wanted = contents is not None and contents.is_signed == bool(self.keys.signing)
            if is_as_wanted and files == before:
                return True
            content = manifest.encode(self.folder, files, self.keys.signing)
            manifest.parse(self.where, content)  # raises if it has become too large
            if await self.storage.files.replace(self.blob, content, "application/json", version):
                return True
        raise errors.TransientError(
            f"{self.blob} is being changed by others: run the same command again in a moment"
        )

    async def _read(self) -> tuple[manifest.Contents | None, str | None]:
        """What is there and its version, if these keys may change it."""
        contents, version = await self.read()
        if contents is None:
            return None, None
        if contents.is_signed and not contents.is_signed_by(self.keys.trusted, self.folder):
            raise errors.SetupError(
                f"{self.where} is signed, and not with your key: set IMAGEFLEET_SIGNING_KEY, and"
                " IMAGEFLEET_TRUSTED_KEY to the former key where keys are changing"
            )
        if contents.is_signed and self.keys.signing is None:
            raise errors.SetupError(f"{self.where} is signed: set IMAGEFLEET_SIGNING_KEY")
        if self.keys.signing and not contents.is_signed and contents.files and not self.create:
            count = len(contents.files)
            raise errors.SetupError(
                f"{self.where} is not signed, and lists {console.counted(count, 'file')}: look"
                " through it, then sign it as it is with --manifest, or delete it"
            )
        return contents, version


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
    columns = (console.name_column("name"), "content", console.number_column("MB"), "added")
    cells = (
        (
            *(row.name, row.content, f"{row.bytes / 1e6:,.1f}", f"{row.added_at:%Y-%m-%d %H:%M}"),
            row.sha256 and row.sha256[:12],
        )
        for row in rows
    )
    console.print_tables(console.table(*columns, "SHA-256", rows=cells))


async def find(storage: Storage, kind: FileKind, names: Sequence[str]) -> list[Row]:
    """The files called so, with or without suffix; raises SetupError unless there is one each."""
    known: dict[str, set[str]] = {}
    rows = {row.name: row for row in await read(storage, kind)}
    for name in rows:
        for called in (name, kind.stem(name)):
            known.setdefault(called, set()).add(name)
    for name in names:
        if name not in known:
            hint = validation.suggestion(name, sorted(known))
            raise errors.SetupError(f"no {kind.noun} {name[:80]!r} in {kind.folder}/{hint}")
        if len(known[name]) > 1:
            several = " and ".join(sorted(known[name]))
            raise errors.SetupError(f"{name!r} is the name of {several}: give it with its suffix")
    return [rows[name] for name in dict.fromkeys(min(known[name]) for name in names)]


async def remove(storage: Storage, kind: FileKind, rows: Sequence[Row], keys: Keys) -> None:
    """Takes files from the folder's manifest, then deletes them; raises SetupError.

    In this order: a file that is listed and gone would be a name that prompts find and workers do
    not. A command that was interrupted in between is repeated.
    """
    listing = Listing(storage, kind.folder, keys)
    await listing.change(remove={kind.listed_name(row.name) for row in rows})
    for row in rows:
        blob = f"{kind.folder}/{row.name}"
        await transfer.delete(storage, blob)
        if kind is kinds.MODEL:
            await transfer.delete(storage, reference.stored_name(blob))
