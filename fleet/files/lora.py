"""`imagefleet lora`: LoRAs in the storage, which prompts name as <lora:NAME:0.8>."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fleet import console, options
from fleet.files.model import CACHE, Cache, Manifest, Sha256, described
from imagefleet.storage.settings import SignerSettings, StorageSettings

if TYPE_CHECKING:
    from fleet.files.transfer import Stored

FOLDER = "loras"

Source = Annotated[
    str,
    typer.Argument(metavar="FILE|URL", help="A .safetensors file, or the https:// address of one."),
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its name in prompts; by default the file's.")
]

app = typer.Typer(no_args_is_help=True, help="LoRAs in the storage, for the prompts of all jobs.")


@app.command("add")
@options.from_settings(SignerSettings)
def add_command(
    settings: SignerSettings,
    source: Source,
    name: Name = None,
    sha256: Sha256 = None,
    manifest: Manifest = False,
    cache: Cache = CACHE,
    as_json: options.AsJson = False,
) -> None:
    """Puts a LoRA into the storage and prints its tag for prompts.

    It must be one for Stable Diffusion 1.x, 2.x or SDXL. If the storage has a loras/manifest.json,
    or there is a signing key, its hash is listed there: workers refuse another file of its name.

    imagefleet lora add magic-fantasy-forest-v2.safetensors

    imagefleet lora add 'https://civitai.com/api/download/models/55199' --name magic-forest
    """
    from worker.files import kinds, loras

    async def add() -> tuple[Stored, str, bool]:
        from fleet.files import named, transfer

        keys = settings.keys()
        async with transfer.local_file(source, sha256, kinds.SD1_LORA, cache) as path:
            kind = kinds.find_kind(transfer.check_kind(path, kinds.SD1_LORA))
            named.check_size(path, loras.MAX_BYTES, "a LoRA")
            stem = named.name_of(name, path)
            stored, is_listed = await named.store(
                settings, FOLDER, stem, path, f"{kind.family} LoRA", keys=keys, create=manifest
            )
            return stored, stem, is_listed

    stored, stem, is_listed = console.run(add())
    tag = f"<lora:{stem}:1>"
    if as_json:
        console.print_json({**asdict(stored), "tag": tag, "in_manifest": is_listed})
        return
    console.print_note(
        f"{stored.outcome}:"
        f" {stored.bytes / 1e6:,.1f} MB, SHA-256 {stored.sha256}"
        + (f", {described(settings, FOLDER)}" if is_listed else "")
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

    if_empty = "no LoRAs in the storage: `imagefleet lora add` stores one"
    listing.show(settings, FOLDER, ".safetensors", if_empty=if_empty, as_json=as_json)
