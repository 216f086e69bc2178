"""Jobs that only enlarge an image: their fields, sizes and refusals, alone and in chains."""

import json
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes import extras
from imagefleet.job.passes.fields import Pass
from imagefleet.validation import JSONDict


def read(**fields: Any) -> Job:
    given = {"init_images": ["a.png"], "upscaler_1": "4x_Sharp", **fields}
    return read_job(
        json.dumps({name: each for name, each in given.items() if each != "-"}), "m"
    )


def refusal(**fields: Any) -> str:
    with pytest.raises(errors.InvalidMessageError) as caught:
        read(**fields)
    return caught.value.message


def test_a_job_that_only_enlarges_needs_no_prompt():
    job = read()
    assert (job.only_upscales, job.prompt, job.upscalers) == (True, "", ("4x_Sharp",))
    assert read_job(job.to_message(), "another") == job
    assert not read_job('{"prompt": "a"}', "m").only_upscales


def test_the_payload_of_a1111s_extras_is_taken_as_it_is():
    payload = {
        "resize_mode": 0,
        "show_extras_results": True,
        "gfpgan_visibility": 0,
        "codeformer_visibility": 0,
        "codeformer_weight": 0.3,
        "upscaling_resize": 4,
        "upscaling_resize_w": 512,
        "upscaling_resize_h": 512,
        "upscaling_crop": True,
        "upscaler_1": "R-ESRGAN 4x+",
        "upscaler_2": "None",
        "extras_upscaler_2_visibility": 0,
        "upscale_first": False,
        "image": "cats/a.png",
    }
    job = read_job(json.dumps(payload), "m")
    assert job == read(
        upscaler_1="R-ESRGAN 4x+", upscaling_resize=4, init_images=["cats/a.png"]
    )
    nothing = {"upscaler_1": "None", "upscaling_resize": 4}
    with pytest.raises(
        errors.InvalidMessageError,
        match=r"^upscaling_resize: is for jobs that only enlarge",
    ):
        read_job(json.dumps({"prompt": "a", **nothing}), "m")


def test_the_second_upscaler_counts_only_where_it_shows():
    both = read(upscaler_2="Lanczos", extras_upscaler_2_visibility=0.5)
    assert both.upscalers == ("4x_Sharp", "Lanczos")
    assert both.upscaler_files == ("4x_Sharp",)
    assert read(upscaler_2="Lanczos").upscalers == ("4x_Sharp",)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"init_images": "-"}, "upscaler_1: enlarges an image; init_images is missing"),
        (
            {"upscaler_1": "-", "prompt": "a", "upscaling_resize": 3},
            "upscaler_1 is missing",
        ),
        (
            {"upscaler_1": "-", "prompt": "a", "upscaler_2": "b"},
            "upscaler_1 is missing",
        ),
        ({"upscaler_1": "Latent"}, "upscaler_1: enlarges latents"),
        ({"upscaler_1": "../x"}, "upscaler_1: should be a name of letters"),
        ({"upscaler_2": "Latent (sharp)"}, "upscaler_2: unknown"),
        (
            {"resize_mode": 2},
            "resize_mode: with upscaler_1 it should be 0 (by upscaling_resize)",
        ),
        ({"gfpgan_visibility": 0.5}, "gfpgan_visibility is not supported"),
        ({"image": "b.png"}, "image and init_images are the same field"),
        (
            {"denoising_strength": 0.4},
            "denoising_strength: a job with upscaler_1 only enlarges",
        ),
        ({"enable_hr": True}, "enable_hr: is for txt2img"),
        (
            {"batch_size": 2},
            "upscaler_1: batch_size x n_iter is 2; a job enlarges one image",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields: JSONDict, reason: str):
    assert reason in refusal(**fields)


def test_controlnets_have_nothing_to_control():
    scripts = {"controlnet": {"args": [{"image": "b.png", "model": "canny"}]}}
    assert refusal(alwayson_scripts=scripts).startswith(
        "alwayson_scripts: a job with upscaler_1"
    )


