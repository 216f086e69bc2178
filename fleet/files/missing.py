"""Finds the LoRAs, models, images and other files that jobs name and the storage has not."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from rich.console import Console

from cli import console
from fleet.files.stored import Listing, StoredFile, read
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.files.kinds import (
    CONTROLNET,
    DETECTOR,
    EMBEDDING,
    JUDGE,
    LORA,
    MODEL,
    UPSCALER,
    VAE,
    FileKind,
)
from imagefleet.job.message import Job
from imagefleet.job.passes import img2img
from imagefleet.signing import Keys
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import SignerSettings
from imagefleet.validation import JSONDict
from worker.files import library

#: Images that jobs name: no file of a worker's, so they are listed in no manifest.
IMAGE = FileKind(
    "image",
    "image",
    img2img.INPUTS.removesuffix("/"),
    "jobs begin with it",
    suffixes=("",),
)

#: What jobs may name, by its noun, in the order of the report.
NAMED = {
    kind.noun: kind
    for kind in (
        LORA,
        MODEL,
        EMBEDDING,
        UPSCALER,
        CONTROLNET,
        VAE,
        DETECTOR,
        JUDGE,
        IMAGE,
    )
}

#: Jobs that name a file, of which so many are reported with their places.
MAX_PLACES = 3


@dataclass(slots=True)
class Use:
    """A file that jobs name, and why workers would not find it."""

    kind: str
    name: str
    jobs: int = 0
    places: list[str] = field(default_factory=list)
    reason: str = ""


class Uses:
    """The files that jobs name, by their kind's noun and their name."""

    def __init__(self) -> None:
        self.jobs = 0
        self.by_kind: dict[str, dict[str, Use]] = {noun: {} for noun in NAMED}

    def add(self, place: str, job: Job) -> None:
        self.jobs += 1
        for kind, name in set[tuple[str, str]]().union(*map(named, job.stages_left())):
            self.note(place, kind, name)

    def note(self, place: str, kind: str, name: str) -> None:
        use = self.by_kind[kind].setdefault(name, Use(kind, name))
        use.jobs += 1
        if len(use.places) < MAX_PLACES:
            use.places.append(place)


def named(job: Job) -> set[tuple[str, str]]:
    """The nouns and names of the files that a stage of a job names."""
    names: dict[FileKind, Iterable[str | None]] = {
        LORA: [tag.name for tag in job.loras],
        MODEL: [job.model, job.hr_checkpoint_name, job.refiner_checkpoint],
        VAE: [job.sd_vae],
        UPSCALER: job.upscaler_files,
        CONTROLNET: [unit.model for unit in job.controls],
        DETECTOR: [detail.ad_model for detail in job.details],
        JUDGE: job.keep.networks if job.keep else (),
        # An image of the fleet itself may be drawn until it is needed.
        IMAGE: [
            place.blob.removeprefix(img2img.INPUTS)
            for place in map(img2img.place, job.sources)
            if place is not None and place.container == "files"
        ],
    }
    return {
        (kind.noun, name)
        for kind, some in names.items()
        for name in some
        if name is not None
    }


@dataclass(frozen=True)
class Elsewhere:
    """Files that workers have besides those of the storage."""

    lora_directory: Path | None = None
    models: Iterable[str] = ()
    images: Iterable[str] = ()

    def names(self, kind: FileKind) -> set[str]:
        """Raises SetupError if the folder of LoRAs cannot be read."""
        if kind is MODEL:
            return {MODEL.stem(PurePosixPath(path).name) for path in self.models}
        if kind is IMAGE:
            return set(self.images)
        if kind is not LORA or self.lora_directory is None:
            return set()
        try:
            files = [each.name for each in library.walked(self.lora_directory)]
        except OSError as error:
            raise SetupError(
                f"--lora-directory {self.lora_directory} cannot be read: {error.strerror}"
            ) from None
        names = {LORA.stem(name) for name in files if name.endswith(LORA.suffixes)}
        return names | library.aliases(self.lora_directory).keys()


