"""A folder's manifest: the SHA-256 that its files must have, signed or not.

It is either plain, `{"name": "sha256", ...}`, or signed, `{"folder": "loras", "files": {"name":
"sha256", ...}, "signature": "..."}`, and then complete: workers with a trusted key take no other
file. That of embeddings is complete on Azure, where workers may not list what is there.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from cachetools import LRUCache

from imagefleet.errors import (
    MissingFileError,
    SetupError,
    TransientError,
    UnsettledFileError,
    UnusableFileError,
)
from imagefleet.files import safetensors
from imagefleet.files.kinds import FileKind
from imagefleet.files.safetensors import Identity, MalformedError, identify, whole
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.protocol import BlobStore
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict, JSONObject

#: Characters in the hash of a checkpoint's file ("AutoV2"), and of a LoRA.
MODEL_CHARACTERS = 10
LORA_CHARACTERS = 12

#: The most files whose hashes this process remembers.
_REMEMBERED = 10_000

#: A LoRA of 27 MB that does not name its hash takes 25 ms of a core, one of 144 MB 130 ms: two keep
#: up with any GPU, even if every job has another.
_THREADS = 2

#: The hash in a LoRA's header of all that follows the header, from its trainer. JSON escapes the
#: quotes of any text in which this might stand otherwise.
_NAMED = re.compile(rb'"sshs_model_hash" ?: ?"([0-9a-fA-F]{12,64})"')

#: A file's SHA-256 in hex, once it is known; None: it cannot be read.
FutureHash = Future[str | None]

NAME = "manifest.json"

#: The largest manifest: some 100 bytes a file.
MAX_BYTES = 16 * 2**20
MAX_FILES = 100_000

#: A worker reads a manifest again after this time; a replaced file is fetched again by then.
READ_AGAIN_SECONDS = 300.0


class FileHashes:
    """Hashes of files, each in the background and once; None for what has none.

    For one thread, that of the event loop.
    """

    def __init__(self) -> None:
        self._found: LRUCache[Hashable, FutureHash] = LRUCache(_REMEMBERED)
        self._threads = ThreadPoolExecutor(_THREADS, "hashes")

    def of_model(self, path: Path, sha256: str | None = None) -> FutureHash:
        """The hash of a checkpoint's single file; None for a folder. *sha256* if it is known."""
        is_file = path.is_file()
        if is_file and sha256 is None:
            return self._start(path, _hash_model)
        known: FutureHash = Future()
        known.set_result(
            sha256.lower()[:MODEL_CHARACTERS] if is_file and sha256 else None
        )
        return known

    def of_lora(self, path: Path, identity: Identity | None = None) -> FutureHash:
        """The hash of a LoRA, which was *identity* when it was checked; raises as `_try`."""
        return self._start(path, hash_lora, identity)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(
        self, path: Path, read: Callable[[Path], str], identity: Identity | None = None
    ) -> FutureHash:
        if identity is None:
            with contextlib.suppress(OSError):  # its reader will say why
                identity = identify(path)
        key = identity or path
        found = self._found.get(key)
        if found is None or found.cancelled():
            found = self._found[key] = self._threads.submit(_try, read, path, identity)
        return found


def _try(
    read: Callable[[Path], str], path: Path, identity: Identity | None
) -> str | None:
    """A file's hash, or None; of a LoRA, UnsettledFileError if it is no longer that *identity*."""
    try:
        with whole(identity) if identity else contextlib.nullcontext():
            return read(path)
    except (OSError, MalformedError, UnsettledFileError) as error:
        if isinstance(error, UnsettledFileError) and read is hash_lora:
            raise  # its images are drawn anew, with the LoRA that is there then
        why = str(error) or "it is damaged"
        log.warning(
            f"the hash of {path.name} is left out of its images: {why}",
            action="hash_unknown",
        )
        return None


def _hash_model(path: Path) -> str:
    return safetensors.sha256_of(path)[:MODEL_CHARACTERS]


