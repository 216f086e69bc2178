"""The images of a side: their names, their files, and what these say of their jobs."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evaluation.score import plan
from imagefleet.errors import SetupError, UnusableFileError
from imagefleet.files import picture
from imagefleet.job.chain import SEPARATOR
from imagefleet.job.message import MAX_IMAGE_BYTES, Job
from imagefleet.records import catalog, pictures, reader
from imagefleet.records.record import Spot
from imagefleet.storage.open import Storage

Pixels = npt.NDArray[np.uint8]

#: Of a job, what has no part in its picture, or is compared by the image itself.
_NOT_COMPARED = {
    "id",
    "campaign",
    "output",
    "metadata",
    "model",
    "verify",
    "batch_size",
    "n_iter",
    "prompt",
    "negative_prompt",
    "seed",
    "width",
    "height",
}


class NotComparableError(SetupError):
    """The two sides are not drawings of the same jobs."""


class Images(Protocol):
    """One side's images."""

    @property
    def label(self) -> str:
        """Names the place of the images in messages and on the page."""

    async def names(self) -> list[str]:
        """All of them, relative to the side."""

    async def read(self, name: str) -> bytes | None:
        """A file's bytes; None if it is gone, or too large for an image."""


class FolderImages:
    """Images in a folder, and in the folders in it."""

    def __init__(self, path: Path, label: str | None = None) -> None:
        self._path = path
        self.label = label or f"folder {path}"

    async def names(self) -> list[str]:
        if not await asyncio.to_thread(self._path.is_dir):
            raise SetupError(f"the folder {str(self._path)!r} does not exist")
        return await asyncio.to_thread(plan.pictures, self._path)

    async def read(self, name: str) -> bytes | None:
        return await asyncio.to_thread(self._read, self._path / name)

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes() if path.stat().st_size <= MAX_IMAGE_BYTES else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error.strerror or error}") from None


class CampaignImages:
    """Images of a campaign in a storage."""

    def __init__(self, storage: Storage, campaign: str) -> None:
        self._storage = storage
        self._campaign = campaign
        self._packed: dict[str, Spot] = {}
        self._folder = f"{campaign}/"
        self._is_folder_too = Path(campaign).is_dir()
        self.label = f"campaign {campaign} in {storage.url}"

    async def names(self) -> list[str]:
        found = [
            name.removeprefix(self._folder)
            async for name in self._storage.blobs.names(self._folder)
        ]
        if catalog.may_have_packs(
            self._campaign, await catalog.packed_campaigns(self._storage)
        ):
            async for record in reader.images(self._storage, self._campaign):
                if record.pack is not None:
                    name = record.spot.blob.removeprefix(self._folder)
                    self._packed[name] = record.spot
        found = [*dict.fromkeys([*found, *self._packed])]
        found = [name for name in found if Path(name).suffix.lower() in plan.SUFFIXES]
        if not found and self._is_folder_too:
            raise NotComparableError(
                f"{self.label} has no images; for the folder, write ./{self._folder}"
            )
        return found

    async def read(self, name: str) -> bytes | None:
        try:
            spot = self._packed.get(name, Spot(self._folder + name))
            return await pictures.read(self._storage, spot)
        except UnusableFileError:  # too large for an image
            return None


@dataclass(frozen=True)
class Drawing:
    """An image, and the job in its file, if there is one."""

    pixels: Pixels
    job: Job | None
    seed: int | None

    @property
    def caption(self) -> str | None:
        return None if self.job is None else self.job.shown_prompts[0]


def by_key(names: list[str], label: str) -> dict[str, str]:
    """The names by their stems; raises NotComparableError for none, or two of one stem."""
    found: dict[str, str] = {}
    for name in sorted(names):
        key = name.rpartition(".")[0]
        if key in found:
            raise NotComparableError(
                f"{label} has both {found[key]} and {name}: the gate pairs images by their names"
                " without the suffix"
            )
        found[key] = name
    if not found:
        raise NotComparableError(f"{label} has no images")
    return found


async def read(images: Images, name: str) -> Drawing:
    """Reads an image; raises NotComparableError if it is gone, or damaged."""
    data = await images.read(name)
    if data is None:
        raise NotComparableError(
            f"{images.label}: {name} is no longer there, or too large"
        )
    drawing = await asyncio.to_thread(_drawing, data, name)
    if drawing is None:
        raise NotComparableError(f"{images.label}: {name} is damaged, or no image")
    return drawing


def _drawing(data: bytes, name: str) -> Drawing | None:
    image = picture.decode(data)
    if image is None:
        return None
    job = job_in(data)
    return Drawing(
        np.asarray(image),
        job,
        None if job is None else job.image_seed(_index(name, job)),
    )


def job_in(data: bytes) -> Job | None:
    """The job in an image's file."""
    found = picture.job_in(data)
    return None if found is None else found[1]


def _index(name: str, job: Job) -> int:
    """An image's number among those of its job, which its name ends in if there are several."""
    number = name.rpartition(".")[0].partition(SEPARATOR)[2]
    return int(number) if job.images > 1 and number.isdecimal() else 0


def check_same_job(key: str, a: Drawing, b: Drawing) -> None:
    """Raises NotComparableError for images of other captions, seeds or sizes."""
    sizes = ["{1}x{0}".format(*each.pixels.shape) for each in (a, b)]
    if sizes[0] != sizes[1]:
        raise NotComparableError(
            f"{key}: A's image has {sizes[0]} pixels and B's {sizes[1]}: draw both in one size"
        )
    if a.job is None or b.job is None:
        return
    for what, one, other in (
        ("caption", *(each.job.shown_prompts[0] for each in (a, b) if each.job)),
        (
            "negative prompt",
            *(each.job.shown_prompts[1] for each in (a, b) if each.job),
        ),
        ("seed", a.seed, b.seed),
    ):
        if one != other:
            raise NotComparableError(
                f"{key}: A's {what} is {_shown(one)} and B's {_shown(other)}: the gate compares"
                " drawings of the same captions with the same seeds"
            )


def other_fields(a: Drawing, b: Drawing) -> Mapping[str, tuple[Any, Any]]:
    """Other fields of the two jobs that differ, with both values."""
    if a.job is None or b.job is None:
        return {}
    one, other = (each.job.model_dump(mode="json") for each in (a, b) if each.job)
    return {
        name: (value, other[name])
        for name, value in one.items()
        if name not in _NOT_COMPARED and value != other[name]
    }


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:78]}…'"  # noqa: PLR2004 - a line
