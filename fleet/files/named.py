"""Stores a file that prompts name: a LoRA, or an embedding."""

from __future__ import annotations

from pathlib import Path

from fleet.files import transfer
from fleet.files.listed import Listing
from fleet.files.transfer import Stored
from imagefleet import errors, signing
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings


def name_of(given: str | None, path: Path) -> str:
    """The name in prompts: the *given* one, or the file's.

    Raises:
        SetupError: prompts cannot have it.
    """
    name = (given or path.stem).removesuffix(".safetensors")
    if not SAFE_NAME.fullmatch(name):
        raise errors.SetupError(
            f"the name {name[:80]!r} is refused: give a --name of letters, digits, spaces and"
            " _ . + ( ) - only, as prompts may have it"
        )
    return name


def check_size(path: Path, most_bytes: int, what: str) -> None:
    """Raises SetupError if workers would refuse the file."""
    if path.stat().st_size > most_bytes:
        raise errors.SetupError(
            f"{str(path)!r} has more than {most_bytes / 2**20:,.0f} MiB, the most that workers take"
            f" for {what}"
        )


async def store(
    settings: SignerSettings,
    folder: str,
    name: str,
    path: Path,
    kind: str,
    *,
    keys: signing.Keys,
    create: bool,
) -> tuple[Stored, bool]:
    """Stores the file, and lists it in the folder's manifest; tells whether it is listed there.

    *create* as of `Listing`.
    """
    async with open_storage(settings) as storage:
        await storage.create()
        listing = Listing(storage, folder, keys, create=create)
        await listing.check()
        stored = await transfer.store(storage, f"{folder}/{name}.safetensors", path, kind)
        return stored, await listing.add(name, stored.sha256)