@pytest.mark.parametrize(
    ("fields", "size", "sizes"),
    [
        ({}, (100, 60), ((200, 120), (200, 120))),
        ({"upscaling_resize": 1.5}, (101, 67), ((144, 96), (144, 96))),
        ({"upscaling_resize": 0.5}, (512, 256), ((256, 128), (256, 128))),
        ({"resize_mode": 1}, (100, 60), ((848, 512), (512, 512))),
        (
            {"resize_mode": 1, "upscaling_resize_w": 500},
            (100, 60),
            ((848, 512), (500, 512)),
        ),
        # A float a little below 180: its server draws 4 black lines at either side.
        (
            {"resize_mode": 1, "upscaling_resize_w": 180},
            (110, 500),
            ((176, 816), (180, 512)),
        ),
        (
            {"resize_mode": 1, "upscaling_crop": False},
            (100, 60),
            ((848, 512), (848, 512)),
        ),
        (
            {"resize_mode": 1, "upscaling_resize_w": 256},
            (100, 200),
            ((256, 512), (256, 512)),
        ),
    ],
)
def test_sizes_are_those_of_a1111_with_its_black_borders(
    fields: JSONDict, size: tuple[int, int], sizes: tuple[tuple[int, int], ...]
):
    assert extras.sizes_after(read(**fields), size) == sizes


@pytest.mark.parametrize(
    ("fields", "size", "reason"),
    [
        (
            {"upscaling_resize": 4},
            (1024, 1024),
            r"upscaling_resize: .* 4096x4096 pixels; at least",
        ),
        ({"upscaling_resize": 0.1}, (512, 512), "48x48 pixels; at least 64 a side"),
        (
            {"resize_mode": 1, "upscaling_resize_h": 2048},
            (2000, 100),
            "upscaling_resize_w: the image would have 512x2048 pixels, cut out of 40960x2048;",
        ),
    ],
)
def test_images_beyond_the_limits_are_refused(
    fields: JSONDict, size: tuple[int, int], reason: str
):
    with pytest.raises(errors.JobError, match=reason):
        extras.sizes_after(read(**fields), size)


def test_a_chain_tells_the_size_of_its_last_stage_before_it_is_drawn():
    hires = {
        "prompt": "a",
        "width": 512,
        "height": 768,
        "enable_hr": True,
        "hr_scale": 1.5,
    }
    body = {
        **hires,
        "then": [{"upscaler_1": "4x_Sharp", "upscaling_resize": 1.5}, {"steps": 9}],
    }
    first, second, third = read_job(json.dumps(body), "m").stages_left()
    assert [each.only_upscales for each in (first, second, third)] == [
        False,
        True,
        False,
    ]
    assert (second.prompt, third.prompt, third.steps) == ("a", "a", 9)
    assert second.size_to_begin_with == first.final_size == (768, 1152)
    assert second.final_size == (1152, 1728)
    assert second.passes(768, 1152) == [
        Pass(1152, 1728, 0, decodes=False, enlarged=768 * 1152)
    ]
    body["then"] = [{"upscaler_1": "4x_Sharp", "upscaling_resize": 4}]
    with pytest.raises(
        errors.InvalidMessageError, match=r"stage 2: upscaling_resize: .*3072x4608"
    ):
        read_job(json.dumps(body), "m")


def test_the_image_of_a_stage_cannot_be_given():
    body = {"prompt": "a", "then": [{"upscaler_1": "Lanczos", "image": "b.png"}]}
    with pytest.raises(
        errors.InvalidMessageError, match="stage 2: image is the image of"
    ):
        read_job(json.dumps(body), "m")


def test_a_network_that_is_applied_twice_costs_what_it_takes():
    job = read(upscaling_resize=8, upscaler_2="other", extras_upscaler_2_visibility=0.5)
    (found,) = job.passes(64, 64)
    assert found.enlarged == 2 * (64 * 64 + 256 * 256)
    assert read(upscaler_1="Nearest").passes(64, 64)[0].enlarged == 0
    assert read(upscaling_resize=0.5).passes(256, 256)[0].enlarged == 0
    hires = {"prompt": "a", "init_images": "-", "upscaler_1": "-", "enable_hr": True}
    second = read(**hires, hr_upscaler="4x_Sharp").passes(64, 64)[1]
    assert (second.width, second.enlarged) == (128, 64 * 64)
