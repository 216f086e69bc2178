"""`imagefleet text`: text states in the storage, for stages of a cascade without a text encoder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet import console, options
from fleet.files.model import Manifest, described
from fleet.load import reading
from imagefleet import errors, signing
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings

if TYPE_CHECKING:
    from fleet.texts.sources import Encoded, Made
    from fleet.texts.store import Lacking

#: Prompts that a dry run shows.
_SHOWN = 10

app = typer.Typer(
    no_args_is_help=True,
    help="Text states in the storage, for stages of a cascade without a text encoder.",
)


@app.command("add")
@options.from_settings(SignerSettings)
def add_command(
    settings: SignerSettings,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FOLDER",
            help="Jobs as for `imagefleet load`: a template (.yaml, .toml), a file of jobs (.jsonl,"
            " .json, .csv, .parquet, .txt with a prompt per line), or - for standard input; or a"
            " folder of text states made elsewhere.",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A stage in diffusers format, with its text encoder's weights."
        ),
    ] = None,
    form: options.JobFormat = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of jobs; overrides FILE's.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Overrides the template's seed.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N, for the text encoder.")
    ] = "auto",
    manifest: Manifest = False,
    dry_run: Annotated[bool, options.dry_run("how many prompts have no text states")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Makes the text states of jobs' prompts and puts them into the storage.

    A text encoder reads each prompt and negative prompt once, on this machine; stages of DeepFloyd
    IF whose folders have no weights in text_encoder draw from what it says. Prompts whose states
    are in the storage are passed over, so an interrupted command goes on where it was. With a
    signing key, they are listed in text-states/manifest.json.

    imagefleet text add jobs.jsonl --model ./IF-I-M-v1.0

    imagefleet text add jobs.jsonl --model ./IF-I-M-v1.0 --dry-run

    imagefleet text add ./states
    """
    from fleet.files import missing
    from fleet.files.listed import Listing
    from fleet.texts import sources, store
    from worker.files import manifest as manifests

    keys = settings.keys()
    states: Encoded | Made
    jobs = None
    if Path(source).is_dir():
        if model is not None or form or count or seed is not None:
            raise errors.SetupError(
                "--model, --format, --count and --seed are for jobs; this is a folder of states"
            )
        states = sources.Made(Path(source))
    else:
        states, jobs = _encoded(
            source, model, form, count, seed, device, is_shown=not as_json, key=keys.signing
        )

    async def add() -> tuple[Lacking, bool]:
        async with open_storage(settings) as storage:
            if not dry_run:
                await storage.create()
            elif not missing.may_exist(storage):
                return store.Lacking([*states.stems], len(states.stems)), False
            folder = manifests.TEXT_STATES
            listing = Listing(storage, folder, keys, create=manifest)
            lacking = await store.find_lacking(storage, states.stems, listing)
            if dry_run or not lacking.stems:
                return lacking, False
            total = len(lacking.stems)
            with console.counting("text states", total, quiet=as_json) as on_stored:
                listed = await store.store(storage, states, lacking.stems, listing, on_stored)
            return lacking, listed

    lacking, is_listed = console.run(add())
    stored = 0 if dry_run else len(lacking.stems)
    if as_json:
        console.print_json(
            {
                "encoder": states.encoder,
                "jobs": jobs,
                "prompts": lacking.of,
                "missing": len(lacking.stems),
                "stored": stored,
                "in_manifest": is_listed,
            }
        )
        return
    of = f"of {console.counted(lacking.of, 'prompt')} by {states.encoder}"
    if dry_run:
        _show_missing(lacking, states, of)
        return
    console.print_note(
        f"{stored:,} text states stored, {lacking.of - stored:,} were there, {of}"
        + (f"; {described(settings, manifests.TEXT_STATES)}" if is_listed else "")
    )


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the text states in the storage: each file's encoder and size; prompts are not in them.

    imagefleet text list
    """
    from fleet.files import listing
    from worker.files import manifest

    if_empty = "no text states in the storage: `imagefleet text add` makes and stores them"
    listing.show(settings, manifest.TEXT_STATES, ".safetensors", if_empty=if_empty, as_json=as_json)


def _encoded(
    source: str,
    model: Path | None,
    form: str | None,
    count: int | None,
    seed: int | None,
    device: str,
    *,
    is_shown: bool,
    key: signing.SigningKey | None,
) -> tuple[Encoded, int]:
    """What makes the text states of the jobs in a file, and how many jobs these are."""
    from fleet.texts import sources
    from fleet.worker.command import require_libraries
    from loadgen.sources import open_source

    if model is None:
        raise errors.SetupError(
            "--model: name the folder of a stage whose text encoder reads the prompts"
        )
    require_libraries()
    read = functools.partial(reading, Path(source), is_shown=is_shown)
    prompts = sources.Prompts()
    with read("reading") as on_read:
        opened = open_source(source, form=form, count=count, seed=seed, on_read=on_read, key=key)
    with read("reading", jobs=opened.jobs_to_make) as on_read:
        opened.check(0, on_read, prompts.add)
    return sources.Encoded(model, prompts, device), prompts.jobs


def _show_missing(lacking: Lacking, states: Encoded | Made, of: str) -> None:
    console.print_note(f"{len(lacking.stems):,} {of} have no text states in the storage")
    for stem in lacking.stems[:_SHOWN]:
        console.print_plain(states.describe(stem))
