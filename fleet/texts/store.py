"""Stores text states: those that the storage lacks, made while others are on their way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from fleet.files import transfer
from fleet.files.listed import Listing
from fleet.texts.sources import States
from imagefleet import concurrency, errors
from imagefleet.storage.protocol import Storage
from worker.engine.pixel import text_states
from worker.files import manifest

#: States made before they are stored; an interrupted command makes no more than these to its end.
CHUNK = 16

UPLOADS = 8

#: States listed at once: each time the whole list is written. After an interruption, those that are
#: stored and not listed are made anew.
LISTED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Lacking:
    """The text states that the storage lacks, of so many."""

    stems: list[str]
    of: int


async def find_lacking(storage: Storage, stems: Collection[str], listing: Listing) -> Lacking:
    """What is not stored; with a signing key also what is not listed, which workers do not take.

    Raises:
        SetupError: the list cannot be changed with these keys, or would become too large.
    """
    listed = await listing.files()
    known = {
        name.rpartition("/")[2].removesuffix(text_states.SUFFIX)
        async for name in storage.files.names(f"{listing.folder}/")
    }
    if listing.keys.signing:
        known &= listed.keys()
    lacking = [stem for stem in stems if stem not in known]
    if listing.keys.signing and len(listed.keys() | set(stems)) > manifest.MAX_FILES:
        raise manifest.too_large(listing.blob)
    return Lacking(lacking, len(stems))


async def store(
    storage: Storage,
    states: States,
    stems: Iterable[str],
    listing: Listing,
    on_stored: Callable[[], None] = lambda: None,
) -> bool:
    """Stores the states of *stems*; tells whether they are listed.

    Raises:
        SetupError: the states cannot be made or read; TransientError: the storage did not answer.
    """
    hashes: dict[str, str] = {}
    is_listed = False

    def read(some: list[str]) -> dict[str, bytes]:
        return {stem: states.read(stem) for stem in some}

    async def put(item: tuple[str, bytes]) -> None:
        stem, data = item
        blob = f"{listing.folder}/{stem}{text_states.SUFFIX}"
        sha256 = hashlib.sha256(data).hexdigest()
        metadata = {transfer.SHA256: sha256, transfer.KIND: states.encoder}
        is_new = await storage.files.create(blob, data, transfer.CONTENT_TYPE, metadata)
        if not is_new and listing.keys.signing:
            await _replace(storage, blob, data)
        hashes[stem] = sha256
        on_stored()

    async def put_all(ready: dict[str, bytes]) -> None:
        nonlocal is_listed
        await concurrency.for_each(ready.items(), put, UPLOADS)
        if hashes and (len(hashes) >= LISTED_AT_ONCE or not ready):
            is_listed = await listing.add_all(hashes)
            hashes.clear()

    left = iter(stems)
    ready: dict[str, bytes] = {}
    while chunk := list(islice(left, CHUNK)):
        ready, _ = await concurrency.gather(asyncio.to_thread(read, chunk), put_all(ready))
    await put_all(ready)
    await put_all({})
    return is_listed


async def _replace(storage: Storage, blob: str, data: bytes) -> None:
    """Puts what is to be signed in the place of what somebody stored."""
    part = await storage.files.read_part(blob, 0, 1)
    version = None if part is None else part.version
    if not await storage.files.replace(blob, data, transfer.CONTENT_TYPE, version):
        raise errors.TransientError(
            f"{blob} is being changed by others: run the same command again in a moment"
        )
