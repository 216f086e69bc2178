"""`imagefleet lora`: LoRAs in the storage, which prompts name as <lora:NAME:0.8>."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fleet import console, options
from fleet.files.model import CACHE, Cache, Sha256
from imagefleet import errors
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

if TYPE_CHECKING:
    from fleet.files.transfer import Stored

FOLDER = "loras"

_MANIFEST_TRIES = 5
_MAX_MANIFEST_BYTES = 2**25

app = typer.Typer(no_args_is_help=True, help="LoRAs in the storage, for the prompts of all jobs.")


@app.command("add")
@options.from_settings(StorageSettings)
def add_command(
    settings: StorageSettings,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL", help="A .safetensors file, or the https:// address of one."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name in prompts; by default the file's.")
    ] = None,
    sha256: Sha256 = None,
    manifest: Annotated[
        bool,
        typer.Option(
            "--manifest", help="List its hash in loras/manifest.json, even if there is none yet."
        ),
    ] = False,
    cache: Cache = CACHE,
    as_json: options.AsJson = False,
) -> None:
    """Puts a LoRA into the storage and prints its tag for prompts.

    It must be one for Stable Diffusion 1.x. If the storage has a loras/manifest.json, its hash is
    listed there: workers refuse another file of its name.

    imagefleet lora add magic-fantasy-forest-v2.safetensors

    imagefleet lora add 'https://civitai.com/api/download/models/55199' --name magic-forest
    """
    from worker.files import kinds, loras

    async def add() -> tuple[Stored, str, bool]:
        from fleet.files import transfer

        async with transfer.local_file(source, sha256, kinds.SD1_LORA, cache) as path:
            transfer.check_lora(path)
            if path.stat().st_size > loras.MAX_BYTES:
                raise errors.SetupError(
                    f"{str(path)!r} has more than {loras.MAX_BYTES / 2**20:,.0f} MiB, the most"
                    " that workers take for a LoRA"
                )
            stem = _checked_name(name or path.stem)
            async with open_storage(settings) as storage:
                await storage.create()
                blob = f"{FOLDER}/{stem}.safetensors"
                stored = await transfer.store(storage, blob, path, "SD 1.x LoRA")
                is_listed = await _list_hash(storage, stem, stored.sha256, create=manifest)
                return stored, stem, is_listed

    stored, stem, is_listed = console.run(add())
    tag = f"<lora:{stem}:1>"
    if as_json:
        console.print_json({**asdict(stored), "tag": tag, "in_manifest": is_listed})
        return
    console.print_note(
        f"{stored.blob} {'is stored' if stored.is_new else 'was stored before'}:"
        f" {stored.bytes / 1e6:,.1f} MB, SHA-256 {stored.sha256}"
        + (", listed in loras/manifest.json" if is_listed else "")
        + "; prompts use it as"
    )
    console.print_plain(tag)


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the LoRAs in the storage.

    imagefleet lora list
    """
    from fleet.files import listing

    rows = console.run(listing.read(settings, FOLDER, (".safetensors",)))
    if as_json:
        console.print_json({"loras": [asdict(row) for row in rows]})
    else:
        listing.show(rows, "no LoRAs in the storage: `imagefleet lora add` stores one")


def _checked_name(stem: str) -> str:
    name = stem.removesuffix(".safetensors")
    if not SAFE_NAME.fullmatch(name):
        raise errors.SetupError(
            f"the name {name[:80]!r} is refused: give a --name of letters, digits, spaces and"
            " _ . + ( ) - only, as prompts may have it"
        )
    return name


async def _list_hash(storage: Storage, name: str, sha256: str, *, create: bool) -> bool:
    """Adds a hash to the manifest; returns False if there is none, and none was to be created."""
    from worker.files import loras

    blob = f"{FOLDER}/{loras.MANIFEST}"
    for _ in range(_MANIFEST_TRIES):
        part = await storage.files.read_part(blob, 0, _MAX_MANIFEST_BYTES)
        if part is None and not create:
            return False
        hashes = loras.read_manifest(f"{blob} in the storage", part.data) if part else {}
        if hashes.get(name) == sha256:
            return True
        content = json.dumps({**hashes, name: sha256}, indent=2, sort_keys=True).encode()
        version = part.version if part else None
        if await storage.files.replace(blob, content, "application/json", version):
            return True
    raise errors.TransientError(
        f"{blob} is being changed by others: run the same command again in a moment"
    )
