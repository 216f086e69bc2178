"""The images that a job is given, and AUTOMATIC1111's img2img and inpainting, with its defaults."""

import base64
import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from imagefleet.job.passes.first import FirstPass, Share
from imagefleet.job.sizes import MAX_BLOB_NAME, MAX_MESSAGE_BYTES

#: Images of the fleet itself are named by this and their blob; all others are below `INPUTS`.
IMAGES = "images/"
INPUTS = "inputs/"

#: A segment of an image's path; as of a LoRA's name, none begins with a dot or a hyphen.
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_ .+()~-]{0,199}"
_NAME = re.compile(
    rf"(?:{_SEGMENT}/){{0,7}}{_SEGMENT}(?<=\.)(?:png|jpe?g|webp)", re.IGNORECASE
)

_DATA_URL = re.compile(r"data:image/[a-z]{3,4};base64,", re.IGNORECASE)

#: The first bytes of PNG, JPEG and WebP.
_IMAGE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP", re.DOTALL)


class Named(NamedTuple):
    """A blob of the container of files, or of images."""

    container: Literal["files", "images"]
    blob: str

    @property
    def campaign(self) -> str | None:
        """The campaign that an image is of; None for a file, which all campaigns share."""
        return self.blob.partition("/")[0] if self.container == "images" else None


def place(source: str) -> Named | None:
    """The place of a named image; None for one within the message."""
    if "." not in source:  # no letter of base64
        return None
    if source.startswith(IMAGES):
        return Named("images", source.removeprefix(IMAGES))
    return Named("files", INPUTS + source)


def content(source: str) -> bytes:
    prefix = _DATA_URL.match(source)
    return base64.b64decode(source[prefix.end() :] if prefix else source, validate=True)


def _check(source: str) -> str:
    if len(source) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"has {len(source):,} characters, more than a message holds: store the image in"
            f" {INPUTS} of the container of files, and give its name"
        )
    if re.match("https?:", source, re.IGNORECASE):
        raise ValueError(
            f"is an address, which is not fetched: store the image in {INPUTS} of the container of"
            " files, and give its name"
        )
    if place(source) is not None:
        if not _NAME.fullmatch(source) or len(INPUTS + source) > MAX_BLOB_NAME:
            raise ValueError(
                "should be a name that ends in .png, .jpg, .jpeg or .webp, of letters, digits,"
                " spaces and _ . + ( ) - in up to 8 parts with / between them, or base64"
            )
        return source
    try:
        data = content(source)
    except ValueError:
        raise ValueError(
            "is neither the base64 of an image nor a name that ends in .png, .jpg, .jpeg or .webp"
        ) from None
    if not _IMAGE.match(data):
        raise ValueError("is no PNG, JPEG or WebP image in base64")
    return source


#: `cat.png` is inputs/cat.png in the container of files, `images/spring/0001.png` is
#: spring/0001.png in that of images; else base64, with or without the prefix of a data URL.
ImageSource = Annotated[str, AfterValidator(_check)]


#: Pixels.
Blur = Annotated[int, Field(ge=0, le=64)]
MAX_PADDING = 2048

_RESIZE_MODES = "should be 0 (just resize), 1 (crop and resize) or 2 (resize and fill)"


def _resize_mode(value: object) -> object:
    if value == 3:  # noqa: PLR2004 - its number in the payload
        raise ValueError(f"3 (latent upscale) is not supported; {_RESIZE_MODES}")
    return value


class Img2Img(FirstPass):
    """The fields that matter with `init_images`; blurs in pixels."""

    init_images: Annotated[
        tuple[ImageSource, ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=1),
    ] = ()
    #: Strength of the noise on the image, from 0 to 1; it is the second pass' strength as well.
    denoising_strength: Share = 0.75
    resize_mode: Annotated[Literal[0, 1, 2], BeforeValidator(_resize_mode)] = 0
    mask: ImageSource | None = None
    #: The blur in both directions, in place of the next two.
    mask_blur: Blur | None = None
    mask_blur_x: Blur = 4
    mask_blur_y: Blur = 4
    inpainting_fill: int = Field(default=0, ge=0, le=3)
    inpaint_full_res: bool = True
    inpaint_full_res_padding: int = Field(default=0, ge=0, le=MAX_PADDING)
    inpainting_mask_invert: int = Field(default=0, ge=0, le=1)

    @property
    def blur(self) -> tuple[int, int]:
        if self.mask_blur is not None:
            return self.mask_blur, self.mask_blur
        return self.mask_blur_x, self.mask_blur_y


FIELDS = frozenset(Img2Img.model_fields) - set(FirstPass.model_fields)

OWN_FIELDS = FIELDS - {"init_images", "denoising_strength"}
