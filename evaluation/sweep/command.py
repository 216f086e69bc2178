"""`imagefleet sweep`: captions in all combinations of settings, as one campaign."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cli import console, filling, options, target
from cli.options import argument, option
from evaluation.sweep import manifest
from evaluation.sweep.manifest import Group
from evaluation.sweep.source import CaptionFile, SweepSource, all_groups
from imagefleet.errors import SetupError
from imagefleet.job.change import Change
from imagefleet.storage import enqueue
from imagefleet.storage.open import open_storage, signer_of
from imagefleet.validation import JSONDict
from loadgen.settings import LoadSettings

#: The fields that may have several values, and their values by default.
_COMBINED = {
    "cfg_scale": "7",
    "sampler_name": "Euler a",
    "steps": "20",
    "model": "",
    "lora_strength": "1",
}

#: What a job has from its caption and its group, or what would give it more than one image.
_OF_THE_SWEEP = {
    **dict.fromkeys(
        ("id", "prompt", "metadata", "enable_prompt_comments"), "the caption says it"
    ),
    "seed": "it follows from the caption and --seed",
    "campaign": "use --campaign",
    "verify": "use --verify-share",
    "batch_size": "each caption is one image of a group",
    "n_iter": "each caption is one image of a group",
}

#: Groups that the table shows; `--json` has all.
_SHOWN_GROUPS = 40


@dataclass(frozen=True)
class Captions:
    file: Path = argument(
        "Captions: .txt with one per line, .jsonl with `caption`, `prompt` or `text`, or"
        " COCO's annotations (.json); all also as .gz.",
        metavar="FILE",
    )
    campaign: str = option(
        "The campaign, which holds nothing else.", ..., metavar="NAME"
    )
    count: int | None = option("Only the first so many captions.", min=1)
    form: str | None = option(
        "By default as FILE's name says.", None, "--format", metavar="txt|jsonl|coco"
    )
    seed: int = option(
        "Another one gives all captions other seeds.", 0, min=0, max=2**53 - 1
    )


@dataclass(frozen=True)
class Sending(filling.Sending):
    dry_run: bool = options.dry_run("the groups")


@options.flat
def command(
    settings: LoadSettings,
    captions: Captions,
    sending: Sending,
    fields: list[str] | None = option(
        "Values with commas of cfg_scale, sampler_name, steps, model or lora_strength,"
        " which are combined; or the value of all jobs of lora or another field of a job."
        " Repeatable.",
        None,
        "--set",
        metavar="FIELD=VALUES",
    ),
    as_json: options.AsJson = False,
) -> None:
    """Draws captions with all combinations of settings.

    They are one campaign, to be scored by group. A caption has the same seed in every group. The
    same command again adds nothing; after an interruption it goes on where it was, from another
    machine as well.

    imagefleet sweep captions.txt --campaign curve --set cfg_scale=1.5,2,3,4,5,6,7,8 --dry-run

    imagefleet sweep captions_val2014.json --campaign curve --set sampler_name=PLMS --set steps=50
    """
    target.check_name("--campaign", captions.campaign)
    is_shown = not (sending.quiet or as_json)
    reading = functools.partial(filling.reading, captions.file, is_shown=is_shown)
    groups, shared = _groups_and_shared(fields or [])
    with reading("reading"):
        file = CaptionFile(captions.file, form=captions.form, count=captions.count)
    source = SweepSource(
        file,
        groups,
        captions.campaign,
        seed=captions.seed,
        job=shared,
        signer=signer_of(settings),
    )
    drawn_with = _models_of(source)
    for name in sending.model or []:
        if name not in drawn_with:
            raise SetupError(
                f"--model {name[:60]} is none of --set model=LIST, nor of a stage's in `then`: it"
                " says that workers have a model from elsewhere; they say what is drawn with"
            )
    with reading("checking"):
        source.check()
    if sending.dry_run:
        _show_groups(source, as_json=as_json)
        return
    if is_shown:
        console.print_note(source.describe())
    console.run(_note(settings, source, sending))
    name = str(source.path)
    facts = functools.partial(_facts, source)
    filling.fill(settings, source, name, sending, as_json=as_json, facts=facts)


async def _note(settings: LoadSettings, source: SweepSource, sending: Sending) -> None:
    """Notes the sweep in the storage.

    Raises SetupError for a campaign that is another sweep, JobError for a model that no worker can
    have.
    """
    async with open_storage(settings) as storage:
        await storage.create()
        # A name that is mistyped must not be the campaign's for ever.
        elsewhere = sending.model or ()
        await enqueue.JobSender(storage, sending.priority, elsewhere=elsewhere).check(
            _models_of(source)
        )
        await manifest.write(storage, source.sweep)


def _models_of(source: SweepSource) -> set[str]:
    """The models that its jobs name, in all their stages."""
    stages = (stage for job in source.first_jobs() for stage in job.stages_left())
    return {stage.model for stage in stages if stage.model}


def _groups_and_shared(
    texts: Iterable[str],
) -> tuple[tuple[Group, ...], JSONDict]:
    """The groups of all combinations, and what jobs share; raises SetupError for invalid texts."""
    given = _given(texts)
    lora = given.pop("lora", None)
    if "lora_strength" in given and not lora:
        raise SetupError("--set lora_strength goes with --set lora=NAME")
    combined = {
        name: [value.strip() for value in given.pop(name, default).split(",")]
        for name, default in _COMBINED.items()
    }
    groups = all_groups(
        combined["cfg_scale"],
        combined["sampler_name"],
        combined["steps"],
        [model or None for model in combined["model"]],
        lora,
        combined["lora_strength"] if lora else [None],
    )
    shared = Change.read(f"{name}={text}" for name, text in given.items()).values
    return groups, shared


def _given(texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator:
            raise SetupError(
                f"--set {text[:80]}: should be FIELD=VALUES, say steps=20,50"
            )
        if name in _OF_THE_SWEEP:
            raise SetupError(f"--set {name}: {_OF_THE_SWEEP[name]}")
        if name in found:
            raise SetupError(
                f"--set {name} is there twice: give its values with commas"
            )
        found[name] = values
    return found


def _facts(source: SweepSource) -> JSONDict:
    told = source.sweep.model_dump(include={"campaign", "captions", "seed", "groups"})
    return {**told, "images": source.sweep.images}


def _show_groups(source: SweepSource, *, as_json: bool) -> None:
    sweep = source.sweep
    if as_json:
        console.print_json(_facts(source))
        return
    console.print_plain(source.describe())
    console.print_plain(f"captions' SHA-256: {sweep.captions.sha256}")
    columns = ["group", "guidance", "sampler", "steps", "model", "LoRA", "strength"]
    rows = (dict(group).values() for group in sweep.groups[:_SHOWN_GROUPS])
    console.print_tables("", console.table(columns, rows=rows))
    console.print_more(len(sweep.groups) - _SHOWN_GROUPS, "more")
