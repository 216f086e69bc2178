"""The contact sheet: all images on one page, each with its prompt as a caption."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont, ImageOps

from imagefleet.job import prompt

#: The longer side of an image on the sheet; smaller ones are enlarged.
TILE_PIXELS = 176

COLUMNS = 6
MARGIN_PIXELS = 12
FONT_PIXELS = 12
LINE_PIXELS = 15
CAPTION_LINES = 2

_PAPER = (250, 250, 248)
_INK = (70, 70, 74)


def draw_contact_sheet(images: Sequence[tuple[bytes, str]]) -> bytes:
    """A PNG with the images in rows, each with its prompt's words and LoRAs as a caption."""
    columns = min(COLUMNS, len(images)) or 1
    rows = math.ceil(len(images) / columns)
    cell_height = TILE_PIXELS + CAPTION_LINES * LINE_PIXELS + MARGIN_PIXELS
    width = MARGIN_PIXELS + columns * (TILE_PIXELS + MARGIN_PIXELS)
    sheet = Image.new("RGB", (width, MARGIN_PIXELS + rows * cell_height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_PIXELS)
    for index, (data, text) in enumerate(images):
        row, column = divmod(index, columns)
        left = MARGIN_PIXELS + column * (TILE_PIXELS + MARGIN_PIXELS)
        top = MARGIN_PIXELS + row * cell_height
        tile = read_tile(data)
        sheet.paste(tile, (left + (TILE_PIXELS - tile.width) // 2, top))
        for number, line in enumerate(caption(text, font)):
            baseline = top + TILE_PIXELS + 3 + number * LINE_PIXELS
            draw.text((left, baseline), line, fill=_INK, font=font)
    stored = io.BytesIO()
    sheet.save(stored, "PNG", optimize=True)
    return stored.getvalue()


def read_tile(data: bytes) -> Image.Image:
    """The image at tile size."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return ImageOps.contain(image, (TILE_PIXELS, TILE_PIXELS), Image.Resampling.LANCZOS)


def caption(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """A prompt in at most `CAPTION_LINES` lines, shortened with an ellipsis."""
    words, loras = prompt.read_words(text)
    shown = " + ".join([words, *(lora.name for lora in loras)])
    characters = int(TILE_PIXELS / (font.getlength("etaoin shrdlu") / len("etaoin shrdlu")))
    return textwrap.wrap(shown, characters, max_lines=CAPTION_LINES, placeholder="…")
