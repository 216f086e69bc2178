"""A folder of pictures, with each of which every job of a file begins: img2img by the folder."""

import asyncio
import hashlib
import json
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from pydantic import TypeAdapter, ValidationError

from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.files.safetensors import sha256_of
from imagefleet.job import message
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.job.passes import img2img
from imagefleet.storage.protocol import BlobStore
from loadgen.formats.lines import ChangedFormat, Entry

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

#: The field of a job that a picture is in.
FIELD = "init_images"

_SOURCE = TypeAdapter[str](img2img.ImageSource)

#: Hexadecimal digits of a picture's SHA-256 in its name: a changed picture is another one.
_DIGITS = 12

#: Pictures that are sent at once.
_AT_ONCE = 8


class Picture(NamedTuple):
    path: Path
    #: Its name in jobs: that of its blob below `inputs/`.
    name: str
    sha256: str


def pictures_of(folder: Path) -> list[Picture]:
    """The pictures of a folder and of all in it, by their paths.

    Raises SetupError for none, and for one that no job can name or no worker reads.
    """
    try:
        paths = sorted(
            path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES
        )
        found = [_picture(folder, path) for path in paths]
    except OSError as error:
        raise SetupError(
            f"--inputs {error.filename or folder}: {error.strerror or error}"
        ) from None
    if not found:
        raise SetupError(
            f"--inputs {folder}: it is no folder with pictures ({', '.join(SUFFIXES)})"
        )
    return found


def _picture(folder: Path, path: Path) -> Picture:
    size = path.stat().st_size
    if size > MAX_IMAGE_BYTES:
        raise SetupError(
            f"--inputs {path}: it has {size:,} bytes; workers read {MAX_IMAGE_BYTES:,} at most"
        )
    sha256 = sha256_of(path)
    inside = PurePosixPath(folder.resolve().name, *path.relative_to(folder).parts)
    name = str(inside.with_stem(f"{inside.stem}~{sha256[:_DIGITS]}"))
    try:
        _SOURCE.validate_python(name)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SetupError(f"--inputs {path}: its name {name!r} {reason}") from None
    return Picture(path, name, sha256)


@dataclass
class WithInputs(ChangedFormat):
    """Each entry of a format once for each of the *pictures*, with which the job begins."""

    pictures: Sequence[Picture]

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        for entry in self.form.entries(stream):
            for picture in self.pictures:
                yield _with_input(entry, picture)

    def count(self, stream: BinaryIO) -> int:
        return super().count(stream) * len(self.pictures)


def _with_input(entry: Entry, picture: Picture) -> Entry:
    entry = entry._replace(place=f"{entry.place}, {picture.path}")
    fields = message.fields_if_any(entry.text)
    if entry.problem or not fields:
        return entry
    if fields.get(FIELD):
        return entry._replace(problem=f"{FIELD}: --inputs gives it: leave it out")
    fields[FIELD] = [picture.name]
    if fields.get("id"):
        # One name is one job.
        digest = hashlib.sha256(picture.name.encode()).hexdigest()
        fields["id"] = f"{fields['id']}-{digest[:_DIGITS]}"
    return entry._replace(text=json.dumps(fields, ensure_ascii=False))


async def upload(
    files: BlobStore,
    pictures: Sequence[Picture],
    on_stored: Callable[[], object] = lambda: None,
) -> int:
    """Stores the pictures that the storage does not have; returns how many those were.

    Raises SetupError for one that has changed since it was read.
    """
    new = 0

    async def store(picture: Picture) -> None:
        nonlocal new
        data = await asyncio.to_thread(picture.path.read_bytes)
        if hashlib.sha256(data).hexdigest() != picture.sha256:
            raise SetupError(f"--inputs {picture.path}: it was changed in between")
        kind, _ = mimetypes.guess_type(picture.name)
        is_new = await files.create(
            f"{img2img.INPUTS}{picture.name}", data, kind or "image/png", {}
        )
        new += is_new  # at once: others add to it while this one waits
        on_stored()

    await concurrency.for_each(pictures, store, _AT_ONCE)
    return new
