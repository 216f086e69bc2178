"""`imagefleet upscaler` and `imagefleet controlnet`: files in the storage, for jobs to name."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet import console, options
from fleet.files.lora import Source
from fleet.files.model import CACHE, Cache, Manifest, Sha256, described
from imagefleet.storage.settings import SignerSettings, StorageSettings

if TYPE_CHECKING:
    from fleet.files.transfer import Stored
    from worker.files.kinds import Kind
    from worker.files.library import FileKind

Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its name in jobs; by default the file's.")
]

upscaler = typer.Typer(no_args_is_help=True, help="Upscalers in the storage, for second passes.")
controlnet = typer.Typer(no_args_is_help=True, help="ControlNets in the storage, for jobs.")


@upscaler.command("add")
@options.from_settings(SignerSettings)
def add_upscaler(
    settings: SignerSettings,
    source: Source,
    name: Name = None,
    sha256: Sha256 = None,
    manifest: Manifest = False,
    cache: Cache = CACHE,
    as_json: options.AsJson = False,
) -> None:
    """Puts an upscaler into the storage and prints its name for hr_upscaler and upscaler_1.

    If the storage has an upscalers/manifest.json, or there is a signing key, its hash is listed
    there: workers refuse another file of its name.

    imagefleet upscaler add 4x_Sharp.safetensors
    """
    from worker.files import kinds
    from worker.inputs import files

    stored = _add(
        settings,
        files.UPSCALER,
        kinds.UPSCALER,
        source,
        name,
        sha256,
        manifest=manifest,
        cache=cache,
    )
    _show(settings, *stored, "hr_upscaler or upscaler_1 of jobs names it", as_json=as_json)


@controlnet.command("add")
@options.from_settings(SignerSettings)
def add_controlnet(
    settings: SignerSettings,
    source: Source,
    name: Name = None,
    sha256: Sha256 = None,
    manifest: Manifest = False,
    cache: Cache = CACHE,
    as_json: options.AsJson = False,
) -> None:
    """Puts a ControlNet into the storage and prints its name for jobs.

    If the storage has a controlnets/manifest.json, or there is a signing key, its hash is listed
    there: workers refuse another file of its name.

    imagefleet controlnet add control_v11p_sd15_canny.safetensors
    """
    from worker.files import kinds
    from worker.inputs import files

    stored = _add(
        settings,
        files.CONTROLNET,
        kinds.CONTROLNET,
        source,
        name,
        sha256,
        manifest=manifest,
        cache=cache,
    )
    _show(settings, *stored, "`model` of a ControlNet in jobs names it", as_json=as_json)


@upscaler.command("list")
@options.from_settings(StorageSettings)
def list_upscalers(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the upscalers in the storage.

    imagefleet upscaler list
    """
    _list(settings, "upscaler", as_json=as_json)


@controlnet.command("list")
@options.from_settings(StorageSettings)
def list_controlnets(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the ControlNets in the storage.

    imagefleet controlnet list
    """
    _list(settings, "controlnet", as_json=as_json)


def _add(
    settings: SignerSettings,
    of: FileKind,
    wanted: Kind,
    source: str,
    name: str | None,
    sha256: str | None,
    *,
    manifest: bool,
    cache: Path,
) -> tuple[Stored, str, str, bool]:
    """What was stored, its folder and name, and whether it is listed."""

    async def add() -> tuple[Stored, str, str, bool]:
        from fleet.files import named, transfer

        keys = settings.keys()
        async with transfer.local_file(source, sha256, wanted, cache) as path:
            transfer.check_kind(path, wanted)
            named.check_size(path, of.max_bytes, wanted.name)
            stem = named.name_of(name, path)
            stored, is_listed = await named.store(
                settings, of.folder, stem, path, of.noun, keys=keys, create=manifest
            )
            return stored, of.folder, stem, is_listed

    return console.run(add())


def _show(
    settings: SignerSettings,
    stored: Stored,
    folder: str,
    name: str,
    is_listed: bool,
    use: str,
    *,
    as_json: bool,
) -> None:
    if as_json:
        console.print_json({**asdict(stored), "name": name, "in_manifest": is_listed})
        return
    console.print_note(
        f"{stored.outcome}:"
        f" {stored.bytes / 1e6:,.1f} MB, SHA-256 {stored.sha256}"
        + (f", {described(settings, folder)}" if is_listed else "")
        + f"; {use}"
    )
    console.print_plain(name)


def _list(settings: StorageSettings, command: str, *, as_json: bool) -> None:
    from fleet.files import listing

    folder = f"{command}s"
    if_empty = f"no {folder} in the storage: `imagefleet {command} add` stores one"
    listing.show(settings, folder, ".safetensors", if_empty=if_empty, as_json=as_json)
