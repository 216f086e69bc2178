"""Samples of a campaign's images, one at a time made small for the page."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from fleet import contact_sheet
from fleet.report.records import Records
from imagefleet import errors
from imagefleet.files import picture
from imagefleet.job import prompt
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.scoring.curve import number_text
from imagefleet.storage import protocol

#: The longer side of a sample: twice its size on the page, for screens of high resolution.
_PIXELS = 384
_WEBP_QUALITY = 80

#: The most characters of a prompt; the rest is shown on demand.
_SHOWN_CHARACTERS = 110


@dataclass(frozen=True, slots=True)
class Sample:
    """An image for the page; *data* is a WebP in base64, None for what is no image."""

    job: str
    address: str
    data: str | None = None
    width: int = 0
    height: int = 0
    words: str = ""
    loras: Sequence[str] = ()

    @property
    def short(self) -> str:
        return textwrap.shorten(self.words, _SHOWN_CHARACTERS, placeholder=" …")


async def read(blobs: protocol.BlobStore, records: Records) -> list[Sample]:
    """The samples of *records* that are still there; counts the damaged ones in them."""
    samples = []
    for name in records.samples:
        try:
            data = await blobs.read(name.blob, MAX_IMAGE_BYTES)
            if data is None:
                continue
            samples.append(shrunk(name.job, blobs.address(name.blob), data))
        except (picture.DamagedImageError, errors.JobError) as error:
            records.damaged.add(name.blob, str(error))
            records.damaged_samples += 1
            samples.append(Sample(name.job, blobs.address(name.blob)))
    return samples


def shrunk(job: str, address: str, data: bytes) -> Sample:
    """The sample in a file's bytes; raises DamagedImageError."""
    tile, text = contact_sheet.read_image(data, _PIXELS)
    words, loras = prompt.read_words(text)
    stored = io.BytesIO()
    tile.save(stored, "WEBP", quality=_WEBP_QUALITY)
    return Sample(
        job,
        address,
        base64.b64encode(stored.getvalue()).decode(),
        tile.width,
        tile.height,
        words,
        [f"{lora.name} {number_text(lora.unet_weight)}" for lora in loras],
    )
