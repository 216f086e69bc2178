import io

import numpy as np
from PIL import Image, ImageFont

from fleet.demo import command as contact_sheet
from imagefleet.job.message import Output
from worker.stages import encode

FONT = ImageFont.load_default(contact_sheet.FONT_PIXELS)


def picture(width: int, height: int) -> bytes:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2] = (255, 0, 0)
    pixels[height // 2 :] = (0, 0, 255)
    return encode.encode(pixels, Output(), "").data


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_each_image_is_enlarged_with_its_caption_below():
    sheet = opened(contact_sheet.draw_contact_sheet([(picture(64, 64), "a house")]))

    left = contact_sheet.MARGIN_PIXELS
    top = contact_sheet.MARGIN_PIXELS
    tile = contact_sheet.TILE_PIXELS
    assert sheet.getpixel((left + 5, top + 5)) == (255, 0, 0)
    assert sheet.getpixel((left + tile - 5, top + tile - 5)) == (0, 0, 255)
    caption = sheet.crop((left, top + tile + 1, left + tile, sheet.height))
    assert len(set(caption.get_flattened_data())) > 2, "no text is drawn"


def test_a_wide_picture_keeps_its_shape():
    tile = contact_sheet.read_tile(picture(128, 64))

    assert tile.size == (contact_sheet.TILE_PIXELS, contact_sheet.TILE_PIXELS // 2)


def test_a_caption_names_the_loras_after_the_prompts_words():
    lines = contact_sheet.caption("a rope, <lora:forest-v2:0.35>, digital art")

    assert " ".join(lines) == "a rope, digital art + forest-v2"


def test_a_long_caption_is_shortened_to_the_images_width():
    lines = contact_sheet.caption("a very long prompt about a house in a forest " * 5)

    assert len(lines) == contact_sheet.CAPTION_LINES
    assert lines[-1].endswith("…")
    assert all(FONT.getlength(line) <= contact_sheet.TILE_PIXELS for line in lines)
