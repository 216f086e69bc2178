"""The contact sheet: all images on one page, each with its prompt as a caption."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from imagefleet.files import picture
from imagefleet.job import prompt
from imagefleet.redaction import printable

#: The longer side of an image on the sheet; smaller ones are enlarged.
TILE_PIXELS = 176

MARGIN_PIXELS = 12
FONT_PIXELS = 12
LINE_PIXELS = 15
CAPTION_LINES = 2

#: The lines that follow the prompt in AUTOMATIC1111's text.
_AFTER_PROMPT = re.compile(r"(?:^|\n)(?:Negative prompt: |Steps: )")

#: A prompt's limit, twice for the negative one, and the figures. Pillow limits what compressed text
#: expands to (a MiB).
_MAX_CHARACTERS = 150_000

_PAPER = (250, 250, 248)
_INK = (70, 70, 74)


def draw_contact_sheet(images: Sequence[bytes], columns: int = 6) -> bytes:
    """A PNG with the images (one or more) in rows, captioned with the prompts in their metadata."""
    if not images:
        raise ValueError("a contact sheet needs an image")
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    cell_height = TILE_PIXELS + CAPTION_LINES * LINE_PIXELS + MARGIN_PIXELS
    width = MARGIN_PIXELS + columns * (TILE_PIXELS + MARGIN_PIXELS)
    sheet = Image.new("RGB", (width, MARGIN_PIXELS + rows * cell_height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_PIXELS)
    for index, data in enumerate(images):
        row, column = divmod(index, columns)
        left = MARGIN_PIXELS + column * (TILE_PIXELS + MARGIN_PIXELS)
        top = MARGIN_PIXELS + row * cell_height
        tile, caption = read_tile(data)
        sheet.paste(tile, (left + (TILE_PIXELS - tile.width) // 2, top))
        for number, line in enumerate(_lines(caption, font)):
            baseline = top + TILE_PIXELS + 3 + number * LINE_PIXELS
            draw.text((left, baseline), line, fill=_INK, font=font)
    stored = io.BytesIO()
    sheet.save(stored, "PNG", optimize=True)
    return stored.getvalue()


def read_tile(data: bytes) -> tuple[Image.Image, str]:
    """The image at tile size, and the prompt in its AUTOMATIC1111 metadata as a caption.

    An empty tile, with the reason, for what is no image.
    """
    size = (TILE_PIXELS, TILE_PIXELS)
    try:
        with picture.opened(data) as image:
            parameters = printable(picture.parameters(image, _MAX_CHARACTERS))
            tile = ImageOps.contain(image.convert("RGB"), size, Image.Resampling.LANCZOS)
    except picture.DamagedImageError as error:
        return Image.new("RGB", size, _PAPER), str(error)
    words, loras = prompt.read_words(_AFTER_PROMPT.split(parameters, maxsplit=1)[0])
    return tile, " + ".join([words, *(lora.name for lora in loras)])


def _lines(caption: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """The caption in at most `CAPTION_LINES` lines, shortened with an ellipsis."""
    characters = int(TILE_PIXELS / (font.getlength("etaoin shrdlu") / len("etaoin shrdlu")))
    return textwrap.wrap(caption, characters, max_lines=CAPTION_LINES, placeholder="…")
