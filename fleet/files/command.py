"""`imagefleet files`: adds, lists, removes and makes files of each kind in the storage."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Annotated

from typer import Argument, Context, Typer

from cli import console, options
from cli.options import AsJson, Yes, argument
from fleet.files import add, making, stored, texts
from fleet.files.add import AddOptions
from fleet.files.texts import MakeOptions, MakeSettings
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.files.kinds import KINDS
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings

MADE = [kind.name for kind in KINDS.values() if kind.is_made]
BROUGHT = [kind.name for kind in KINDS.values() if not kind.is_made]

app = Typer(
    no_args_is_help=True,
    help="Files that workers read from the storage: models, LoRAs, embeddings and others.",
)

KindName = Annotated[str, Argument(metavar="KIND", help=f"{', '.join(KINDS)}.")]


#: Options of `files add` that not all kinds take, with those that do.
_ADD = {
    **dict.fromkeys(("name", "sha256", "cache"), BROUGHT),
    "replace": ("kernels",),
}


#: The same of `files make`, with the worker's settings.
_MAKE = {
    **dict.fromkeys({*MakeSettings.model_fields, "output"} - {"model"}, ("kernels",)),
    **dict.fromkeys((*SignerSettings.model_fields, "device", "dry_run"), MADE),
    **dict.fromkeys(
        ("jobs", "form", "count", "seed", "manifest", "signing_key"), ("text",)
    ),
}


@app.command("add")
@options.flat
def add_command(
    settings: SignerSettings,
    *,
    context: Context,
    given: AddOptions,
    kind: KindName,
    sources: list[str] = argument(
        "A .safetensors file or its https:// address, what `files make` wrote, or a folder"
        " of them; of a model, a folder in diffusers format.",
        metavar="FILE|FOLDER|URL",
    ),
    dry_run: bool = options.dry_run("what would be stored"),
    as_json: AsJson = False,
) -> None:
    """Puts files into the storage and prints by what jobs or workers name them.

    Each is checked first. Its hash is listed in the folder's manifest.json if there is one, or a
    signing key: workers refuse another file of its name. An interrupted download or upload goes on
    where it was. Kernels are programs: add only what you have made yourself, on a machine that you
    trust.

    imagefleet files add lora magic-fantasy-forest-v2.safetensors

    imagefleet files add model 'https://civitai.com/api/download/models/128713?token=...'

    imagefleet files add kernels kernels --dry-run
    """
    found = validation.choose("kind", kind, KINDS)
    _refuse_foreign(context, kind, _ADD)
    console.run(
        add.add(settings, found, sources, given, dry_run=dry_run, as_json=as_json)
    )


@app.command("list")
@options.flat
async def list_command(
    settings: StorageSettings, kind: KindName, as_json: AsJson = False
) -> None:
    """Lists the files of a kind in the storage; of text states, prompts are not shown.

    imagefleet files list lora
    """
    found = validation.choose("kind", kind, KINDS)
    async with open_storage(settings) as storage:
        rows = await stored.read(storage, found)
    cells = (
        (
            row.name,
            f"{row.bytes / 1e6:,.1f}",
            row.content,
            f"{row.added_at:%Y-%m-%d %H:%M}",
            row.sha256 and row.sha256[:12],
        )
        for row in rows
    )
    table = console.table(["name"], ["MB"], ["content", "added", "SHA-256"], rows=cells)
    empty = f"{found.folder}/ is empty: `{found.add_command}` stores files there"
    console.show(
        {"files": [asdict(row) for row in rows]},
        *([table] if rows else []),
        notes=[] if rows else [empty],
        as_json=as_json,
    )


@app.command("remove")
@options.flat
async def remove_command(
    settings: SignerSettings,
    kind: KindName,
    names: list[str] = argument(
        "Their names, as `files list` has them.", metavar="NAME..."
    ),
    yes: Yes = False,
    dry_run: bool = options.dry_run("what would be removed"),
    as_json: AsJson = False,
) -> None:
    """Removes files from the storage and from the folder's manifest.json.

    Jobs that name them fail from then on, but for workers that have them in their cache.

    imagefleet files remove lora magic-fantasy-forest-v2 --dry-run

    imagefleet files remove lora magic-fantasy-forest-v2
    """
    found = validation.choose("kind", kind, KINDS)
    async with open_storage(settings) as storage:
        rows = await stored.find(storage, found, names)
        if not dry_run:
            shown = ", ".join(row.name for row in rows)
            size = sum(row.bytes for row in rows) / 1e6
            console.confirm(
                f"Remove {shown} ({size:,.1f} MB) from {found.folder}/? Jobs may name them.",
                yes=yes,
            )
            await stored.remove(storage, found, rows, settings.keys())
    would = "would be " if dry_run else ""
    lines = [f"{found.folder}/{row.name}: {would}removed" for row in rows]
    console.show(
        {"files": [asdict(row) for row in rows], "dry_run": dry_run},
        *lines,
        as_json=as_json,
    )


@app.command("make")
@options.flat
def make_command(
    settings: MakeSettings,
    *,
    context: Context,
    given: MakeOptions,
    kind: str = argument(f"{', '.join(MADE)}.", metavar="KIND"),
    jobs: str | None = argument(
        "For text: jobs as for `imagefleet load`, a template (.yaml, .toml), a file of"
        " jobs (.jsonl, .json, .csv, .parquet, .txt with a prompt per line), or - for standard"
        " input.",
        None,
        metavar="[JOBS]",
    ),
    dry_run: bool = options.dry_run("what would be made"),
    as_json: AsJson = False,
) -> None:
    """Makes kernels or text states for a model.

    kernels: compiles for this machine's GPU and writes a file for each graph, for `files add
    kernels`, or for the workers' image with --kernels. They are for workers with the same GPU,
    torch, imagefleet, kind of model and number of slots. Takes a worker's settings.

    text: reads each prompt of JOBS with the text encoder of the stage --model and stores what it
    says, for stages of DeepFloyd IF without one. What the storage has is passed over, so an
    interrupted command goes on where it was.

    imagefleet files make kernels --model ./model

    imagefleet files make text jobs.jsonl --model ./IF-I-M-v1.0
    """
    validation.choose("kind", kind, dict.fromkeys(MADE))
    _refuse_foreign(context, kind, _MAKE)
    if kind == "kernels":
        making.make_kernels(settings, given.output, dry_run=dry_run, as_json=as_json)
        return
    if jobs is None:
        raise SetupError("JOBS is missing: the file of jobs whose prompts are read")
    texts.make(settings, jobs, given, dry_run=dry_run, as_json=as_json)


def _refuse_foreign(
    context: Context, kind: str, takers: Mapping[str, Collection[str]]
) -> None:
    """Raises SetupError for an option on the command line that the kind does not take."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        takes = takers.get(parameter.name or "", (kind,))
        if kind not in takes and source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[0] if parameter.opts[0].startswith("-") else "JOBS"
            raise SetupError(f"{flag} is for {', '.join(takes)}, not for {kind}")
