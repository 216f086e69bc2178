"""AUTOMATIC1111's fields and settings, pass by pass: jobs and docs/a1111.md keep to the tables."""

import re
from pathlib import Path
from typing import Any

import pytest
import write_a1111

from imagefleet import errors
from imagefleet.job import settings_table
from imagefleet.job.message import Job
from imagefleet.job.passes import controlnet, extras, hires, img2img
from imagefleet.validation import JSONDict
from messages import read

PAGE = Path(__file__).parents[3] / "docs" / "a1111.md"

#: The fields of StableDiffusionTxt2ImgProcessingAPI in 1.10, which its /docs shows.
A1111_FIELDS = frozenset(
    {
        "prompt",
        "negative_prompt",
        "styles",
        "seed",
        "subseed",
        "subseed_strength",
        "seed_resize_from_h",
        "seed_resize_from_w",
        "sampler_name",
        "scheduler",
        "batch_size",
        "n_iter",
        "steps",
        "cfg_scale",
        "width",
        "height",
        "restore_faces",
        "tiling",
        "do_not_save_samples",
        "do_not_save_grid",
        "eta",
        "denoising_strength",
        "s_min_uncond",
        "s_churn",
        "s_tmax",
        "s_tmin",
        "s_noise",
        "override_settings",
        "override_settings_restore_afterwards",
        "refiner_checkpoint",
        "refiner_switch_at",
        "disable_extra_networks",
        "firstpass_image",
        "comments",
        "enable_hr",
        "firstphase_width",
        "firstphase_height",
        "hr_scale",
        "hr_upscaler",
        "hr_second_pass_steps",
        "hr_resize_x",
        "hr_resize_y",
        "hr_checkpoint_name",
        "hr_sampler_name",
        "hr_scheduler",
        "hr_prompt",
        "hr_negative_prompt",
        "force_task_id",
        "sampler_index",
        "script_name",
        "script_args",
        "send_images",
        "save_images",
        "alwayson_scripts",
        "infotext",
    }
)

#: The fields of StableDiffusionImg2ImgProcessingAPI that the one above lacks, or means otherwise.
A1111_IMG2IMG_FIELDS = frozenset(
    {
        "init_images",
        "denoising_strength",
        "resize_mode",
        "image_cfg_scale",
        "mask",
        "mask_blur",
        "mask_blur_x",
        "mask_blur_y",
        "mask_round",
        "inpainting_fill",
        "inpaint_full_res",
        "inpaint_full_res_padding",
        "inpainting_mask_invert",
        "initial_noise_multiplier",
        "latent_mask",
        "include_init_images",
    }
)

#: The fields of ExtrasSingleImageRequest.
A1111_EXTRAS_FIELDS = frozenset(
    {
        "resize_mode",
        "show_extras_results",
        "gfpgan_visibility",
        "codeformer_visibility",
        "codeformer_weight",
        "upscaling_resize",
        "upscaling_resize_w",
        "upscaling_resize_h",
        "upscaling_crop",
        "upscaler_1",
        "upscaler_2",
        "extras_upscaler_2_visibility",
        "upscale_first",
        "image",
    }
)

#: Forge's, a fork of the same API.
FORGE_FIELDS = frozenset({"distilled_cfg_scale"})

#: They set fields of a job.
ALIASES = frozenset({"override_settings", "sampler_index", extras.IMAGE})


#: A job of each pass.
JOBS: dict[str, JSONDict] = {
    "txt2img": {},
    "img2img": {"init_images": ["a.png"]},
    "hires": {"enable_hr": True},
    "extras": {"init_images": ["a.png"], "upscaler_1": "Lanczos"},
}

#: Values that no row takes as neutral, and a job's fields hardly ever.
ODD_VALUES: tuple[Any, ...] = (0.123, "x", [1], {"a": {"args": []}})

by_pass = pytest.mark.parametrize("job", settings_table.PASSES)


def test_the_tables_of_the_page_are_current():
    page = PAGE.read_text()

    assert write_a1111.current(page) == page, "write it anew: make docs"


def test_the_page_tells_what_the_code_does_with_each_field_of_a_controlnet():
    text = PAGE.read_text().partition("\n## ControlNet\n")[2].partition("\n## ")[0]
    verdicts: dict[str, set[str]] = {}
    for names, verdict in re.findall(r"^\| (`.+?) \| (.+?) \|", text, re.MULTILINE):
        verdicts.setdefault(verdict, set()).update(re.findall(r"`([^`]+)`", names))
    assert verdicts["no effect"] == controlnet.WITHOUT_EFFECT
    honoured = verdicts["honoured"] - {"enabled", "input_image", "guidance"}
    assert honoured == controlnet.Unit.model_fields.keys()
    assert verdicts["rejected"] == controlnet.UNSUPPORTED.keys()


def test_every_field_of_the_apis_is_in_the_table_or_a_jobs_own():
    fields = A1111_FIELDS | A1111_IMG2IMG_FIELDS | A1111_EXTRAS_FIELDS | FORGE_FIELDS
    assert fields - ALIASES <= settings_table.FIELDS.keys() | Job.model_fields.keys()
    drawn = {row.field for row in settings_table.FIELDS.values()} - {""}
    drawn |= {row.field for row in settings_table.SETTINGS.values()} - {""}
    assert drawn <= Job.model_fields.keys()
    of_passes = hires.FIELDS | img2img.FIELDS | extras.FIELDS
    assert of_passes <= settings_table.FIELDS.keys()


