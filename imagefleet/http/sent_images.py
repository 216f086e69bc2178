"""Images that strangers send and get: in base64, bounded, and opened as what they are."""

import base64
import binascii
import contextlib
import io
from collections.abc import Iterable, Iterator

from PIL import Image

from imagefleet.files import picture
from imagefleet.http.refused import Refused
from imagefleet.job.message import MAX_IMAGE_BYTES

#: The longest image in base64, and how much of it is decoded in one step.
_MAX_BASE64 = MAX_IMAGE_BYTES * 4 // 3 + 4
_STEP = 2**20


def content_type(name: str) -> str:
    """MIME type of an image by its name, which ends in one of `SUFFIXES`."""
    return f"image/{name.rpartition('.')[2].replace('jpg', 'jpeg')}"


def from_base64(text: str) -> bytes:
    """The bytes of an image in base64, which may come after the prefix of a data URL."""
    data = text.rpartition(",")[2]
    if len(data) > _MAX_BASE64:
        raise Refused(422, f"an image has more than {MAX_IMAGE_BYTES:,} bytes")
    # In steps, between which the event loop has its turn.
    steps = (data[at : at + _STEP] for at in range(0, len(data), _STEP))
    try:
        return b"".join(binascii.a2b_base64(step, strict_mode=True) for step in steps)
    except ValueError:
        raise Refused(
            422, "an image is not base64: names and addresses are not read"
        ) from None


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """An image that somebody sent; raises Refused for what is none, in the block as well."""
    try:
        with picture.opened(data, also=picture.CONVERTED) as image:
            yield image
    except picture.DamagedImageError as error:
        raise Refused(422, f"an image {error}") from None


def text_of(data: bytes) -> str:
    """A1111's text in an image."""
    with opened(data) as image:
        return picture.parameters(image, picture.MAX_MESSAGE_BYTES)


def mask_of(data: bytes) -> bytes:
    """A1111's mask, white where to draw, of OpenAI's, transparent there; empty without any."""
    with opened(data) as image:
        alpha = image.convert("RGBA").getchannel("A")
    if alpha.getextrema()[0] == 255:  # noqa: PLR2004 - opaque everywhere
        return b""
    made = io.BytesIO()
    Image.eval(alpha, lambda value: 255 - value).save(made, "PNG")
    return made.getvalue()


def in_base64(images: Iterable[bytes]) -> list[str]:
    return [base64.b64encode(data).decode() for data in images]
