"""Text states of jobs' prompts: made on this machine or elsewhere, and stored where they lack."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet import console
from fleet.files import missing, transfer
from fleet.files.stored import Listing
from fleet.files.transfer import Report
from fleet.filling import reading
from imagefleet import concurrency, errors
from imagefleet.files.kinds import TEXT
from imagefleet.job.message import Job
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import SignerSettings
from loadgen.sources import Source
from worker.engine.pixel import text_states
from worker.files import manifest
from worker.settings import WorkerSettings, require_libraries

UPLOADS = 8

#: Prompts that a dry run shows.
_SHOWN = 10

#: States listed at once: each time the whole list is written. After an interruption, those that are
#: stored and not listed are made anew.
LISTED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class States:
    """Text states that are to be stored."""

    encoder: str
    shown: Mapping[str, str]
    """Each as a person knows it, by the stem of its file's name."""
    read: Callable[[str], bytes]
    """The content of the file with a stem, maybe made in seconds; for any thread."""
    jobs: int | None = None


def made(folder: Path) -> States:
    """The states in a folder; raises SetupError if there is none, or a file of another kind."""
    files = {path.stem: path for path in sorted(folder.glob(f"*{TEXT.suffixes[0]}"))}
    encoders = {transfer.check_file(path, TEXT) for path in files.values()}
    if len(encoders) != 1:
        said = ", ".join(sorted(encoders)) or "none"
        raise errors.SetupError(
            f"{str(folder)!r} should have the text states of one text encoder, and has {said}"
        )
    shown = {stem: path.name for stem, path in files.items()}
    return States(encoders.pop(), shown, lambda stem: files[stem].read_bytes())


def encoded(
    jobs: str,
    settings: WorkerSettings,
    open_jobs: Callable[..., Source],
    *,
    is_shown: bool,
) -> States:
    """The states of the prompts of jobs, by a stage's encoder; raises SetupError if it cannot."""
    require_libraries()
    from worker.engine import device
    from worker.engine.pixel import text_stage

    model = Path(settings.model)
    text_stage.require_encoder(model)
    encoder = text_stage.encoder_name(model)
    prompts: dict[str, str] = {}
    read_jobs = 0
    one_at_a_time = threading.Lock()

    def add(_place: str, job: Job) -> None:
        nonlocal read_jobs
        read_jobs += 1
        for stage in job.stages_left():
            for prompt in (stage.parsed_prompt, stage.parsed_negative_prompt):
                text = text_states.clean(str(prompt))
                prompts[text_states.stem(text, encoder)] = text

    @functools.cache
    def load() -> text_stage.TextStage:
        found = device.find_device(settings.device)
        return text_stage.TextStage(model, found, device.find_dtype("auto", found))

    def read(stem: str) -> bytes:
        with one_at_a_time:  # so that they do not depend on which prompts come together
            (states,) = load().encode([prompts[stem]])
        return text_states.content(prompts[stem], encoder, states)

    with reading(Path(jobs), "reading", is_shown=is_shown):
        open_jobs(jobs).check(0, add)
    return States(encoder, prompts, read, read_jobs)


def write(states: States, folder: Path) -> Report:
    """Writes the states that a *folder* lacks, for `add` on another machine; SetupError."""
    paths = {stem: folder / f"{stem}{TEXT.suffixes[0]}" for stem in states.shown}
    lacking = [stem for stem, path in paths.items() if not path.exists()]
    with console.counting("text states", len(lacking)) as on_written:
        for stem in lacking:
            console.write_file(paths[stem], states.read(stem))
            on_written()
    document = {"encoder": states.encoder, "jobs": states.jobs, "prompts": len(paths)}
    return Report(
        {**document, "written": len(lacking)}, lines=[paths[each].name for each in lacking]
    )


async def add(
    settings: SignerSettings, states: States, *, create: bool, dry_run: bool, quiet: bool
) -> Report:
    """Stores the states that the storage lacks, or raises a FleetError; *create* is `Listing`'s."""
    is_listed = False
    async with open_storage(settings) as storage:
        listing = Listing(storage, TEXT.folder, settings.keys(), create=create)
        if not dry_run:
            await storage.create()
        lacking = await _lacking(storage, states.shown, listing)
        if lacking and not dry_run:
            with console.counting("text states", len(lacking), quiet=quiet) as on_stored:
                is_listed = await _store(storage, states, lacking, listing, on_stored)
    stored, prompts = 0 if dry_run else len(lacking), len(states.shown)
    document = {
        "encoder": states.encoder,
        "jobs": states.jobs,
        "prompts": prompts,
        "missing": len(lacking),
        "stored": stored,
        "in_manifest": is_listed,
    }
    of = f"of {console.counted(prompts, 'prompt')} by {states.encoder}"
    if dry_run:
        note = f"{len(lacking):,} {of} have no text states in the storage"
        return Report(document, [note], [states.shown[stem] for stem in lacking[:_SHOWN]])
    note = f"{stored:,} text states stored, {prompts - stored:,} were there, {of}"
    return Report(document, [note + (f"; {listing.described}" if is_listed else "")])


async def _lacking(storage: Storage, stems: Collection[str], listing: Listing) -> list[str]:
    """What is not stored; with a signing key also what is not listed, as no worker takes that."""
    if not missing.may_exist(storage):
        return [*stems]
    listed = await listing.files()
    known = await missing.stored(storage, TEXT)
    if listing.keys.signing:
        known &= listed.keys()
        if len({*listed, *stems}) > manifest.MAX_FILES:
            raise manifest.too_large(listing.blob)
    return [stem for stem in stems if stem not in known]


async def _store(
    storage: Storage,
    states: States,
    stems: Sequence[str],
    listing: Listing,
    on_stored: Callable[[], None],
) -> bool:
    """Stores the states of *stems*, and makes others meanwhile; tells whether they are listed."""
    hashes: dict[str, str] = {}
    is_listed = False

    async def put(stem: str) -> None:
        data = await asyncio.to_thread(states.read, stem)
        blob = f"{TEXT.folder}/{stem}{TEXT.suffixes[0]}"
        sha256 = hashlib.sha256(data).hexdigest()
        metadata = {transfer.SHA256: sha256, transfer.CONTENT: states.encoder}
        is_new = await storage.files.create(blob, data, transfer.CONTENT_TYPE, metadata)
        if not is_new and listing.keys.signing:  # what somebody stored is not signed unseen
            await transfer.overwrite(storage, blob, data, transfer.CONTENT_TYPE)
        hashes[stem] = sha256
        on_stored()

    for start in range(0, len(stems), LISTED_AT_ONCE):
        hashes.clear()
        await concurrency.for_each(stems[start : start + LISTED_AT_ONCE], put, UPLOADS)
        is_listed = await listing.change(hashes)
    return is_listed
