"""Text states of jobs' prompts: made on this machine or elsewhere, and stored where they lack."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from fleet import console
from fleet.files import missing, transfer
from fleet.files.listed import Listing
from fleet.load import reading
from fleet.worker.command import require_libraries
from imagefleet import concurrency, errors
from imagefleet.files.kinds import TEXT
from imagefleet.job import chain
from imagefleet.job.message import Job
from imagefleet.signing import SigningKey
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import SignerSettings
from loadgen.sources import open_source
from worker.engine.pixel import text_states
from worker.files import manifest

#: States made before they are stored; an interrupted command makes no more than these to its end.
CHUNK = 16

UPLOADS = 8

#: States listed at once: each time the whole list is written. After an interruption, those that are
#: stored and not listed are made anew.
LISTED_AT_ONCE = 1_000


class States(Protocol):
    """Text states that are to be stored, by the stem of their files' names."""

    encoder: str

    @property
    def stems(self) -> Collection[str]: ...

    def describe(self, stem: str) -> str:
        """One of them, as a person knows it."""

    def read(self, stem: str) -> bytes:
        """The content of a file; takes seconds where an encoder has to make it.

        Raises:
            SetupError: it cannot be read, or the encoder cannot be loaded.
        """


class Encoded:
    """The states of jobs' prompts by the text encoder of a stage, which is loaded for the first."""

    def __init__(self, model: Path, device: str) -> None:
        """*model* is the stage's folder.

        Raises:
            SetupError: it has no text encoder, or a library is missing.
        """
        require_libraries()
        from worker.engine.pixel import text_stage

        text_stage.require_encoder(model)
        self.encoder = text_stage.encoder_name(model)
        self.jobs = 0
        self._prompts: dict[str, str] = {}
        self._model = model
        self._device = device
        self._stage: text_stage.TextStage | None = None

    @property
    def stems(self) -> Collection[str]:
        return self._prompts.keys()

    def add(self, _place: str, job: Job) -> None:
        """Adds the prompts of all of a job's stages, and the negative ones."""
        self.jobs += 1
        for stage in chain.left(job):
            for prompt in (stage.parsed_prompt, stage.parsed_negative_prompt):
                text = text_states.clean(str(prompt))
                self._prompts[text_states.stem(text, self.encoder)] = text

    def describe(self, stem: str) -> str:
        return self._prompts[stem]

    def read(self, stem: str) -> bytes:
        from worker.engine import device
        from worker.engine.pixel import text_stage

        if self._stage is None:
            found = device.find_device(self._device)
            dtype = device.find_dtype("auto", found)
            self._stage = text_stage.TextStage(self._model, found, dtype)
        prompt = self._prompts[stem]
        # One by one, so that they do not depend on which prompts come together.
        (states,) = self._stage.encode([prompt])
        return text_states.content(prompt, self.encoder, states)


class Made:
    """A folder of states that `python -m worker.engine.pixel.text_stage` has made."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError if there is none in the *folder*, or a file is of another kind."""
        self._files = {each.stem: each for each in sorted(folder.glob(f"*{TEXT.suffixes[0]}"))}
        encoders = {transfer.check_file(each, TEXT) for each in self._files.values()}
        if len(encoders) != 1:
            said = ", ".join(sorted(encoders)) or "none"
            raise errors.SetupError(
                f"{str(folder)!r} should have the text states of one text encoder, and has {said}"
            )
        (self.encoder,) = encoders

    @property
    def stems(self) -> Collection[str]:
        return self._files.keys()

    def describe(self, stem: str) -> str:
        return self._files[stem].name

    def read(self, stem: str) -> bytes:
        try:
            return self._files[stem].read_bytes()
        except OSError as error:
            raise errors.SetupError(
                f"{self._files[stem]} cannot be read: {error.strerror}"
            ) from None


