"""Fields of img2img, the second pass and ControlNets: each wrong value is refused by its name."""

from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job.message import read_job
from imagefleet.job.passes import hires, img2img
from imagefleet.job.passes.fields import Pass
from imagefleet.validation import JSONDict
from messages import read

UNIT = {"image": "a.png", "model": "canny"}


def refusal(**fields: Any) -> str:
    with pytest.raises(errors.InvalidMessageError) as caught:
        read(**fields)
    return caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("denoising_strength", 1.5, "less than or equal to 1"),
        ("resize_mode", 3, "3 (latent upscale) is not supported"),
        ("resize_mode", 4, "should be 0, 1 or 2"),
        ("mask", "../a.png", "should be a name"),
        ("mask_blur_x", -1, "greater than or equal to 0"),
        ("mask_round", False, "not supported"),
        ("initial_noise_multiplier", 1.1, "not supported"),
        ("latent_mask", "x", "not supported"),
        ("enable_hr", True, "is for txt2img"),
    ],
)
def test_a_wrong_value_in_img2img_is_refused_by_name(
    field: str, value: object, reason: str
):
    message = refusal(**{"init_images": ["a.png"], field: value})
    assert message.startswith(field)
    assert reason in message


@pytest.mark.parametrize("value", [None, [], ""])
def test_without_an_image_a_job_is_one_of_txt2img(value: object):
    assert read(init_images=value) == read()
    assert read(init_images=value, denoising_strength=0.3) == read()


def test_there_is_one_image():
    assert "init_images" in refusal(init_images=["a.png", "b.png"])
    assert read(init_images="a.png") == read(init_images=["a.png"])


@pytest.mark.parametrize("field", sorted(img2img.OWN_FIELDS))
def test_a_field_of_img2img_without_its_image_is_refused_unless_it_is_null(
    field: str,
):
    value = "a.png" if field == "mask" else 1
    assert (
        refusal(**{field: value}) == f"{field}: is for img2img; init_images is missing"
    )
    assert read(**{field: None}) == read()


def test_mask_blur_is_both_of_its_parts():
    assert read(init_images=["a.png"], mask_blur=9, mask_blur_x=1).blur == (9, 9)
    assert read(init_images=["a.png"], mask_blur_x=1).blur == (1, 4)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("hr_scale", 5, "2560x2560 pixels; 64 to 2048"),
        ("hr_resize_y", 40, "40x40 pixels; 64 to 2048"),
        ("hr_upscaler", "Latent (sharp)", "known: Latent, Latent (antialiased)"),
        ("hr_upscaler", "../x", "without a path"),
        ("hr_sampler_name", "Hoin", "unknown sampler 'Hoin'"),
        ("hr_scheduler", "Beat", "unknown scheduler 'Beat'"),
        ("hr_prompt", "a AND " * 8, "joins 9"),
        ("hr_negative_prompt", "[" * 33 + "a" + ":5]" * 33, "32 deep"),
        ("hr_checkpoint_name", "a/x:y", "without a path"),
        ("refiner_checkpoint", "a/..", "without a path"),
        (
            "override_settings",
            {"hires_fix_refiner_pass": "first pass"},
            "not supported",
        ),
        ("firstpass_image", "x", "not supported"),
        ("hr_cfg", 5, "not supported"),
    ],
)
def test_a_wrong_value_of_the_second_pass_is_refused_by_name(
    field: str, value: object, reason: str
):
    message = refusal(**{"enable_hr": True, "width": 512, "height": 512, field: value})
    assert field in message
    assert reason in message


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, (1024, 1536)),
        ({"hr_scale": 1.5}, (768, 1152)),
        ({"hr_resize_x": 768}, (768, 1152)),
        ({"hr_resize_y": 1152}, (768, 1152)),
        ({"hr_resize_x": 768, "hr_resize_y": 1152}, (768, 1152)),
        ({"hr_scale": 1.01}, (512, 768)),  # the latent has whole cells
    ],
)
def test_the_second_pass_has_the_size_that_a1111_computes(
    fields: JSONDict, size: tuple[int, int]
):
    job = read(enable_hr=True, width=512, height=768, hr_second_pass_steps=7, **fields)
    assert job.passes(512, 768) == [Pass(512, 768, 20, decodes=False), Pass(*size, 7)]
    assert job.final_size == size


