"""What jobs name that is not in the storage: LoRAs, models and other files, and their images."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rich.table import Column

from fleet import console
from imagefleet import errors, signing, validation
from imagefleet.job import chain
from imagefleet.job.message import Job
from imagefleet.job.passes import sources
from imagefleet.storage.open import LOCAL_SCHEME, open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import SignerSettings
from worker.files import manifest

Kind = Literal["LoRA", "model", "embedding", "upscaler", "ControlNet", "image"]

FOLDERS: dict[Kind, str] = {
    "LoRA": "loras",
    "model": "models",
    "embedding": "embeddings",
    "upscaler": manifest.UPSCALERS,
    "ControlNet": manifest.CONTROLNETS,
    "image": sources.INPUTS.removesuffix("/"),
}

#: The kinds of files that most jobs name some of.
_USUAL: tuple[Kind, ...] = ("LoRA", "model", "embedding")

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "LoRA": (".safetensors",),
    "model": (".safetensors", ".tar"),
    "embedding": (".safetensors",),
    "upscaler": (".safetensors",),
    "ControlNet": (".safetensors",),
    "image": (),
}

#: Jobs that name a file, of which so many are reported with their places.
MAX_PLACES = 3

#: ComfyUI's way to name one; a plain word may be one or not.
_EMBEDDING = re.compile(r"\bembedding:([A-Za-z0-9_][A-Za-z0-9_.+-]*)", re.IGNORECASE)


@dataclass(slots=True)
class Use:
    """A file that jobs name."""

    kind: Kind
    name: str
    jobs: int = 0
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Missing:
    """A file that jobs name and workers would not find."""

    kind: Kind
    name: str
    jobs: int
    places: list[str]
    reason: str


class Uses:
    """The files that jobs name; each name once, however many jobs there are."""

    def __init__(self) -> None:
        self.jobs = 0
        self.by_name: dict[tuple[Kind, str], Use] = {}

    def add(self, place: str, job: Job) -> None:
        self.jobs += 1
        for kind, name in set[tuple[Kind, str]]().union(*map(named, chain.left(job))):
            use = self.by_name.get((kind, name))
            if use is None:
                use = self.by_name[kind, name] = Use(kind, name)
            use.jobs += 1
            if len(use.places) < MAX_PLACES:
                use.places.append(place)

    def count(self, kind: Kind) -> int:
        """The number of files of one kind."""
        return sum(each.kind == kind for each in self.by_name.values())


def named(job: Job) -> set[tuple[Kind, str]]:
    """The files that a stage of a job names."""
    names: set[tuple[Kind, str]] = {("LoRA", tag.name) for tag in job.parsed_prompt.loras}
    if job.model is not None:
        names.add(("model", job.model))
    names |= {("upscaler", name) for name in job.upscaler_files}
    names |= {("ControlNet", unit.model) for unit in job.controls}
    # An image of the fleet itself may be drawn until it is needed.
    names |= {
        ("image", place.blob.removeprefix(sources.INPUTS))
        for place in map(sources.place, job.sources)
        if place is not None and place.container == "files"
    }
    for text in (job.prompt, job.negative_prompt, job.hr_prompt, job.hr_negative_prompt):
        for name in _EMBEDDING.findall(text):
            names.add(("embedding", _stem(name.rstrip(".-"), (".safetensors", ".pt", ".bin"))))
    return names


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What workers have besides the storage."""

    lora_directory: Path | None = None
    models: Iterable[str] = ()

    def names(self, kind: Kind) -> set[str]:
        """Raises SetupError if the folder of LoRAs cannot be read."""
        if kind == "model":
            return {_stem(PurePosixPath(each).name, _SUFFIXES[kind]) for each in self.models}
        if kind != "LoRA" or self.lora_directory is None:
            return set()
        try:
            files = [each.name for each in self.lora_directory.iterdir() if each.is_file()]
        except OSError as error:
            raise errors.SetupError(
                f"--lora-directory {self.lora_directory} cannot be read: {error.strerror}"
            ) from None
        return set(_names(files, _SUFFIXES[kind]))


async def look(settings: SignerSettings, uses: Uses, elsewhere: Elsewhere) -> list[Missing]:
    """Finds what is missing in the storage of *settings*."""
    async with open_storage(settings) as storage:
        return await find(storage, uses, settings.keys(), elsewhere)


