"""`imagefleet files`: adds, lists, removes and makes files of each kind in the storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fleet import console, options
from fleet.files import add, canary, kernels, stored, texts
from fleet.files.add import AddOptions
from fleet.worker.command import require_libraries
from imagefleet import errors, validation
from imagefleet.files import kinds
from imagefleet.files.kinds import KINDS, FileKind
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings
from worker.files import check
from worker.files.kernels import archive
from worker.node import reference
from worker.settings import WorkerSettings

_NAMED = ("model", "lora", "embedding", "controlnet", "upscaler")
_MADE = ("kernels", "text", "canary")

#: Prompts that a dry run shows.
_SHOWN = 10

app = typer.Typer(
    no_args_is_help=True,
    help="Files that workers read from the storage: models, LoRAs, embeddings and others.",
)

Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}.")]


class MakeSettings(WorkerSettings, SignerSettings):
    """Settings of `files make`: a worker's, and the key that signs what is stored."""


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """The options of `files make`; all are for certain kinds alone."""

    form: options.JobFormat = None
    count: Annotated[int | None, typer.Option(min=1, help="Number of jobs; overrides JOBS'.")] = (
        None
    )
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Overrides the template's seed.")
    ] = None
    manifest: Annotated[
        bool,
        typer.Option("--manifest", help="List the text states in text-states/manifest.json."),
    ] = False
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the file of kernels is written.")
    ] = Path("kernels")


#: The kinds that take an option which not all take.
_ADD_OPTIONS: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("name", "sha256", "cache"), _NAMED),
    "test": ("model",),
    "replace": ("kernels",),
}
_MAKE_OPTIONS: Mapping[str, Collection[str]] = {
    **{
        name: ("kernels", "text")
        if name in {*SignerSettings.model_fields, "device"}
        else ("kernels",)
        for name in MakeSettings.model_fields
        if name != "model"
    },
    **dict.fromkeys(("jobs", "form", "count", "seed", "manifest", "signing_key"), ("text",)),
    "output": ("kernels",),
    "dry_run": ("kernels", "text"),
}


