"""The encode stage: pixels become the bytes of an image file, on threads of their own.

PNG is written here, around Intel's igzip (the `isal` package): 2 ms and 410 KB for a 512x512
photograph where Pillow takes 57 ms and 378 KB at its default level and 19 ms and 423 KB at its
fastest, on one core of a server. OpenCV (7 ms) and imagecodecs (6 ms) are slower, a hundred times
as large to install, and write no text; fpng (0.7 ms) has no licence.
"""

import asyncio
import hashlib
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NoReturn

import numpy as np
from isal import isal_zlib
from PIL import ExifTags, Image, PngImagePlugin

from imagefleet.errors import TransientError
from imagefleet.files import marks
from imagefleet.files.marks import Mark
from imagefleet.files.picture import PNG_KEYWORD
from imagefleet.job import sizes
from imagefleet.job.message import Output, text_for_image
from imagefleet.job.passes.first import VaeDecoder
from worker.engine.contract import Pixels
from worker.files.manifest import FutureHash
from worker.inputs.img2img import Overlay
from worker.jobs.in_flight import EncodedImage, Generated, InFlightImage
from worker.node.watchdog import NodeWatchdog
from worker.settle import Settler
from worker.stages import infotext
from worker.stages.upload import UploadStage

#: Threads that encode: a PNG takes 2 ms, so two keep up with any GPU.
ENCODERS = 2

#: Images that wait for these threads, so that tiny ones share their way there and back.
ENCODING = 16

#: igzip's levels 1 to 3 differ by under 1 % in size on photographs; 1 is the fastest.
COMPRESSION_LEVEL = 1

#: PNG's filter "up": each byte minus the one above; smaller than "sub" on photographs.
FILTER_UP = 2


@dataclass(eq=False)
class EncodeStage:
    """Encodes generated images on threads; feeds the upload stage."""

    settler: Settler
    watchdog: NodeWatchdog
    model_hash: FutureHash
    upload: UploadStage
    #: True if the engine's weights are.
    is_int8: bool

    def __post_init__(self) -> None:
        self.queue: asyncio.Queue[Generated] = asyncio.Queue(ENCODERS)
        self._threads = ThreadPoolExecutor(ENCODERS, "encode")

    async def run(self) -> NoReturn:
        while True:
            image, pixels = await self.queue.get()
            work = partial(self._encode, image, pixels)
            await self.settler.attempt(image.owner, work, image)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _parameters(self, image: InFlightImage) -> str:
        """The image's text; waits for the hashes in it."""
        if image.job.only_upscales:
            return infotext.of_enlarged(image.job, image.owner.source_parameters)
        settings = self.settler.settings
        usual: VaeDecoder | None = "TAESD" if settings.taesd else None
        owner = image.owner
        return infotext.parameters(
            image.job,
            image.drawn_index,
            image.size,
            self.settler.model_name,
            vae=settings.vae and Path(settings.vae).name.removesuffix(".safetensors"),
            model_hashes=await _known({"model": self.model_hash, **owner.model_hashes}),
            lora_hashes=await _known(owner.lora_hashes),
            embeddings=image.embeddings,
            is_cut_out=owner.overlay is not None and owner.overlay.box is not None,
            decoder=image.job.sd_vae_decode_method or usual,
            weights="int8" if self.is_int8 else None,
        )

    async def _encode(self, image: InFlightImage, pixels: Pixels) -> None:
        text = await self._parameters(image)
        job = text_for_image(image.owner.message.body, image.job)
        try:
            with self.settler.metrics.stage_seconds["encode"].time():
                loop = asyncio.get_running_loop()
                drawn = pixels, image.job.output, text, job, image.owner.overlay
                no_marks = self.settler.settings.no_marks
                mark = None if no_marks else marks.mark_of(image.job)
                file = await loop.run_in_executor(self._threads, encode, *drawn, mark)
        except TransientError as error:
            # An image of one colour is the engine's failure.
            if not image.owner.failures:
                self.watchdog.image_failed(error)
            raise
        self.watchdog.images_failed_in_a_row = 0
        await self.upload.queue.put((image, file))