#: Fields, of which the first two are settings, and whether a pass refuses, takes or ignores them.
EFFECTS = [
    ("sd_vae_encode_method", "txt2img", "ignored"),
    ("overlay_inpaint", "img2img", "neutral"),
    ("restore_faces", "txt2img", "neutral"),
    ("mask_round", "img2img", "neutral"),
    ("codeformer_visibility", "extras", "neutral"),
    ("hr_scale", "txt2img", "ignored"),
    ("hr_scale", "img2img", "ignored"),
    ("denoising_strength", "txt2img", "ignored"),
    ("resize_mode", "txt2img", "refused"),
    ("mask", "txt2img", "refused"),
    ("upscaling_resize", "img2img", "refused"),
    ("denoising_strength", "extras", "refused"),
]


@pytest.mark.parametrize(("name", "job", "effect"), EFFECTS)
def test_a_field_or_a_setting_has_the_effect_of_its_pass(
    name: str, job: str, effect: str
):
    base = JOBS[job]
    is_setting = name in settings_table.SETTINGS
    row = (settings_table.SETTINGS if is_setting else settings_table.FIELDS)[name]

    def given(value: object) -> Job:
        fields = {name: value}
        return read(**base, **({"override_settings": fields} if is_setting else fields))

    assert given(None) == read(**base)
    for value in row.neutral:
        assert given(value) == read(**base)
    for value in ODD_VALUES:
        if effect == "ignored":
            assert given(value) == read(**base)
        else:
            with pytest.raises(errors.InvalidMessageError, match=name):
                given(value)


@by_pass
def test_settings_of_saving_and_of_the_page_have_no_effect(job: str):
    for beginning in settings_table.FAMILIES:
        assert read(**JOBS[job], override_settings={f"{beginning}x": 1}) == read(
            **JOBS[job]
        )
    assert not {
        name
        for name in settings_table.SETTINGS
        if name.startswith(settings_table.FAMILIES)
    }


@by_pass
def test_a_setting_that_no_row_names_is_refused_in_every_pass(job: str):
    for name in (
        "samples_fromat",
        "img2img_strength",
        "uni_pc_thresholding",
        "hires_fix_cfg",
    ):
        with pytest.raises(
            errors.InvalidMessageError, match=rf"settings\.{name} is not"
        ):
            read(**JOBS[job], override_settings={name: None})


#: A value for each drawn field, other than the default.
VALUES: JSONDict = {
    "prompt": "a dog",
    "negative_prompt": "x",
    "sampler_name": "Euler",
    "scheduler": "Karras",
    "sampler_index": "DDIM",
    "steps": 21,
    "cfg_scale": 8,
    "width": 64,
    "height": 64,
    "batch_size": 2,
    "n_iter": 2,
    "seed": 3,
    "subseed": 4,
    "subseed_strength": 0.5,
    "seed_resize_from_w": 64,
    "seed_resize_from_h": 64,
    "tiling": True,
    "eta": 0.5,
    "s_churn": 1,
    "s_tmin": 1,
    "s_tmax": 2,
    "s_noise": 0.9,
    "s_min_uncond": 1,
    "override_settings": {"randn_source": "NV"},
    "refiner_checkpoint": "folder/late.safetensors [0123456789]",
    "refiner_switch_at": 0.7,
    "alwayson_scripts": {"controlnet": {"args": [{"image": "a.png", "model": "b"}]}},
}

#: Of the second pass, which has to be switched on.
HIRES_VALUES: JSONDict = {
    "enable_hr": True,
    "denoising_strength": 0.5,
    "hr_scale": 1.5,
    "hr_resize_x": 128,
    "hr_resize_y": 128,
    "hr_upscaler": "Lanczos",
    "hr_second_pass_steps": 5,
    "hr_sampler_name": "Euler",
    "hr_scheduler": "Karras",
    "hr_prompt": "a dog",
    "hr_negative_prompt": "x",
    "hr_checkpoint_name": "sharp.safetensors",
}


def test_every_drawn_field_reaches_the_job():
    rows = settings_table.FIELDS
    drawn = {name for name in A1111_FIELDS if name not in rows or rows[name].field}
    assert VALUES.keys() | HIRES_VALUES.keys() == drawn
    refiner = {"refiner_switch_at": {"refiner_checkpoint": "other"}}
    jobs = [
        read(**{name: value}, **refiner.get(name, {})) for name, value in VALUES.items()
    ]
    jobs += [
        read(**{"enable_hr": True, name: value}) for name, value in HIRES_VALUES.items()
    ]
    different = {job.to_message() for job in [read(), *jobs]}
    assert len(different) == len(VALUES) + len(HIRES_VALUES) + 1


def test_the_share_of_a_refiner_that_is_none_has_no_effect():
    for title in (None, "", "None", "none"):
        share = {"refiner_checkpoint": title, "refiner_switch_at": 0.8}
        by_steps = {"refiner_switch_by_sample_steps": True}
        assert read(**share, override_settings=by_steps).digest == read().digest
    assert read(refiner_checkpoint="a.ckpt [0123456789]").refiner_checkpoint == "a"
    with pytest.raises(
        errors.InvalidMessageError, match=r"refiner_checkpoint: .* DPM adaptive"
    ):
        read(refiner_checkpoint="a", sampler_name="DPM adaptive")
    adaptive = {"hr_sampler_name": "DPM adaptive", "enable_hr": True}
    with pytest.raises(
        errors.InvalidMessageError, match=r"refiner_checkpoint: .* DPM adaptive"
    ):
        read(refiner_checkpoint="a", **adaptive)
