"""`imagefleet import`: pictures of other programs as jobs that draw them again."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from cli import console, options
from cli.options import argument, option
from fleet import load
from fleet.files import missing, stored
from fleet.files.missing import Elsewhere, Uses
from fleet.prompt import chunks_of
from imagefleet.errors import JobError, SetupError
from imagefleet.files.kinds import KINDS
from imagefleet.job import message, settings_table
from imagefleet.job.noise import MAX_SEED
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings
from imagefleet.validation import JSONDict
from loadgen.infotext import source
from loadgen.infotext.reading import Named, Reading
from loadgen.rejects import Rejected

Rows = Mapping[str, Sequence[stored.StoredFile]]

#: Kinds of files whose hashes texts hold.
_HASHED = {"model", "vae", "lora", "embedding"}

#: Digits of the hashes that A1111 writes since 2023; others are of another kind.
_DIGITS = {10, 12}

_ID_CHARACTERS = 80

#: Fields and settings that name files of a kind, maybe with their hashes.
_TITLED = {
    "model": {"sd_model_checkpoint", "hr_checkpoint_name", "refiner_checkpoint"},
    "vae": {"sd_vae"},
}


@options.flat
def command(
    settings: SignerSettings,
    *,
    paths: list[Path] = argument(
        "A picture (.png, .jpg, .webp), its text (.txt), a folder of them, or a table of jobs"
        " (.csv, .jsonl) with a column `infotext`.",
        metavar="FILE|FOLDER",
    ),
    output: typer.FileTextWrite | None = option(
        "Write the jobs to this file; by default to standard output.", metavar="FILE"
    ),
    rejects: Path | None = option(
        "Write what is refused there, with what is wrong, to be mended and loaded.",
        metavar="FILE",
    ),
    quiet: bool = option("No progress.", default=False),
    as_json: bool = option("Print a summary as JSON, and no jobs.", False, "--json"),
) -> None:
    """Makes jobs that draw pictures of other programs again.

    These are AUTOMATIC1111, Forge, ComfyUI, InvokeAI, SwarmUI, Fooocus, Easy Diffusion, SD.Next,
    Draw Things and Civitai. Models, LoRAs and embeddings are looked up
    in the storage by their hashes, then by their names. What is not drawn, or only alike, is said.
    A picture whose initial image, mask or control image is not given is refused: a table's columns
    give them, such as `init_images`. Exit code 4: some are refused, or files are missing.

    imagefleet import pictures/ --output again.jsonl

    imagefleet import one.png | imagefleet load -
    """
    found = [file for path in paths for file in _expanded(path)]
    rows = console.run(_stored(settings))
    uses = Uses()
    said = Counter[str]()
    ids = Counter[str]()
    with (
        load.reporting(rejects, skips=True, as_json=as_json) as report,
        console.counting("reading", len(found), quiet=quiet or as_json) as move,
    ):
        for file in found:
            for entry, read in source.entries(file):
                row = entry
                try:
                    reading = read()
                    row = entry._replace(text=message.message_text(reading.job))
                    reading.models = [
                        _found(each, reading, rows) for each in reading.models
                    ]
                    job = _checked(reading, entry.place, uses, ids)
                    if output is not None:
                        output.write(console.json_text(job, indent=None))
                    elif not as_json:
                        console.print_json_line(job)
                except JobError as error:
                    report.reject(Rejected.of(row, error.message))
                else:
                    said.update(reading.cannot)
            move()
    lost = console.run(missing.look(settings, uses, Elsewhere()))
    if as_json:
        console.print_json(
            {
                "jobs": uses.jobs,
                "refused": report.count,
                "cannot": said,
                "missing": [asdict(each) for each in lost],
            }
        )
    else:
        for sentence, count in said.most_common():
            console.print_warning(f"{console.counted(count, 'job')}: {sentence}")
        missing.show(uses, lost, console.stderr)
    if report.count or lost:
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


def _expanded(path: Path) -> list[Path]:
    """The files of a folder, without texts beside pictures of their names; raises SetupError."""
    if not path.exists():
        raise SetupError(f"{str(path)!r} does not exist")
    if not path.is_dir():
        return [path]
    inside = sorted(
        each for each in path.rglob("*") if each.suffix.lower() in source.SUFFIXES
    )
    texts = {each for each in inside if each.suffix.lower() == ".txt"}
    pictures = {each.with_suffix("") for each in inside if each not in texts}
    return [
        each
        for each in inside
        if each not in texts or each.with_suffix("") not in pictures
    ]


async def _stored(settings: SignerSettings) -> Rows:
    async with open_storage(settings) as storage:
        return {name: await missing.rows_of(storage, KINDS[name]) for name in _HASHED}


def _found(named: Named, reading: Reading, rows: Rows) -> Named:
    """A file, called as the one in the storage with its hash; says where that is another one."""
    kind = KINDS.get(named.kind)
    digits = str(named.digits)
    if kind is None or len(digits) not in _DIGITS:
        return named
    known = {
        kind.stem(row.name): row.short_hash or "" for row in rows.get(kind.name, ())
    }
    name = kind.stem(Path(named.name or "").name)
    found = [
        stem for stem, known_hash in known.items() if known_hash.startswith(digits)
    ]
    if found:
        stored_name = name if name in found else found[0]
        _rename(reading, named, stored_name)
        return named._replace(name=stored_name)
    if known.get(name):
        reading.cannot.append(
            f"{kind.folder}/{name} is another file: its hash is not {digits}"
        )
    return named


def _rename(reading: Reading, named: Named, name: str) -> None:
    job = reading.job
    old = re.escape(named.name or "")
    if found := _TITLED.get(named.kind):
        for fields in (job, job["override_settings"]):
            for field in found & fields.keys():
                if (
                    str(named.digits) in str(fields[field])
                    or fields[field] == named.name
                ):
                    fields[field] = name
        return
    pattern = (
        rf"(?<=<lora:){old}(?=[:>])" if named.kind == "lora" else rf"(?<!\w){old}(?!\w)"
    )
    for prompt in ("prompt", "negative_prompt", "hr_prompt", "hr_negative_prompt"):
        if prompt in job:
            job[prompt] = re.sub(pattern, lambda _: name, job[prompt])


def _checked(reading: Reading, place: str, uses: Uses, ids: Counter[str]) -> JSONDict:
    """The job of a reading, with an id; raises JobError if it cannot be drawn."""
    if reading.needs:
        raise JobError(
            f"{', '.join(reading.needs)}: must be given; {reading.cannot[0]}"
        )
    fields = reading.job
    seed = fields.get("seed")
    settings = fields.get("override_settings")
    is_of_cpu = isinstance(settings, dict) and settings.get("randn_source") == "CPU"
    # torch's generator on the CPU takes 32 bits of a seed, Brownian motion all 64.
    is_brownian = "SDE" in str(fields.get("sampler_name"))
    if isinstance(seed, int) and seed > MAX_SEED and is_of_cpu and not is_brownian:
        fields["seed"] = seed % 2**32
    # In all of these programs it is the negative prompt alone.
    if fields.get("cfg_scale") == 0:
        fields.setdefault("defaults", settings_table.A1111)
    job = message.read_job(message.message_text(fields), "import")
    texts = (state for each in job.all_prompts for state in each.states)
    if reading.cuts_prompts_elsewhere and any(
        len(chunks_of(each)) > 1 for each in texts
    ):
        reading.cannot.append(
            "its prompt has more than 75 tokens, and is cut at other words: alike and not equal"
        )
    uses.add(place, job)
    for named in reading.models:
        if named.kind == "embedding" and named.name:
            uses.note(place, named.kind, named.name)
    start = re.sub(r"[^A-Za-z0-9.]+", "_", Path(place).stem).strip("_.")[
        :_ID_CHARACTERS
    ]
    job_id = f"{start or 'picture'}-{job.digest[:8]}"
    ids[job_id] += 1
    return {
        "id": f"{job_id}-{ids[job_id]}" if ids[job_id] > 1 else job_id,
        **fields,
    }
