"""`files make text`: what a stage's text encoder says of jobs' prompts, in files for workers."""

import asyncio
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cli import console, options
from cli.filling import reading
from cli.options import option
from fleet.files import add, missing
from fleet.files.add import Manifest
from fleet.files.stored import Listing, Ready
from imagefleet.files.kinds import TEXT
from imagefleet.job.message import Job
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings
from loadgen.sources import open_source
from worker.engine.pixel import text_states
from worker.settings import WorkerSettings, require_libraries

#: States that are stored and listed together: those that were not are made anew after a kill.
CHUNK = 256

#: Prompts that a dry run shows.
_SHOWN = 10


class MakeSettings(WorkerSettings, SignerSettings):
    """Settings of `files make`: a worker's, and the key that signs what is stored."""


@dataclass(frozen=True)
class MakeOptions:
    form: options.JobFormat = None
    count: int | None = option("Number of jobs; overrides JOBS'.", min=1)
    seed: int | None = option("Overrides the template's seed.", min=0, max=2**63 - 1)
    manifest: Manifest = False
    output: Path = option(
        "Where the files of kernels are written.", Path("kernels"), metavar="FOLDER"
    )


def make(
    settings: MakeSettings,
    jobs: str,
    given: MakeOptions,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Makes and stores what the storage lacks; raises a FleetError if it cannot."""
    require_libraries()
    from worker.engine.flow import encoders

    encoder = encoders.name_of(Path(settings.model))
    prompts = {}
    count = 0

    def note(_place: str, job: Job) -> None:
        nonlocal count
        count += 1
        for stage in job.stages_left():
            for prompt in (stage.parsed_prompt, stage.parsed_negative_prompt):
                text = text_states.read_by(encoder, str(prompt))
                prompts[text_states.stem(text, encoder)] = text

    with reading(Path(jobs), "reading", is_shown=not as_json):
        source = open_source(jobs, form=given.form, count=given.count, seed=given.seed)
        source.check(note)
    lacking, is_listed = console.run(
        _make(settings, encoder, prompts, given, dry_run=dry_run, quiet=as_json)
    )
    stored = 0 if dry_run else len(lacking)
    document = {
        "encoder": encoder,
        "jobs": count,
        "prompts": len(prompts),
        "missing": len(lacking),
        "stored": stored,
        "in_manifest": is_listed,
    }
    of = f"of {console.counted(len(prompts), 'prompt')} by {encoder}"
    said = f"{stored:,} text states stored, {len(prompts) - stored:,} were there, {of}"
    shown = []
    if dry_run:
        said = f"{len(lacking):,} {of} have no text states in the storage"
        shown = [prompts[stem] for stem in lacking[:_SHOWN]]
    console.show(document, *shown, notes=[said], as_json=as_json)


async def _make(
    settings: MakeSettings,
    encoder: str,
    prompts: dict[str, str],
    given: MakeOptions,
    *,
    dry_run: bool,
    quiet: bool,
) -> tuple[list[str], bool]:
    """Returns the stems of what was lacking, and whether it is listed now."""
    from worker.engine import device
    from worker.engine.flow import encoders

    is_listed = False
    async with open_storage(settings) as storage:
        listing = Listing(storage, TEXT.folder, settings.keys(), create=given.manifest)
        if not dry_run:
            await storage.create()
        there = await _stored(listing, prompts)
        lacking = [stem for stem in prompts if stem not in there]
        if dry_run or not lacking:
            return lacking, False
        stage = encoders.open_encoder(
            Path(settings.model), device.find_device(settings.device)
        )

        def write(folder: str, stem: str) -> Ready:
            # One by one, so that they do not depend on which prompts come together.
            (states,) = stage.encode([prompts[stem]])
            path = Path(folder, f"{stem}{TEXT.suffixes[0]}")
            path.write_bytes(text_states.content(prompts[stem], encoder, states))
            return Ready(path, path.name, encoder)

        with console.counting("text states", len(lacking), quiet=quiet) as on_made:
            for start in range(0, len(lacking), CHUNK):
                with tempfile.TemporaryDirectory() as folder:
                    ready = []
                    for stem in lacking[start : start + CHUNK]:
                        ready.append(await asyncio.to_thread(write, folder, stem))
                        on_made()
                    await add.store(listing, TEXT, ready)
                is_listed = ready[0].in_manifest
    return lacking, is_listed


async def _stored(listing: Listing, stems: Collection[str]) -> set[str]:
    """Stems of stored states; with a signing key only listed ones, as workers take no others."""
    if not missing.may_exist(listing.storage):
        return set()
    listed = await listing.check(stems)
    stored = missing.names_of(TEXT, await missing.rows_of(listing.storage, TEXT))
    return stored & listed.keys() if listing.keys.signing else stored
