"""Files of a kind in the storage, stored, found and removed, and their folder's manifest."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich import progress

from cli import console
from imagefleet import validation
from imagefleet.errors import MissingResourceError, SetupError, TransientError
from imagefleet.files import kinds, safetensors
from imagefleet.files.kinds import FileKind
from imagefleet.signing import Keys
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart
from worker.files import addresses, check, manifest, model
from worker.files.disk_cache import DiskCache
from worker.files.manifest import Contents

#: What is read of a manifest: a byte more than one may have.
_MAX_BYTES = manifest.MAX_BYTES + 1

CONTENT_TYPE = "application/octet-stream"

#: The blob's metadata, which `list` shows.
SHA256 = "sha256"
CONTENT = "content"
LORA_HASH = "lora_hash"

REPORTED = ("content", "bytes", "sha256", "change", "in_manifest")

Progress = Callable[[int, int | None], None]


@dataclass
class Ready:
    """A checked file on this machine, ready to be stored under a name; and what was done then."""

    path: Path
    name: str
    content: str
    #: Another name of a LoRA's: see `lora.alias_of`.
    alias: str = ""
    sha256: str = ""
    change: str = ""
    in_manifest: bool = False

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


@contextlib.asynccontextmanager
async def local_file(
    source: str, sha256: str | None, kind: FileKind, cache: Path
) -> AsyncIterator[Path]:
    """The file or folder *source*, checked; raises SetupError for another *kind* or hash.

    A URL is downloaded for the block, after whose errors it is kept, whole or in part.
    """
    if not re.match(r"https?://", source, re.IGNORECASE):
        yield await asyncio.to_thread(_own_file, source, sha256)
        return
    address = addresses.read_address(source, sha256, "")
    assert address is not None  # noqa: S101 - it begins like a URL
    folder = _folder(cache) / address.folder_name(sha256)
    with showing("downloading") as show:
        path = await model.fetch_to(
            folder, address, sha256, None, wanted=kind, on_progress=show
        )
    yield path
    shutil.rmtree(folder, ignore_errors=True)


def _own_file(source: str, sha256: str | None) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        raise SetupError(f"{source!r} does not exist")
    if sha256 and path.is_file() and safetensors.sha256_of(path) != sha256.lower():
        raise SetupError(f"{source!r} has another SHA-256 than {sha256}")
    return path


def check_file(path: Path, kind: FileKind) -> str:
    """Describes a file, as in 'SDXL LoRA'; SetupError if it is not of *kind*, or too large."""
    if path.suffix.lower() in addresses.PICKLE_SUFFIXES:
        advice = addresses.pickle_advice(
            str(path), is_embedding=kind is kinds.EMBEDDING
        )
        raise SetupError(f"{str(path)!r} is {advice}")
    try:
        content = kinds.check(kind, str(path), check.read_header(path))
        check_size(path, kind)
    except OSError as error:
        raise SetupError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    return content


def check_size(path: Path, kind: FileKind) -> None:
    """Raises SetupError for a file that workers would not take."""
    if kind.max_bytes is not None and path.stat().st_size > kind.max_bytes:
        raise SetupError(
            f"{str(path)!r} has more than {kind.max_bytes / 2**20:,.0f} MiB, the most that workers"
            f" take in {kind.folder}/"
        )


async def store(
    storage: Storage,
    kind: FileKind,
    ready: Ready,
    on_progress: Callable[[int], None],
    *,
    replace: bool,
    dry_run: bool,
) -> None:
    """Uploads a file, which is seen once it is whole; SetupError if another has its name."""
    blob = f"{kind.folder}/{ready.name}"
    sha256 = ready.sha256 = await asyncio.to_thread(safetensors.sha256_of, ready.path)
    try:
        there = await storage.files.metadata(blob)
    except MissingResourceError:  # in a dry run
        there = None
    known = sha256 if there is None else there.get(SHA256, "")
    is_same = known == sha256
    if not (is_same or replace):
        if kind is not kinds.TEXT:
            raise SetupError(
                f"{blob} in {storage.url} exists and is another file, of the SHA-256"
                f" {known[:12] or 'unknown'}: workers may have it already, so another file needs"
                " another --name; kernels are put in its place with --replace"
            )
        # The same, as another machine computes it.
        is_same = True
        ready.sha256 = known or sha256
    if there is None:
        ready.change = "stored"
    else:
        ready.change = "was there" if is_same else "replaced"
    if ready.change == "was there" or dry_run:
        return
    if not is_same:
        await delete(storage, blob)
    metadata = {SHA256: sha256, CONTENT: ready.content}
    if kind is kinds.LORA:
        metadata[LORA_HASH] = await asyncio.to_thread(manifest.hash_lora, ready.path)
    if not await storage.files.upload(
        blob, ready.path, CONTENT_TYPE, metadata, on_progress
    ):
        raise TransientError(f"{blob} was stored by another command: try again")


async def delete(storage: Storage, blob: str) -> None:
    """Deletes a blob; raises SetupError if the token does not allow it."""
    if not await storage.files.delete(blob):
        raise SetupError(
            f"{blob} cannot be deleted with this token: `imagefleet keys mint files` makes one"
        )


def room_for(cache: Path, needed_bytes: int) -> Path:
    """A folder for temporary files with that much room; raises NodeError or SetupError."""
    folder = DiskCache(_folder(cache))
    with folder.errors():
        folder.folder.mkdir(parents=True, exist_ok=True)
        folder.check_room(needed_bytes)
    return folder.folder


@contextlib.contextmanager
def showing(what: str) -> Iterator[Progress]:
    """A bar of bytes on a terminal."""
    with console.counting(what, None, unit=progress.DownloadColumn()) as move:
        yield lambda so_far, total: move(done=so_far, total=total)


def _folder(cache: Path) -> Path:
    return cache.expanduser() / "added"


@dataclass(frozen=True)
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

    async def aliases(self, names: Collection[str]) -> set[str]:
        """All names that it has for the files of *names*, whose hashes they share."""
        contents = await self.read()
        listed = contents.files if contents else {}
        hashes = {listed[name] for name in names if name in listed}
        return {name for name in listed if listed[name] in hashes}

    async def read(self) -> Contents | None:
        """Reads the manifest, whoever may change it; None if there is none."""
        return self._parse(await self.storage.files.read_part(self.blob, 0, _MAX_BYTES))

    def _parse(self, part: BlobPart | None) -> Contents | None:
        return None if part is None else manifest.parse(self.where, part.data)

    async def check(self, names: Collection[str] = ()) -> Mapping[str, str]:
        """The hashes that it lists; raises SetupError if *names* may not be listed as well."""
        contents = self._checked(await self.read())
        listed = contents.files if contents else {}
        is_kept = contents is not None or self.create or self.keys.signing
        if is_kept and len({*listed, *names}) > manifest.MAX_FILES:
            raise manifest.too_large(self.blob)
        return listed

    async def change(
        self, add: Mapping[str, str] = {}, remove: Collection[str] = ()
    ) -> bool:
        """Lists files' hashes and no longer some others; False without a manifest.

        None is created where nothing is added, or without a key and *create*. Raises SetupError if
        it is signed, and not with these keys, or not signed; TransientError if others change it.
        """
        is_listed = True

        def changed(part: BlobPart | None) -> bytes | None:
            nonlocal is_listed
            contents = self._checked(self._parse(part))
            key = self.keys.signing
            is_listed = contents is not None or bool(add and (self.create or key))
            before = contents.files if contents else {}
            kept = {name: before[name] for name in before if name not in remove}
            files = kept | dict(add)
            is_as_wanted = contents is not None and contents.is_signed == bool(key)
            if not is_listed or (is_as_wanted and files == before):
                return None
            content = manifest.encode(self.folder, files, key)
            manifest.parse(self.where, content)  # raises if it has become too large
            return content

        await self.storage.files.edit(self.blob, changed, _MAX_BYTES)
        return is_listed

    def _checked(self, contents: Contents | None) -> Contents | None:
        """Returns the manifest's contents if these keys may change it; raises SetupError."""
        if contents is None:
            return None
        why = ""
        keys = self.keys
        if contents.is_signed:
            if keys.signing is None or not contents.is_signed_by(
                keys.trusted, self.folder
            ):
                why = (
                    "is signed, and not with your key: set IMAGEFLEET_SIGNING_KEY, and"
                    " IMAGEFLEET_TRUSTED_KEY to the former key where keys are changing"
                )
        elif keys.signing and contents.files and not self.create:
            why = (
                f"is not signed, and lists {console.counted(len(contents.files), 'file')}: look"
                " through it, then sign it as it is with --manifest, or delete it"
            )
        if why:
            raise SetupError(f"{self.where} {why}")
        return contents


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the storage; *content* and *sha256* are known of those that `add` stored."""

    name: str
    content: str | None
    bytes: int
    added_at: datetime
    sha256: str | None
    #: The hash by which A1111 names it: of a LoRA another one, else the SHA-256.
    short_hash: str | None = None


async def read(storage: Storage, kind: FileKind) -> list[StoredFile]:
    await storage.files.check()
    start = f"{kind.folder}/"
    rows = [
        StoredFile(
            name=record.name.removeprefix(start),
            content=record.metadata.get(CONTENT),
            bytes=record.size_bytes,
            added_at=record.created_at,
            sha256=record.metadata.get(SHA256),
            short_hash=record.metadata.get(LORA_HASH if kind is kinds.LORA else SHA256),
        )
        async for record in storage.files.records(start)
        if record.name.endswith(kind.suffixes)
    ]
    return sorted(rows, key=lambda row: row.name)


async def find(
    storage: Storage, kind: FileKind, names: Sequence[str]
) -> list[StoredFile]:
    """The files called so, with or without suffix; raises SetupError unless there is one each."""
    rows = await read(storage, kind)
    found = {}
    for name in names:
        called = [row for row in rows if name in {row.name, kind.stem(row.name)}]
        if not called:
            hint = validation.suggestion(name, [kind.stem(row.name) for row in rows])
            raise SetupError(f"no {kind.noun} {name[:80]!r} in {kind.folder}/{hint}")
        if len(called) > 1:
            several = " and ".join(row.name for row in called)
            raise SetupError(
                f"{name!r} is the name of {several}: give it with its suffix"
            )
        found[called[0].name] = called[0]
    return list(found.values())


async def remove(
    storage: Storage, kind: FileKind, rows: Sequence[StoredFile], keys: Keys
) -> None:
    """Takes files from the folder's manifest, then deletes them; raises SetupError.

    In this order: prompts would find the name of one that is listed and gone, and workers no file.
    """
    listing = Listing(storage, kind.folder, keys)
    names = {kind.listed_name(row.name) for row in rows}
    aliases = await listing.aliases(names) if kind is kinds.LORA else set()
    if aliases - names:
        aliases -= {kind.stem(row.name) for row in await read(storage, kind)}
    await listing.change(remove=names | aliases)
    for row in rows:
        await delete(storage, f"{kind.folder}/{row.name}")