def hash_lora(path: Path) -> str:
    """The hash of all but the header, as kohya's additional networks have it."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(safetensors.LENGTH_BYTES), "little")
        if size > safetensors.MAX_HEADER_BYTES:
            raise MalformedError
        named = _NAMED.search(file.read(size))
        sha256 = (
            named[1].decode()
            if named
            else hashlib.file_digest(file, "sha256").hexdigest()
        )
    return sha256[:LORA_CHARACTERS]


class DamagedError(TransientError):
    """The manifest is damaged."""


@dataclass(frozen=True)
class Contents:
    files: Mapping[str, str] = field(default_factory=dict)
    #: The fields its signature covers; empty where it is plain.
    signed: JSONObject = field(default_factory=dict)
    signature: object = None

    @property
    def is_signed(self) -> bool:
        return self.signature is not None

    def is_signed_by(self, trusted: TrustedKeys | None, folder: str) -> bool:
        is_for_it = self.signed.get("folder") == folder
        return is_for_it and bool(
            trusted and trusted.accept(_purpose(folder), self.signed, self.signature)
        )


def parse(where: str, content: bytes) -> Contents:
    """Parses a manifest; raises DamagedError, or SetupError if it is too large."""
    if len(content) > MAX_BYTES:
        raise too_large(where)
    try:
        found = json.loads(content)
        is_plain = not isinstance(found.get("files"), dict)
        files = found if is_plain else found["files"]
        hashes = {name: sha256.lower() for name, sha256 in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f'{where} is not a JSON manifest, {{"name": "sha256", ...}}: {error}'
        ) from None
    if len(hashes) > MAX_FILES:
        raise too_large(where)
    if is_plain:
        return Contents(hashes)
    signature = found.pop("signature", None)
    return Contents(hashes, found, signature)


def encode(folder: str, files: Mapping[str, str], key: SigningKey | None) -> bytes:
    """A manifest's content: plain without a *key*."""
    fields: JSONDict = dict(files)
    if key is not None:
        fields = {"folder": folder, "files": fields}
        fields["signature"] = key.sign(_purpose(folder), fields)
    return json.dumps(fields, indent=2, sort_keys=True).encode()


def too_large(where: str) -> SetupError:
    return SetupError(
        f"{where} is too large: {MAX_BYTES / 2**20:.0f} MiB and {MAX_FILES:,} files are allowed"
    )


def _purpose(folder: str) -> str:
    return f"manifest of {folder}"


@dataclass(eq=False)
class Manifest:
    """The manifest of a folder, read again from time to time; there need not be one.

    With *trusted* keys it must be signed by one of them, and what it does not list is refused; that
    of a kind that does not stop without a list need not exist even then, and lists nothing.
    """

    _where: str
    _read: Callable[[], Awaitable[bytes | None]]
    _kind: FileKind
    _trusted: TrustedKeys | None = None
    _hashes: Mapping[str, str] = field(default_factory=dict)
    _read_at: float = -math.inf

    @classmethod
    def stored(
        cls, blobs: BlobStore, kind: FileKind, trusted: TrustedKeys | None
    ) -> Self:
        name = f"{kind.folder}/{NAME}"
        where = f"{name} in the container {blobs.name!r}"
        return cls(where, partial(blobs.read, name, MAX_BYTES), kind, trusted)

    async def sha256(self, name: str) -> str | None:
        """The hash that the file must have, or None where any will do.

        Raises:
            TransientError: the manifest cannot be read, or is damaged; SetupError: it is too
            large. With trusted keys also MissingFileError: it does not list the file; SetupError:
            it is missing, damaged or not signed.
        """
        now = time.monotonic()
        if now - self._read_at > READ_AGAIN_SECONDS:
            await self._load()
        if self._trusted is None or name in self._hashes:
            return self._hashes.get(name)
        if self._read_at < now:
            await self._load()  # the file may be new
        if name not in self._hashes:
            raise MissingFileError(
                f"{self._where}, which is signed, does not list {name!r}:"
                f" `{self._kind.add_command}` with IMAGEFLEET_SIGNING_KEY lists it"
            )
        return self._hashes[name]

    async def names(self) -> Collection[str]:
        """The files that it lists, as it is now; raises as `sha256`."""
        await self._load()
        return self._hashes.keys()

    def same_as(self, name: str) -> set[str]:
        """The other names that it lists with the hash of *name*: of LoRAs, one is an alias."""
        sha256 = self._hashes.get(name)
        return {other for other, each in self._hashes.items() if each == sha256} - {
            name
        }

    def forget(self) -> None:
        """Reads it again the next time: it and a file disagree, and one of them is old."""
        self._read_at = -math.inf

    async def _load(self) -> None:
        began_at = time.monotonic()
        try:
            content = await self._read()
        except UnusableFileError:
            raise too_large(self._where) from None
        # It may be half-written; going on without it would mean to trust any file. In a thread:
        # a large one takes half a second.
        self._hashes = await asyncio.to_thread(self._checked, content)
        self._read_at = began_at

    def _checked(self, content: bytes | None) -> Mapping[str, str]:
        if self._trusted is None:
            return {} if content is None else parse(self._where, content).files
        if content is None:
            if not self._kind.stops_without_list:
                return {}
            raise self._untrusted("there is none")
        try:
            contents = parse(self._where, content)
        except TransientError as error:
            raise self._untrusted(error.message) from None
        if not contents.is_signed_by(self._trusted, self._kind.folder):
            raise self._untrusted(
                "another key signed it" if contents.is_signed else "it is plain"
            )
        return contents.files

    def _untrusted(self, why: str) -> SetupError:
        # Not the job's fault: a damaged manifest would send every job with a LoRA to the poison
        # queue.
        return SetupError(
            f"{self._where} must be signed with the trusted key, but {why}:"
            f" `{self._kind.add_command}` with IMAGEFLEET_SIGNING_KEY signs it"
        )