def test_a_second_pass_of_another_ratio_is_cut():
    fields = {"enable_hr": True, "width": 512, "height": 768}
    assert read(**fields, hr_resize_x=768, hr_resize_y=768).final_size == (768, 768)
    assert read(**fields, hr_resize_x=512, hr_resize_y=1024).final_size == (512, 1024)
    message = refusal(**fields, hr_resize_x=2048, hr_resize_y=512)
    assert "2048x512 pixels, of 2048x3072; 64 to 2048 a side" in message


@pytest.mark.parametrize(
    ("size", "fields", "whole"),
    [
        ((512, 520), {"hr_scale": 1.3}, (665, 676)),
        ((515, 775), {"hr_scale": 1.5}, (772, 1162)),
        ((515, 775), {"hr_resize_x": 1001}, (1001, 1506)),
        ((515, 775), {"hr_resize_x": 1001, "hr_resize_y": 1203}, (1001, 1506)),
    ],
)
def test_sizes_between_whole_cells_are_rounded_down_in_the_latent_alone(
    size: tuple[int, int], fields: JSONDict, whole: tuple[int, int]
):
    job = read(enable_hr=True, width=size[0], height=size[1], **fields)
    found, final = hires.sizes_after(job, size)
    assert found == whole
    # `truncate_x` and `truncate_y`, of which more than half a cell may be left
    excess = [
        whole[at] - job.hr_resize_y * at - job.hr_resize_x * (1 - at) for at in (0, 1)
    ]
    cut = (
        [each // 8 for each in excess]
        if job.hr_resize_x and job.hr_resize_y
        else [0, 0]
    )
    assert (
        final
        == job.final_size
        == tuple(8 * (whole[at] // 8 - cut[at]) for at in (0, 1))
    )


def test_an_image_has_whole_cells_of_the_size_that_is_asked_for():
    assert read(width=515, height=775).final_size == (512, 768)
    assert read(width=515).final_size == (515, None)


def test_the_loras_of_the_second_pass_are_those_of_its_own_prompt():
    words = "a <lora:x:1> <lora:y:1>"
    others = "b <lora:y:1> <lora:x:0.5>"
    job = read(prompt=words, enable_hr=True, hr_prompt=others)
    assert [(each.name, each.unet_weight) for each in job.loras] == [
        ("x", 1.0),
        ("y", 1.0),
        ("x", 0.5),
    ]
    second, _ = job.hires_prompts
    assert second is not None
    assert [each.unet_weight for each in second.loras] == [1.0, 0.5]
    assert read(prompt=words, hr_prompt=others).loras == job.parsed_prompt.loras


def test_a_pass_without_guidance_takes_one_row_a_call():
    assert [each.rows for each in read(cfg_scale=1).passes(64, 64)] == [1]
    of_negative = read(cfg_scale=0, defaults="a1111-1.10")
    assert [each.rows for each in of_negative.passes(64, 64)] == [2]
    job = read(cfg_scale=2, enable_hr=True, hr_prompt="a cat:0.5")
    assert [each.rows for each in job.passes(64, 64)] == [2, 1]
    assert read(prompt="a cat:0.5", cfg_scale=2).passes(64, 64)[0].rows == 1, "2 x 0.5"
    assert read(prompt="a AND b AND c").passes(64, 64)[0].rows == 4
    assert read(prompt="a:.5 AND b:.25", cfg_scale=1).passes(64, 64)[0].rows == 3
    assert read(prompt="a:.75 AND b:.25", cfg_scale=1).passes(64, 64)[0].rows == 2
    job = read(prompt="a AND b", hr_prompt="a AND b AND c", enable_hr=True)
    assert [each.rows for each in job.passes(64, 64)] == [3, 4]


def test_a_second_pass_counts_its_steps_from_those_of_the_first():
    words = {
        "prompt": "[a:b:0.5] [c:d:12] [e:f:1.5]",
        "negative_prompt": "[g:h:1.5]",
        "steps": 10,
    }
    job = read(**words, enable_hr=True, hr_second_pass_steps=4, hr_sampler_name="Heun")
    first = job.parsed_prompt
    second = job.hires_prompts[0]
    assert second is not None
    assert job.hires_prompts[1] is not None
    assert [(each.until, each.text) for each in first.states] == [
        (5, "a c e"),
        (10, "b c e"),
    ]
    assert [(each.until, each.text) for each in second.states] == [
        (2, "b c e"),
        (4, "b d e"),
        (8, "b d f"),
    ]
    assert [each.until for each in job.hires_prompts[1].states] == [4, 8]
    assert read(prompt="(a:1.2)", enable_hr=True).hires_prompts == (None, None)


def test_a_second_pass_without_strength_is_enlarging_alone():
    job = read(enable_hr=True, denoising_strength=0, hr_upscaler="None")
    assert job.passes(64, 64)[1] == Pass(128, 128, 0, encodes=True)


def test_the_calls_of_img2img_are_those_of_the_end_of_the_schedule():
    for strength, calls in ((0, 1), (0.5, 11), (0.75, 16), (1, 20)):
        job = read(init_images=["a.png"], denoising_strength=strength)
        assert job.passes(64, 64) == [Pass(64, 64, calls, encodes=True)]
        assert job.passes(64, 64, enlarges=True) == [Pass(64, 64, 20)], (
            "the noise on the image"
        )


def test_the_files_and_prompts_of_the_second_pass():
    job = read(
        prompt="a <lora:x:0.5>",
        enable_hr=True,
        hr_upscaler="4x_Ultra",
        hr_prompt="b # c\n<lora:x:0.5>",
        hr_sampler_name="Use same sampler",
        hr_scheduler="Use same scheduler",
    )
    assert job.upscaler_file == "4x_Ultra"
    assert [each.text.split() for each in job.all_prompts] == [["a"], [], ["b"]]
    assert job.hr_sampler_name is job.hr_scheduler is None
    assert read(hr_upscaler="4x_Ultra").upscaler_file is None
    assert read(enable_hr=True).upscaler_file is None
    assert read_job(job.to_message(), "another") == job


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        ({"model": "canny"}, "image: is required"),
        ({"image": "a.png"}, "model: is required"),
        ({**UNIT, "image": "../a.png"}, "image: should be a name"),
        ({**UNIT, "model": "None"}, "model: should be the name of a file"),
        ({**UNIT, "model": ".."}, "model: should be the name of a file"),
        ({**UNIT, "weight": 3}, "weight: should be less than"),
        ({**UNIT, "guidance_start": 2}, "guidance_start: should be less than"),
        (
            {**UNIT, "guidance_start": 0.6, "guidance_end": 0.5},
            "is greater than guidance_end",
        ),
        ({**UNIT, "resize_mode": "Stretch"}, "resize_mode: should be 'Just Resize'"),
        ({**UNIT, "resize_mode": [1]}, "resize_mode: should be 'Just Resize'"),
        ({**UNIT, "module": "canny"}, "module is not supported, but for 'none'"),
        (
            {**UNIT, "control_mode": "ControlNet is more important"},
            "control_mode is not supported, but for 'Balanced'",
        ),
        ({**UNIT, "mask": "a.png"}, "mask is not supported"),
        ({**UNIT, "wieght": 1}, "wieght: unknown key"),
        ("canny", "should be an object"),
    ],
)
def test_a_wrong_unit_of_a_controlnet_is_refused_by_name(unit: object, reason: str):
    message = refusal(alwayson_scripts={"controlnet": {"args": [unit]}})
    assert message.startswith("alwayson_scripts.controlnet.args[0]")
    assert reason in message


@pytest.mark.parametrize(
    ("scripts", "reason"),
    [
        ({"Dynamic Thresholding": {"args": [{}]}}, "with 'Dynamic Thresholding'"),
        ({"controlnet": {"args": [UNIT] * 11}}, "at most 10 items"),
        ({"controlnet": [UNIT]}, "controlnet: should be an object"),
        ([1], "alwayson_scripts is not supported"),
        ("x", "alwayson_scripts is not supported"),
    ],
)
def test_other_scripts_are_refused_by_name(scripts: object, reason: str):
    message = refusal(alwayson_scripts=scripts)
    assert message.startswith("alwayson_scripts")
    assert reason in message


def test_units_are_read_as_the_extension_writes_them():
    unit = {
        "enabled": True,
        "input_image": "maps/pose.png",
        "model": "sd15\\control_v11p_sd15_openpose.pth [cab727d4]",
        "module": "None",
        "weight": 0.8,
        "guidance": 0.5,
        "resize_mode": "Envelope (Outer Fit)",
        "control_mode": "Balanced",
        "pixel_perfect": True,
        "processor_res": 512,
    }
    job = read(alwayson_scripts={"ControlNet": {"args": [unit, {"enabled": False}]}})
    (found,) = job.controls
    assert (found.image, found.model) == ("maps/pose.png", "control_v11p_sd15_openpose")
    assert (found.weight, found.guidance_end, found.resize_mode) == (0.8, 0.5, 2)
    assert read_job(job.to_message(), "another") == job


def test_no_unit_that_is_enabled_is_none():
    nothing: list[JSONDict] = [{"args": [{"enabled": False}]}, {"args": []}, {}]
    for scripts in ({}, *({"controlnet": each} for each in nothing)):
        assert read(alwayson_scripts=scripts) == read()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"enable_hr": True}, "with enable_hr are not supported"),
        (
            {"init_images": ["a.png"], "mask": "b.png"},
            "with inpaint_full_res are not supported",
        ),
    ],
)
def test_controlnets_are_refused_where_their_map_would_need_another_size(
    fields: JSONDict, reason: str
):
    message = refusal(alwayson_scripts={"controlnet": {"args": [UNIT]}}, **fields)
    assert reason in message


