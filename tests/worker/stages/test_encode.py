import io
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from imagefleet import errors
from imagefleet.files import marks, picture
from imagefleet.job.message import Job, Output
from worker.stages import encode

NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


def opened(file: encode.EncodedImage) -> Image.Image:
    image = Image.open(io.BytesIO(file.data))
    image.load()
    return image


@settings(max_examples=50)
@given(
    st.integers(1, 9),
    st.integers(2, 9),
    st.integers(0, 2**32 - 1),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)
def test_any_size_and_any_text_survive_in_a_png(
    height: int, width: int, seed: int, text: str
):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    pixels[0, 0] = 0
    pixels[0, 1] = 255
    file = encode.encode(pixels, Output(), text)
    image = opened(file)
    assert (image.format, file.content_type) == ("PNG", "image/png")
    assert np.array_equal(np.asarray(image), pixels)
    assert image.info["parameters"] == text


def test_pixels_of_a_transposed_view_are_not_mixed_up():
    view = NOISE.transpose(1, 0, 2)
    assert not view.flags.c_contiguous
    assert np.array_equal(np.asarray(opened(encode.encode(view, Output(), ""))), view)


@pytest.mark.parametrize("name", ["jpeg", "webp"])
def test_lossy_formats_carry_the_parameters_as_exif_and_look_alike(name: str):
    smooth = np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
    file = encode.encode(smooth, Output(format=name, quality=95), "ein Prümpt, 🎨")
    image = opened(file)
    comment = image.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
    assert comment == b"UNICODE\0" + "ein Prümpt, 🎨".encode("utf-16-be")
    assert file.content_type == f"image/{name}"
    difference = np.asarray(image.convert("RGB")).astype(int) - smooth
    assert np.abs(difference).mean() < 4


def test_prompts_too_long_for_a_jpegs_exif_are_the_jobs_fault_and_fit_other_formats():
    long = "a" * 40_000
    with pytest.raises(errors.JobError, match="choose png or webp"):
        encode.encode(NOISE, Output(format="jpeg"), long)
    encode.encode(NOISE, Output(format="jpeg"), long[:32_000])
    assert opened(encode.encode(NOISE, Output(), long)).info["parameters"] == long
    file = encode.encode(NOISE, Output(format="webp"), long)
    comment = (
        opened(file).getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
    )
    assert comment[8:].decode("utf-16-be") == long


@pytest.mark.parametrize("text", ["a\0b", "\u4e00a\0b"])
def test_a_nul_in_another_pictures_text_is_in_no_chunk(text: str):
    file = encode.encode(NOISE, Output(), text)

    assert opened(file).info["parameters"] == text.replace("\0", "")


def test_a_lower_quality_makes_a_smaller_file():
    sizes = [
        len(encode.encode(NOISE, Output(format="jpeg", quality=quality), "").data)
        for quality in (20, 60, 95)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (12, 200, 7)])
def test_an_image_of_one_colour_is_never_encoded(colour: tuple[int, int, int]):
    with pytest.raises(errors.TransientError, match="all one colour"):
        encode.encode(np.full((8, 8, 3), colour, np.uint8), Output(), "")


def test_one_pixel_of_another_colour_is_enough():
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[7, 7] = 1
    assert np.array_equal(
        np.asarray(opened(encode.encode(pixels, Output(), ""))), pixels
    )


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("mark", [*get_args(marks.Mark), None])
def test_a_file_says_how_it_came_about_beside_its_parameters(
    name, mark: marks.Mark | None
):
    file = encode.encode(NOISE, Output(format=name), "a house", mark=mark)

    image = opened(file)
    packet = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or ""
    text = packet.decode() if isinstance(packet, bytes) else packet
    told = re.findall('DigitalSourceType="([^"]+)"', text)
    term = f"http://cv.iptc.org/newscodes/digitalsourcetype/{mark}"
    assert told == ([term] if mark else [])
    assert file.mark == mark
    assert picture.parameters(image, 100) == "a house"


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("mark", get_args(marks.Mark))
def test_exiftool_reads_the_mark_back(
    tool: Callable[[str], str], tmp_path: Path, name, mark: marks.Mark
):
    command = tool("exiftool")
    path = tmp_path / f"picture.{name}"
    path.write_bytes(encode.encode(NOISE, Output(format=name), "a", mark=mark).data)

    read = [command, "-json", "-XMP-iptcExt:DigitalSourceType#", str(path)]
    modules = Path(command).parents[1] / "share" / "perl5"
    variables = {**os.environ, "PERL5LIB": str(modules)}
    told = subprocess.run(read, check=True, capture_output=True, env=variables)

    (found,) = json.loads(told.stdout)
    term = f"http://cv.iptc.org/newscodes/digitalsourcetype/{mark}"
    assert found["DigitalSourceType"] == term


def test_the_mark_is_of_what_a_chain_began_with():
    def mark(**fields: Any) -> marks.Mark:
        job = Job.model_validate({"id": "a", "prompt": "a house"} | fields)
        return marks.mark_of(job.at_stage(job.stages))

    assert mark() == "trainedAlgorithmicMedia"
    assert mark(then=[{"steps": 3}]) == "trainedAlgorithmicMedia"
    given = {"init_images": ["cat.png"]}
    assert mark(**given) == "compositeWithTrainedAlgorithmicMedia"
    assert mark(**given, then=[{}]) == "compositeWithTrainedAlgorithmicMedia"
    enlarged = {"init_images": ["cat.png"], "upscaler_1": "Lanczos"}
    assert mark(prompt="", **enlarged) == "algorithmicallyEnhanced"