def encoded(
    jobs: str,
    model: Path,
    device: str,
    *,
    form: str | None,
    count: int | None,
    seed: int | None,
    is_shown: bool,
    key: SigningKey | None,
) -> Encoded:
    """The states of the prompts in a file of jobs; raises SetupError as `Encoded`."""
    states = Encoded(model, device)
    read = functools.partial(reading, Path(jobs), is_shown=is_shown)
    with read("reading") as on_read:
        opened = open_source(jobs, form=form, count=count, seed=seed, on_read=on_read, key=key)
    with read("reading", jobs=opened.jobs_to_make) as on_read:
        opened.check(0, on_read, states.add)
    return states


@dataclass(frozen=True, slots=True)
class Outcome:
    """Text states that the storage lacked, and whether those that were stored are listed."""

    missing: list[str]
    stored: int
    in_manifest: bool


async def add(
    settings: SignerSettings, states: States, *, create: bool, dry_run: bool, quiet: bool
) -> Outcome:
    """Stores the states that the storage lacks; *create* is `Listing`'s.

    Raises:
        SetupError: they cannot be made, read or listed; TransientError: the storage did not answer.
    """
    async with open_storage(settings) as storage:
        if not dry_run:
            await storage.create()
        elif not missing.may_exist(storage):
            return Outcome([*states.stems], 0, in_manifest=False)
        listing = Listing(storage, TEXT.folder, settings.keys(), create=create)
        lacking = await _lacking(storage, states.stems, listing)
        if dry_run or not lacking:
            return Outcome(lacking, 0, in_manifest=False)
        with console.counting("text states", len(lacking), quiet=quiet) as on_stored:
            is_listed = await _store(storage, states, lacking, listing, on_stored)
        return Outcome(lacking, len(lacking), is_listed)


async def _lacking(storage: Storage, stems: Collection[str], listing: Listing) -> list[str]:
    """What is not stored; with a signing key also what is not listed, which workers do not take.

    Raises:
        SetupError: the list cannot be changed with these keys, or would become too large.
    """
    listed = await listing.files()
    known = {
        TEXT.stem(name.rpartition("/")[2]) async for name in storage.files.names(f"{TEXT.folder}/")
    }
    if listing.keys.signing:
        known &= listed.keys()
        if len(listed.keys() | set(stems)) > manifest.MAX_FILES:
            raise manifest.too_large(listing.blob)
    return [stem for stem in stems if stem not in known]


async def _store(
    storage: Storage,
    states: States,
    stems: Iterable[str],
    listing: Listing,
    on_stored: Callable[[], None],
) -> bool:
    """Stores the states of *stems*, and makes others meanwhile; tells whether they are listed."""
    hashes: dict[str, str] = {}
    is_listed = False

    def read(some: list[str]) -> dict[str, bytes]:
        return {stem: states.read(stem) for stem in some}

    async def put(item: tuple[str, bytes]) -> None:
        stem, data = item
        blob = f"{TEXT.folder}/{stem}{TEXT.suffixes[0]}"
        sha256 = hashlib.sha256(data).hexdigest()
        metadata = {transfer.SHA256: sha256, transfer.CONTENT: states.encoder}
        is_new = await storage.files.create(blob, data, transfer.CONTENT_TYPE, metadata)
        if not is_new and listing.keys.signing:  # what somebody stored is not signed unseen
            await transfer.overwrite(storage, blob, data, transfer.CONTENT_TYPE)
        hashes[stem] = sha256
        on_stored()

    async def put_all(ready: Mapping[str, bytes]) -> None:
        nonlocal is_listed
        await concurrency.for_each(ready.items(), put, UPLOADS)
        if hashes and (len(hashes) >= LISTED_AT_ONCE or not ready):
            is_listed = await listing.change(hashes)
            hashes.clear()

    left = iter(stems)
    ready: dict[str, bytes] = {}
    while chunk := list(islice(left, CHUNK)):
        ready, _ = await concurrency.gather(asyncio.to_thread(read, chunk), put_all(ready))
    await put_all(ready)
    await put_all({})
    return is_listed