async def look(settings: SignerSettings, uses: Uses, elsewhere: Elsewhere) -> list[Use]:
    """Finds what is missing in the storage, what most jobs name first; raises SetupError.

    With a signing key, workers use what is in the signed list of the folder alone; of embeddings on
    Azure, what is in the list in any case.
    """
    keys = settings.keys()
    missing = list[Use]()
    async with open_storage(settings) as storage:
        for noun, wanted in uses.by_kind.items():
            if not wanted:
                continue
            kind = NAMED[noun]
            listing = Listing(storage, kind.folder, keys)
            own = elsewhere.names(kind)
            rows = await rows_of(storage, kind)
            there = names_of(kind, rows)
            deeper = in_folders(kind, rows)
            if kind is LORA:
                there |= await aliases(storage, keys, there)
            if settings.is_local and kind is not MODEL:
                there |= deeper.keys()
            listed = there
            needs_list = keys.signing or (kind is EMBEDDING and not settings.is_local)
            if needs_list and kind is not IMAGE:
                listed = await _listed(listing, kind)
            for use in wanted.values():
                if use.name in own or use.name in there & listed:
                    continue
                use.reason = f"not in {kind.folder}/{validation.suggestion(use.name, own | there)}"
                if use.name in deeper:
                    use.reason = (
                        f"{deeper[use.name]} is in a folder: move it to {kind.folder}/"
                    )
                if use.name in there:
                    signed = ", which is signed" if keys.signing else ""
                    use.reason = (
                        f"not listed in {listing.blob}{signed}:"
                        f" `{kind.add_command}` lists it"
                    )
                missing.append(use)
    return sorted(missing, key=lambda use: -use.jobs)


def summary(uses: Uses, found: list[Use]) -> JSONDict:
    return {
        "jobs": uses.jobs,
        "named": {NAMED[noun].folder: len(some) for noun, some in uses.by_kind.items()},
        "missing": [asdict(use) for use in found],
    }


def show(uses: Uses, found: list[Use], to: Console = console.stdout) -> None:
    """Prints a table of what is missing, and the numbers of what is named, on stderr."""
    if found:
        rows = (
            (use.kind, use.name, use.jobs, "; ".join(use.places), use.reason)
            for use in found
        )
        console.print_tables(
            console.table(["kind", "name"], ["jobs"], ["first in", "why"], rows=rows),
            to=to,
        )
    named = ", ".join(
        console.counted(len(some), noun) for noun, some in uses.by_kind.items() if some
    )
    are = "none is missing" if not found else f"{len(found):,} of them missing"
    with_files = f" with {named}" if named else ""
    console.print_note(
        f"{console.counted(uses.jobs, 'job')}{with_files}: {are}; nothing was sent"
    )


async def rows_of(storage: Storage, kind: FileKind) -> list[StoredFile]:
    """The files of a kind; none in a local storage that the first load will create."""
    return await read(storage, kind) if may_exist(storage) else []


def names_of(kind: FileKind, rows: Iterable[StoredFile]) -> set[str]:
    """The names by which jobs find what a storage has."""
    return {kind.stem(row.name) for row in rows if kind is IMAGE or "/" not in row.name}


def in_folders(kind: FileKind, rows: Iterable[StoredFile]) -> dict[str, str]:
    """The blobs of a kind in folders within its own, by the names that they would have in it."""
    paths = (PurePosixPath(row.name) for row in rows if "/" in row.name)
    found = {kind.stem(path.name): f"{kind.folder}/{path}" for path in paths}
    return {} if kind is IMAGE else found


def may_exist(storage: Storage) -> bool:
    """False for a local storage that the first load will create."""
    folder = storage.settings.local_folder
    return folder is None or folder.exists()


async def aliases(storage: Storage, keys: Keys, there: set[str]) -> set[str]:
    """The other names by which workers find LoRAs that are stored."""
    folder = library.local_path(storage.files, LORA.folder)
    found = set(library.aliases(folder)) if folder else set()
    if may_exist(storage):
        found |= await Listing(storage, LORA.folder, keys).aliases(there)
    return found


async def _listed(listing: Listing, kind: FileKind) -> set[str]:
    """The names in a folder's list, which must be signed if there is a key."""
    keys = listing.keys
    contents = await listing.read()
    if contents is None:
        return set()
    if keys.signing and not contents.is_signed_by(keys.trusted, kind.folder):
        raise SetupError(
            f"{listing.where} is not signed with your key: `{kind.add_command}` signs it"
        )
    return {kind.stem(name) for name in contents.files}