async def _known(hashes: Mapping[str, FutureHash]) -> dict[str, str]:
    """The hashes of those files that have one, which were begun before the image was drawn."""
    known: dict[str, str] = {}
    for name, hashed in hashes.items():
        if not hashed.done():  # as they all are from a worker's second image on
            # Shielded: other images wait for the same.
            await asyncio.shield(asyncio.wrap_future(hashed))
        if sha256 := hashed.result():
            known[name] = sha256
    return known


def encode(
    pixels: Pixels,
    output: Output,
    parameters: str,
    job: str = "",
    overlay: Overlay | None = None,
    mark: Mark | None = None,
) -> EncodedImage:
    """Encodes one image, [height, width, 3] RGB, with its parameters, its job and its mark.

    A JPEG goes without the job where both are too long for it; parameters that are too long alone
    are a JobError. Raises as `refuse_one_colour`.
    """
    refuse_one_colour(pixels)  # the engine's own
    if overlay is not None:
        pixels = overlay.put_over(pixels)
        refuse_one_colour(pixels)
    # From another's picture; no text of a PNG holds it.
    parameters = parameters.replace("\0", "")
    if output.format == "png":
        data = _png(pixels, parameters, job, mark)
    else:
        data = _with_pillow(pixels, output, parameters, job, mark)
    height, width, _ = pixels.shape
    sha256 = hashlib.sha256(data).hexdigest()
    return EncodedImage(data, f"image/{output.format}", sha256, (width, height), mark)


def refuse_one_colour(pixels: Pixels) -> None:
    """Raises TransientError for an image of one colour, which no working engine generates."""
    if (pixels[0] == pixels[0, 0]).all() and (pixels == pixels[0, 0]).all():
        raise TransientError("the image came out all one colour; it is not stored")


def _png(pixels: Pixels, parameters: str, job: str, mark: Mark | None) -> bytes:
    height, width, _ = pixels.shape
    texts = PngImagePlugin.PngInfo()
    # First: some viewers show the first text of a file, whatever its name.
    texts.add_text("parameters", parameters)
    if job:
        texts.add_text(PNG_KEYWORD, job)
    if mark:
        texts.add_itxt("XML:com.adobe.xmp", marks.xmp(mark))
    file = BytesIO()
    file.write(b"\x89PNG\r\n\x1a\n")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    PngImagePlugin.putchunk(file, b"IHDR", header)
    for kind, text, *_ in texts.chunks:
        PngImagePlugin.putchunk(file, kind, text)
    rows = pixels.reshape(height, -1)
    filtered = np.empty((height, 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = FILTER_UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    compressed = isal_zlib.compress(filtered, COMPRESSION_LEVEL)
    PngImagePlugin.putchunk(file, b"IDAT", compressed)
    PngImagePlugin.putchunk(file, b"IEND", b"")
    return file.getvalue()


def _with_pillow(
    pixels: Pixels, output: Output, parameters: str, job: str, mark: Mark | None
) -> bytes:
    # A new Image for each call: Pillow keeps save()'s options on the object between threads.
    image = Image.fromarray(pixels)
    exif = _exif(parameters, job)
    if output.format == "jpeg" and len(exif.tobytes()) > sizes.JPEG_EXIF_BYTES:
        exif = _exif(parameters, "")
        sizes.check_jpeg_text("", len(exif.tobytes()))
    buffer = BytesIO()
    xmp = marks.xmp(mark).encode() if mark else b""
    image.save(buffer, output.format, quality=output.quality, exif=exif, xmp=xmp)
    return buffer.getvalue()


def _exif(parameters: str, job: str) -> Image.Exif:
    exif = Image.Exif()
    fields = exif.get_ifd(ExifTags.IFD.Exif)
    fields[ExifTags.Base.UserComment] = b"UNICODE\0" + parameters.encode("utf-16-be")
    if job:
        fields[ExifTags.Base.ImageHistory] = job
    return exif
