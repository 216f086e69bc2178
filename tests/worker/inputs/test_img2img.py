"""Images and masks against AUTOMATIC1111's own functions, whose results are in a1111.npz.

They were computed by `StableDiffusionProcessingImg2Img.init` (without latents, and what is filled),
`apply_overlay`, `masking.py` and `images.resize_image` of its version 1.10, with OpenCV 4.9 and
Pillow 13, for the pictures and masks below, with the same `drawing` as the engine's.
"""

import json
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.job.sizes import Size
from worker.engine.contract import InitImage
from worker.inputs import img2img

EXPECTED = np.load(Path(__file__).with_name("a1111.npz"))


class Case(NamedTuple):
    image: Size = (64, 48)
    size: Size = (32, 32)
    image_mode: str = "RGB"
    mask: Literal["disc", "corner", "none", "alpha"] | None = None
    mask_size: Size | None = None
    mode: int = 0
    invert: int = 0
    blur: tuple[int, int] = (4, 4)
    full_res: bool = True
    padding: int = 0
    fill: int = 0


CASES = [
    Case(image=(40, 24)),
    Case(image=(40, 24), mode=1),
    Case(image=(40, 24), mode=2),
    Case(image=(23, 61), size=(48, 40), mode=2),
    Case(image=(23, 61), size=(48, 40), mode=1),
    Case(image=(30, 30), size=(30, 30), image_mode="RGBA"),
    Case(image=(48, 40), size=(48, 40), mask="disc", full_res=False, fill=1),
    Case(image=(48, 40), mask="disc", mode=1, full_res=False),
    Case(image=(48, 40), mask="disc", mode=2, blur=(2, 6), full_res=False, fill=2),
    Case(size=(32, 40), mask="disc", padding=3, fill=1),
    Case(size=(40, 32), mask="corner", blur=(0, 0)),
    Case(size=(32, 64), mask="corner", blur=(1, 1), padding=8, fill=3),
    Case(mask="disc", invert=1, blur=(5, 0)),
    Case(mask="none"),
    Case(mask="none", full_res=False),
    Case(
        image=(50, 40), size=(40, 40), mask="alpha", blur=(0, 3), full_res=False, fill=1
    ),
    Case(mask="disc", mask_size=(40, 30), mode=1, full_res=False, fill=1),
    Case(mask="disc", mask_size=(40, 30), padding=2, fill=1),
]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    channels = [(5 * x + 2 * y) % 256, (x * y // 9) % 256, 100 + x - y]
    if mode == "RGBA":
        channels.append((x * 11 + y * 29) % 256)
    return Image.fromarray(np.stack(channels, 2).astype(np.uint8))


def mask_of(width: int, height: int, kind: str) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    if kind == "alpha":
        return Image.fromarray(
            np.stack([x % 256, y % 256, x % 256, x * 9 % 256], 2).astype("u1")
        )
    shapes = {
        "disc": (x - width * 0.4) ** 2 + (y - height * 0.5) ** 2
        < (min(width, height) * 0.25) ** 2,
        "corner": (x < width // 3) & (y < height // 4),
        "none": x < 0,
    }
    return Image.fromarray(np.where(shapes[kind], 255, 0).astype(np.uint8))


def drawing(width: int, height: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 - 4 * x % 256, 8 * y % 256, 77 + 0 * x], 2).astype(np.uint8)


def job_of(case: Case, **fields: object) -> Job:
    given = {
        "init_images": ["a.png"],
        "mask": case.mask and "b.png",
        "resize_mode": case.mode,
        "inpainting_mask_invert": case.invert,
        "mask_blur_x": case.blur[0],
        "mask_blur_y": case.blur[1],
        "inpaint_full_res": case.full_res,
        "inpaint_full_res_padding": case.padding,
        "inpainting_fill": case.fill,
    }
    return read_job(json.dumps({"prompt": "a", **given, **fields}), "m")


def begin(case: Case) -> tuple[InitImage, img2img.Overlay | None]:
    mask = (
        None
        if case.mask is None
        else mask_of(*(case.mask_size or case.image), case.mask)
    )
    return img2img.begin(
        job_of(case), picture(*case.image, case.image_mode), mask, case.size
    )


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pixel_is_as_in_a1111(number: int):
    case = CASES[number]
    init, overlay = begin(case)
    assert np.array_equal(init.pixels, EXPECTED[f"{number}_image"])
    expected_mask = EXPECTED.get(f"{number}_mask")
    if expected_mask is None:
        assert init.mask is None
    else:
        assert np.array_equal(init.mask, expected_mask)
    drawn = drawing(*case.size)
    final = drawn if overlay is None else overlay.put_over(drawn)
    assert np.array_equal(final, EXPECTED[f"{number}_final"])


def test_the_result_of_a_masked_part_is_as_large_as_the_image_and_so_limited():
    case = Case(image=(2560, 2048), size=(64, 64), mask="disc")
    with pytest.raises(
        errors.JobError, match=r"inpaint_full_res: .* 2,560 x 2,048 pixels"
    ):
        begin(case)


def test_a_drawing_is_not_enlarged_without_end_to_cover_a_long_thin_part():
    job = read_job(
        json.dumps({"prompt": "a", "init_images": ["a.png"], "mask": "b.png"}), "m"
    )
    thin = Image.new("RGB", (1, 200_000))
    with pytest.raises(
        errors.JobError, match="of 512 x 512 pixels is too long to be cut to 1 x 2"
    ):
        img2img.begin(job, thin, Image.new("L", thin.size, 255), (512, 512))


@pytest.mark.parametrize(
    ("fill", "content"),
    [(0, "fill"), (1, "original"), (2, "latent noise"), (3, "latent nothing")],
)
def test_the_engine_is_told_what_is_below_the_mask_at_first(fill: int, content: str):
    case = Case(image=(64, 64), size=(64, 64), mask="disc", full_res=False, fill=fill)
    init, _ = begin(case)
    assert (init.masked_content, init.denoising_strength) == (content, 0.75)