@app.command("add")
@options.from_settings(SignerSettings)
def add_command(
    settings: SignerSettings,
    context: typer.Context,
    kind: Kind,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|FOLDER|URL...",
            help="A .safetensors file or its https:// address; of a model also a folder in"
            " diffusers format; what `files make kernels` wrote; a folder of text states.",
        ),
    ],
    given: AddOptions,
    dry_run: Annotated[bool, options.dry_run("what would be stored")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Puts files into the storage and prints by what jobs or workers name them.

    Each is checked first. Its hash is listed in the folder's manifest.json if there is one, or a
    signing key: workers refuse another file of its name. An interrupted download or upload goes on
    where it was. Of a model, a test image is drawn on this machine and written to the current
    folder, and so are the reference images by which nodes check what they draw. Kernels are
    programs: add only what you have made yourself, on a machine that you trust.

    imagefleet files add lora magic-fantasy-forest-v2.safetensors

    imagefleet files add model 'https://civitai.com/api/download/models/128713?token=...'

    imagefleet files add kernels kernels --dry-run
    """
    found = _kind(kind)
    _refuse_foreign(context, kind, _ADD_OPTIONS)
    if found is kinds.TEXT:
        if len(sources) != 1 or not Path(sources[0]).is_dir():
            raise errors.SetupError(
                "text states are added as one folder; of jobs' prompts `imagefleet files make text`"
                " makes them"
            )
        states = texts.Made(Path(sources[0]))
        _add_texts(settings, states, given.manifest, dry_run=dry_run, as_json=as_json)
        return
    added = console.run(add.add(settings, found, sources, given, dry_run=dry_run))
    if as_json:
        files = [{**asdict(stored), **ready.facts} for ready, stored in added.files]
        document = {"files": files, "in_manifest": added.in_manifest, "dry_run": dry_run}
        console.print_json(document)
        return
    listed = f", {_listed(settings, found)}" if added.in_manifest else ""
    for ready, file in added.files:
        would = "would be " if dry_run and file.change != "was there" else ""
        console.print_note(
            f"{file.blob}: {would}{file.change}: {file.content}, {file.bytes / 1e6:,.1f} MB,"
            f" SHA-256 {file.sha256}{listed}; {found.use}"
        )
        console.print_plain(
            found.handle.format(stem=file.name, name=ready.name, sha256=file.sha256)
        )


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(settings: StorageSettings, kind: Kind, as_json: options.AsJson = False) -> None:
    """Lists the files of a kind in the storage; of text states, prompts are not shown.

    imagefleet files list lora
    """
    found = _kind(kind)

    async def read() -> list[stored.Row]:
        async with open_storage(settings) as storage:
            return await stored.read(storage, found)

    rows = console.run(read())
    if as_json:
        console.print_json({"files": [asdict(row) for row in rows]})
    elif rows:
        stored.show(rows)
    else:
        console.print_note(f"{found.folder}/ is empty: `{found.add_command}` stores files there")


@app.command("remove")
@options.from_settings(SignerSettings)
def remove_command(
    settings: SignerSettings,
    kind: Kind,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Their names, as `files list` has them.")
    ],
    yes: options.Yes = False,
    dry_run: Annotated[bool, options.dry_run("what would be removed")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Removes files from the storage and from the folder's manifest.json.

    Jobs that name them fail from then on, but for workers that have them in their cache.

    imagefleet files remove lora magic-fantasy-forest-v2 --dry-run

    imagefleet files remove lora magic-fantasy-forest-v2
    """
    found = _kind(kind)

    async def remove(rows: list[stored.Row] | None = None) -> list[stored.Row]:
        async with open_storage(settings) as storage:
            if rows is None:
                return await stored.find(storage, found, names)
            await stored.remove(storage, found, rows, settings.keys())
            return rows

    rows = console.run(remove())
    if not dry_run:
        shown = ", ".join(row.name for row in rows[:_SHOWN]) + ", ..." * (len(rows) > _SHOWN)
        size = sum(row.bytes for row in rows) / 1e6
        question = f"Remove {shown} ({size:,.1f} MB) from {found.folder}/? Jobs may name them."
        console.confirm(question, yes=yes)
        console.run(remove(rows))
    if as_json:
        console.print_json({"files": [asdict(row) for row in rows], "dry_run": dry_run})
        return
    for row in rows:
        console.print_plain(f"{found.folder}/{row.name}: {'would be ' if dry_run else ''}removed")


@app.command("make")
@options.from_settings(MakeSettings)
def make_command(
    settings: MakeSettings,
    context: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(_MADE)}.")],
    given: MakeOptions,
    jobs: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOBS]",
            help="For text: jobs as for `imagefleet load`, a template (.yaml, .toml), a file of"
            " jobs (.jsonl, .json, .csv, .parquet, .txt with a prompt per line), or - for standard"
            " input.",
        ),
    ] = None,
    dry_run: Annotated[bool, options.dry_run("what would be made")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Makes kernels, text states or a canary for a model.

    kernels: compiles for this machine's GPU and writes one file, for `files add kernels`, or for
    the workers' image with --kernels. It is for workers with the same GPU, major version of the
    driver, torch, imagefleet and kind of model. Takes a worker's settings; what that worker has
    compiled into --cache is packed as well.

    text: reads each prompt of JOBS with the text encoder of the stage --model and stores what it
    says, for stages of DeepFloyd IF without one. What the storage has is passed over, so an
    interrupted command goes on where it was.

    canary: draws the reference images of the model in --model and puts them beside it; nodes
    compare what they draw with them. `files add model` does the same for a model in the storage.

    imagefleet files make kernels --model ./model

    imagefleet files make text jobs.jsonl --model ./IF-I-M-v1.0

    imagefleet files make canary --model dreamshaper-8.safetensors
    """
    if kind not in _MADE:
        raise _unknown(kind, _MADE)
    _refuse_foreign(context, kind, _MAKE_OPTIONS)
    if kind == "kernels":
        _make_kernels(settings, given.output, dry_run=dry_run, as_json=as_json)
    elif kind == "canary":
        _make_canary(Path(settings.model), as_json=as_json)
    else:
        if jobs is None:
            raise errors.SetupError("JOBS is missing: the file of jobs whose prompts are read")
        states = texts.encoded(
            jobs,
            Path(settings.model),
            settings.device,
            form=given.form,
            count=given.count,
            seed=given.seed,
            is_shown=not as_json,
            key=settings.keys().signing,
        )
        _add_texts(settings, states, given.manifest, dry_run=dry_run, as_json=as_json)


def _make_kernels(settings: WorkerSettings, output: Path, *, dry_run: bool, as_json: bool) -> None:
    settings, key, folder = kernels.place(settings)
    target = output / f"{key.name}{archive.SUFFIX}"
    size = None
    if dry_run:
        console.print_note("would compile for this GPU and write")
    else:
        console.print_note("compiling for this GPU: a minute or two, once")
        header = kernels.make(settings, key, folder, target)
        size = target.stat().st_size
        console.print_note(f"{header.files} files, {size / 1e6:,.1f} MB:")
    if as_json:
        console.print_json({"path": str(target), "key": asdict(key), "bytes": size})
    else:
        console.print_plain(str(target))


def _make_canary(model: Path, *, as_json: bool) -> None:
    require_libraries()
    check.check_path(model)
    found = canary.draw(model, console.print_note)
    target = reference.beside(model)
    console.write_file(target, canary.encode(found))
    if as_json:
        facts = found.model_dump(exclude={"images"})
        console.print_json({"path": str(target), **facts})
    else:
        console.print_note(
            f"the reference images of {found.width}x{found.height}; wrong from a distance of"
            f" {found.tolerance:g} on:"
        )
        console.print_plain(str(target))


def _add_texts(
    settings: SignerSettings, states: texts.States, create: bool, *, dry_run: bool, as_json: bool
) -> None:
    """Stores the text states that the storage lacks, and prints what was done."""
    outcome = console.run(
        texts.add(settings, states, create=create, dry_run=dry_run, quiet=as_json)
    )
    prompts, lacking = len(states.stems), len(outcome.missing)
    if as_json:
        facts: dict[str, Any] = {"encoder": states.encoder, "jobs": getattr(states, "jobs", None)}
        facts |= {"prompts": prompts, "missing": lacking, "stored": outcome.stored}
        console.print_json(facts | {"in_manifest": outcome.in_manifest})
        return
    of = f"of {console.counted(prompts, 'prompt')} by {states.encoder}"
    if dry_run:
        console.print_note(f"{lacking:,} {of} have no text states in the storage")
        for stem in outcome.missing[:_SHOWN]:
            console.print_plain(states.describe(stem))
        return
    console.print_note(
        f"{outcome.stored:,} text states stored, {prompts - outcome.stored:,} were there, {of}"
        + (f"; {_listed(settings, kinds.TEXT)}" if outcome.in_manifest else "")
    )


def _listed(settings: SignerSettings, kind: FileKind) -> str:
    how = "and signed in" if settings.signing_key else "in"
    return f"listed {how} {kind.folder}/manifest.json"


def _kind(name: str) -> FileKind:
    """The kind of that name; raises SetupError for another."""
    if name not in KINDS:
        raise _unknown(name, KINDS)
    return KINDS[name]


def _unknown(name: str, known: Collection[str]) -> errors.SetupError:
    hint = validation.suggestion(name, known) or f": give one of {', '.join(known)}"
    return errors.SetupError(f"unknown kind {name[:40]!r}{hint}")


def _refuse_foreign(
    context: typer.Context, kind: str, takers: Mapping[str, Collection[str]]
) -> None:
    """Raises SetupError for an option on the command line that the kind does not take."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        takes = takers.get(parameter.name or "", (kind,))
        if kind not in takes and source is not None and source.name == "COMMANDLINE":
            flag = parameter.opts[0] if parameter.opts[0].startswith("-") else "JOBS"
            raise errors.SetupError(f"{flag} is for {', '.join(takes)}, not for {kind}")