def test_extra_noise_is_of_img2img_and_of_the_second_pass():
    settings = {"img2img_extra_noise": 0.1}
    for fields in ({"init_images": ["a.png"]}, {"enable_hr": True}):
        job = read(**fields, override_settings=settings)
        assert job == read(**fields, img2img_extra_noise=0.1)
        assert job.sampler_options.extra_noise == 0.1
    settings = {"img2img_extra_noise": 2}
    assert "less than or equal to 1" in refusal(
        enable_hr=True, override_settings=settings
    )
    assert read(override_settings=settings) == read()


def test_the_format_of_the_server_is_that_of_the_output():
    for name, kind in {
        "jpg": "jpeg",
        "JPEG": "jpeg",
        "png": "png",
        "webp": "webp",
    }.items():
        job = read(override_settings={"samples_format": name})
        assert (job.output.format, job.output.quality) == (
            kind,
            90 if kind == "png" else 80,
        )
    assert (
        read(
            override_settings={"samples_format": "jpg", "jpeg_quality": 95}
        ).output.quality
        == 95
    )
    assert "output" in refusal(override_settings={"samples_format": "gif"})


def test_null_is_the_default_of_what_extensions_leave_empty():
    names = ("seed", "steps", "cfg_scale", "batch_size", "n_iter")
    assert read(**dict.fromkeys(names)) == read()


def test_a_subseed_counts_only_with_the_extras_of_seeds():
    variation = {"seed": 1, "subseed": 2, "subseed_strength": 0.5}
    assert read(**variation, seed_enable_extras=True) == read(**variation)
    assert read(**variation, seed_enable_extras=False) == read(seed=1)


def test_scripts_that_the_page_always_records_are_taken_while_they_change_nothing():
    off = {
        "API payload": {"args": []},
        "Refiner": {"args": [False, "", 0.8]},
        "Seed": {"args": [7, False, -1, 0, 0, 0]},
    }
    assert read(seed=7, alwayson_scripts=off) == read(seed=7)
    for name, args in {
        "Refiner": [True, "x", 0.8],
        "Seed": [8, False],
        "Dynamic": [],
    }.items():
        assert repr(name) in refusal(seed=7, alwayson_scripts={name: {"args": args}})
