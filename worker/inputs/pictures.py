"""Images that jobs are given: decoded within limits, and resized as AUTOMATIC1111 does.

Those that control a drawing are resized as sd-webui-controlnet does (`detectmap_proc`). Of its
interpolation: maps of a few colours keep them, others are averaged where they shrink and cubic
where they grow, as there. Its OpenCV has another cubic, and thins the lines of pictures in black
and white once more: a picture in the job's size is not touched, there or here.
"""

from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.Image import DecompressionBombError, DecompressionBombWarning, Resampling

from imagefleet.errors import JobError
from imagefleet.files import picture
from imagefleet.job import differences
from imagefleet.job.sizes import Size
from imagefleet.redaction import printable
from worker.engine.contract import Pixels

#: Four times those of the largest image that a job may ask for: a photograph has fewer.
MAX_PIXELS = 2**24

#: The most pixels of what is then cut to a size: they grow with an image's length, without end.
MAX_COVERING_PIXELS = 4 * MAX_PIXELS

_FORMATS = ("PNG", "JPEG", "WEBP")

#: The longest of AUTOMATIC1111's texts in a file: twice a message, for two prompts of the longest.
MAX_TEXT = 2**17

_FIT = 0
_FILL = 2

#: A picture of so few colours is a map of classes, whose colours must not mix.
_FEWEST = 2
_MANY = 200


def read(what: str, data: bytes) -> Image.Image:
    """Decodes a file, turned as its Exif data says; *what* it is, for messages.

    Raises JobError if it is no image, is damaged or has too many pixels.
    """
    try:
        return _read(what, data)
    except JobError:
        raise
    except UnidentifiedImageError:
        raise JobError(f"{what} is not a PNG, JPEG or WebP image") from None
    except (DecompressionBombError, DecompressionBombWarning):
        raise JobError(f"{what} has more than {MAX_PIXELS:,} pixels") from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow's parsers raise a dozen kinds
        text = printable(" ".join(str(error).split()))
        reason = text[:200] or type(error).__name__
        raise JobError(f"{what} is a damaged image: {reason}") from None


def _read(what: str, data: bytes) -> Image.Image:
    with Image.open(BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:  # before the pixels take memory
            raise JobError(
                f"{what} has {width:,} x {height:,} pixels; {MAX_PIXELS:,} at most are read"
            )
        image.load()
        turned = picture.eight_bits(_turned(image))
        if turned.mode not in {"RGB", "P"} or not isinstance(
            image.info.get("transparency"), bytes
        ):
            return turned
        return turned.convert("RGBA")


def _turned(image: Image.Image) -> Image.Image:
    """Turns it as its Exif data says, if that is sound, as AUTOMATIC1111's `fix_image` does."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - Pillow's parsers raise a dozen kinds
        return image.copy()


def parameters(data: bytes) -> str:
    """AUTOMATIC1111's text in the file of an image that was read; empty if there is none."""
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            return picture.parameters(image, MAX_TEXT).replace("\0", "")
    except Exception:  # noqa: BLE001 - Pillow's parsers raise a dozen kinds, and it is no loss
        return ""


def flatten(image: Image.Image) -> Image.Image:
    """The image in RGB; what is transparent becomes white."""
    if image.mode != "RGBA":
        return image.convert("RGB")
    background = Image.new("RGBA", image.size, "white")
    background.paste(image, mask=image)
    return background.convert("RGB")


def resize(mode: int, image: Image.Image, size: Size) -> Image.Image:
    """Resizes an image by the modes of AUTOMATIC1111 (`modules/images.py`, `resize_image`).

    0 stretches; 1 covers *size* and cuts off what is over; 2 fits into it, and repeats the borders.
    Raises as `inner_size`.
    """
    if mode == 0:
        return image.resize(size, Resampling.LANCZOS)
    width, height = size
    inner = inner_size(mode, image.size, size)
    stretched = image.resize(inner, Resampling.LANCZOS)
    resized = Image.new(image.mode, size)
    left = width // 2 - inner[0] // 2
    upper = height // 2 - inner[1] // 2
    resized.paste(stretched, (left, upper))
    if mode == 1 or not (left or upper):
        return resized
    # The edges that are repeated, each with the corner of its border.
    if upper:
        border = width, upper
        before = 0, 0, width, 0
        after = 0, inner[1], width, inner[1]
        far_corner = 0, upper + inner[1]
    else:
        border = left, height
        before = 0, 0, 0, height
        after = inner[0], 0, inner[0], height
        far_corner = left + inner[0], 0
    for edge, corner in ((before, (0, 0)), (after, far_corner)):
        resized.paste(stretched.resize(border, Resampling.BICUBIC, edge), corner)
    return resized


def inner_size(mode: int, image_size: Size, size: Size) -> Size:
    """The size an image is scaled to before it is cut to *size* (mode 1), or filled up to it (2).

    Raises JobError if too much of an image far longer than wide would be cut off.
    """
    width, height = size
    is_wider = width / height > image_size[0] / image_size[1]
    if (mode == 1) == is_wider:
        inner = width, image_size[1] * width // image_size[0]
    else:
        inner = image_size[0] * height // image_size[1], height
    refuse_too_long(image_size, inner, size)
    # Of an image that is far longer than it is wide, nothing might be left.
    return max(1, inner[0]), max(1, inner[1])


def refuse_too_long(image_size: Size, inner: Size, size: Size) -> None:
    """Raises JobError where an image would be too large, *inner*, before it is cut to *size*."""
    if inner[0] * inner[1] > MAX_COVERING_PIXELS:
        raise JobError(
            f"an image of {image_size[0]:,} x {image_size[1]:,} pixels is too long to be cut to"
            f" {size[0]:,} x {size[1]:,}: it would have {inner[0]:,} x {inner[1]:,} before"
        )


def control(image: Image.Image, mode: int, size: Size) -> Pixels:
    """Resizes to *size*: stretched (0), cut (1), with borders of its colour (2).

    Raises as `inner_size`.
    """
    image = image.convert("RGB")
    if image.size != size:
        differences.warn("control_size")
    if mode == _FIT or image.size == size:
        return np.asarray(_stretched_map(image, size))
    scales = size[0] / image.width, size[1] / image.height
    scale = min(scales) if mode == _FILL else max(scales)
    width, height = (max(1, round(side * scale)) for side in image.size)
    refuse_too_long(image.size, (width, height), size)
    stretched = _stretched_map(image, (width, height))
    outer = np.asarray(image)
    borders = np.concatenate([outer[0], outer[-1], outer[:, 0], outer[:, -1]])
    red, green, blue = np.median(borders, axis=0).astype(np.uint8).tolist()
    found = Image.new("RGB", size, (red, green, blue))
    # In the middle: what is over is cut off on both sides, or what is missing added there.
    found.paste(stretched, (int((size[0] - width) / 2), int((size[1] - height) / 2)))
    return np.asarray(found)


def _stretched_map(image: Image.Image, size: Size) -> Image.Image:
    if image.size == size:
        return image
    if _FEWEST < len(image.getcolors(_MANY) or ()) < _MANY:
        how = Resampling.NEAREST
    elif size[0] * size[1] < image.width * image.height:
        how = Resampling.BOX
    else:
        how = Resampling.BICUBIC
    return image.resize(size, how)