async def find(
    storage: Storage, uses: Uses, keys: signing.Keys, elsewhere: Elsewhere
) -> list[Missing]:
    """What is missing, the file that most jobs name first.

    One listing for each kind of file that is named. With a signing key, workers use what is in the
    signed list of the folder alone; of embeddings on Azure, what is in the list in any case.

    Raises:
        SetupError: the container of files cannot be used; or a list is not signed with the key.
    """
    missing = []
    for kind, folder in FOLDERS.items():
        wanted = [each for each in uses.by_name.values() if each.kind == kind]
        if not wanted:
            continue
        own = elsewhere.names(kind)
        stored = await _stored(storage, kind)
        needs_list = (keys.signing and kind != "image") or (
            kind == "embedding" and not _is_local(storage)
        )
        listed = await _listed(storage, folder, keys) if needs_list else None
        for use in wanted:
            if use.name in own or (use.name in stored and (listed is None or use.name in listed)):
                continue
            if use.name in stored:
                signed = ", which is signed" if keys.signing else ""
                reason = (
                    f"not listed in {folder}/{manifest.NAME}{signed}:"
                    f" `{manifest.ADD_COMMANDS[folder]}` lists it"
                )
            else:
                reason = f"not in {folder}/{validation.suggestion(use.name, own | stored)}"
            missing.append(Missing(kind, use.name, use.jobs, use.places, reason))
    return sorted(missing, key=lambda each: -each.jobs)


def summary(uses: Uses, found: list[Missing]) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "jobs": uses.jobs,
        "named": {folder: uses.count(kind) for kind, folder in FOLDERS.items()},
        "missing": [asdict(each) for each in found],
    }


def show(uses: Uses, found: list[Missing]) -> None:
    """Prints a table of what is missing, and the numbers of what is named, on stderr."""
    if found:
        table = console.table(
            "kind",
            console.name_column("name"),
            console.number_column("jobs"),
            "first in",
            Column("why", overflow="fold"),
        )
        for each in found:
            table.add_row(
                each.kind,
                console.untrusted(each.name),
                f"{each.jobs:,}",
                console.untrusted("; ".join(each.places)),
                console.untrusted(each.reason),
            )
        console.print_tables(table)
    named = ", ".join(
        console.counted(uses.count(kind), kind)
        for kind in FOLDERS
        if kind in _USUAL or uses.count(kind)
    )
    are = "none is missing" if not found else f"{len(found):,} of them missing"
    console.print_note(f"{console.counted(uses.jobs, 'job')} with {named}: {are}; nothing was sent")
    if uses.count("embedding"):
        console.print_warning(
            "`embedding:NAME` is how ComfyUI names an embedding; workers draw the word 'embedding'"
            " as well, as AUTOMATIC1111 does: write NAME alone"
        )


async def _stored(storage: Storage, kind: Kind) -> set[str]:
    folder = FOLDERS[kind]
    if not may_exist(storage):
        return set()
    await storage.files.check()
    paths = [name async for name in storage.files.names(f"{folder}/")]
    if kind == "image":
        return {each.removeprefix(f"{folder}/") for each in paths}
    # A folder within it is none of a job's: its names are one segment.
    files = [PurePosixPath(each).name for each in paths if each.count("/") == 1]
    return set(_names(files, _SUFFIXES[kind]))


def _is_local(storage: Storage) -> bool:
    return storage.url.startswith(LOCAL_SCHEME)


def may_exist(storage: Storage) -> bool:
    """False for a local storage that the first load will create."""
    return not _is_local(storage) or Path(storage.url.removeprefix(LOCAL_SCHEME)).exists()


async def _listed(storage: Storage, folder: str, keys: signing.Keys) -> set[str]:
    """The names in a folder's list, which must be signed if there is a key."""
    where = f"{folder}/{manifest.NAME}"
    content = await storage.files.read(where, manifest.MAX_BYTES)
    if content is None:
        return set()
    contents = manifest.parse(where, content)
    if keys.signing and not contents.is_signed_by(keys.trusted, folder):
        raise errors.SetupError(
            f"{where} in the container {storage.files.name!r} is not signed with your key:"
            f" `{manifest.ADD_COMMANDS[folder]}` signs it"
        )
    return {_stem(name, _SUFFIXES["model"]) for name in contents.files}


def _names(files: Iterable[str], suffixes: tuple[str, ...]) -> Iterable[str]:
    return (_stem(each, suffixes) for each in files if each.endswith(suffixes))


def _stem(name: str, suffixes: tuple[str, ...]) -> str:
    suffix = next((each for each in suffixes if name.endswith(each)), "")
    return name.removesuffix(suffix)
