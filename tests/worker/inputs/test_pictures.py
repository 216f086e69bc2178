"""Pictures from outside: whatever is wrong with a file is the job's fault, and said so."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import bombs
from imagefleet import errors
from worker.inputs import pictures


def picture(width: int = 40, height: int = 24) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header says that it is large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return bombs.png((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not a PNG, JPEG or WebP image"),
        (b"hello", "is not a PNG, JPEG or WebP image"),
        (encoded(picture(), "GIF"), "is not a PNG, JPEG or WebP image"),
        (encoded(picture())[:500], "is a damaged image"),
        (encoded(picture(), "JPEG")[:400], "is a damaged image"),
        (encoded(picture(), "WEBP")[:-200], "is a damaged image|is not a PNG"),
        (claims(40, 24), "is a damaged image"),
        (claims(4097, 4096), "has 4,097 x 4,096 pixels; 16,777,216 at most are read"),
        (claims(20_000, 20_000), "has more than 16,777,216 pixels"),
        (
            claims(10_000, 10_000),
            "has more than 16,777,216 pixels|10,000 x 10,000 pixels",
        ),
    ],
)
def test_a_wrong_file_says_what_it_is(data: bytes, reason: str):
    with pytest.raises(errors.JobError, match=f"^mask: the image ({reason})"):
        pictures.read("mask: the image", data)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.integers(0, 1000))
def test_no_damage_raises_anything_but_a_job_error(noise: bytes, at: int):
    data = bytearray(encoded(picture()))
    at %= len(data)
    data[at : at + len(noise)] = noise
    try:
        read = pictures.read("it", bytes(data))
    except errors.JobError:
        return
    assert pictures.flatten(read).mode == "RGB"


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "1"])
def test_every_mode_becomes_rgb(mode: str):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    source = (
        Image.new("I;16", (8, 8), 300)
        if mode == "I;16"
        else picture(8, 8).convert(mode)
    )
    read = pictures.flatten(pictures.read("it", encoded(source, kind)))
    assert (read.mode, read.size) == ("RGB", (8, 8))


def test_what_is_transparent_becomes_white():
    read = pictures.read("it", encoded(Image.new("RGBA", (4, 4), (9, 9, 9, 0))))
    assert pictures.flatten(read).getpixel((0, 0)) == (255, 255, 255)


def test_a_photograph_is_turned_as_its_camera_was():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert pictures.read("it", encoded(picture(40, 24), "JPEG", exif=exif)).size == (
        24,
        40,
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0no TIFF",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x05\0\x01\0\0\0\xf0\xff\xff\xff",
    ],
)
def test_damaged_exif_data_leave_a_picture_as_it_is(kind: str, exif: bytes):
    read = pictures.read("it", encoded(picture(40, 24), kind, exif=exif))
    assert (read.mode, read.size) == ("RGB", (40, 24))


@pytest.mark.parametrize("image_size", [(1, 200_000), (200_000, 1)])
def test_cutting_a_long_thin_image_takes_no_gigabytes(
    image_size: tuple[int, int],
):
    image = Image.new("RGB", image_size)
    reason = r"^an image of [\d,]+ x [\d,]+ pixels is too long to be cut to 512 x 512: it would"
    with pytest.raises(errors.JobError, match=reason):
        pictures.resize(1, image, (512, 512))
    with pytest.raises(errors.JobError, match=reason):
        pictures.control(image, 1, (512, 512))
    for mode in (0, 2):
        assert pictures.resize(mode, image, (64, 64)).size == (64, 64)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_map_in_the_jobs_size_is_not_touched(mode: int):
    image = picture(64, 32)
    assert np.array_equal(pictures.control(image, mode, (64, 32)), np.asarray(image))


def test_a_map_of_classes_keeps_its_colours():
    colours = np.array([[0, 0, 0], [250, 10, 3], [7, 200, 99]], np.uint8)
    classes = colours[np.random.default_rng(2).integers(0, 3, (16, 16))]
    found = pictures.control(Image.fromarray(classes), 0, (40, 24)).reshape(-1, 3)
    assert {tuple(each) for each in found.tolist()} == {
        tuple(each) for each in colours.tolist()
    }


def test_a_map_is_cut_or_filled_with_the_colour_of_its_border():
    image = Image.new("RGB", (32, 32), (10, 20, 30))
    image.paste((200, 0, 0), (8, 8, 24, 24))
    cut = pictures.control(image, 1, (64, 32))
    filled = pictures.control(image, 2, (64, 32))
    assert np.array_equal(filled[:, 16:48], np.asarray(image))
    assert (filled[:, :16] == (10, 20, 30)).all()
    assert (cut[16, 20:44] == (200, 0, 0)).all(), "its middle, twice as large"
