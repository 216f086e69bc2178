"""AUTOMATIC1111's payload field by field: the code and docs/a1111.md say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from imagefleet import errors
from imagefleet.job import override_settings
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes import controlnet, extras, fields, hires, img2img

PAGE = Path(__file__).parents[3] / "docs" / "a1111.md"

#: The fields of StableDiffusionTxt2ImgProcessingAPI in 1.10, which its /docs shows.
A1111_FIELDS = frozenset(
    {
        *("prompt", "negative_prompt", "styles", "seed", "subseed", "subseed_strength"),
        *("seed_resize_from_h", "seed_resize_from_w", "sampler_name", "scheduler", "batch_size"),
        *("n_iter", "steps", "cfg_scale", "width", "height", "restore_faces", "tiling"),
        *("do_not_save_samples", "do_not_save_grid", "eta", "denoising_strength", "s_min_uncond"),
        *("s_churn", "s_tmax", "s_tmin", "s_noise", "override_settings"),
        *("override_settings_restore_afterwards", "refiner_checkpoint", "refiner_switch_at"),
        *("disable_extra_networks", "firstpass_image", "comments", "enable_hr", "firstphase_width"),
        *("firstphase_height", "hr_scale", "hr_upscaler", "hr_second_pass_steps", "hr_resize_x"),
        *("hr_resize_y", "hr_checkpoint_name", "hr_sampler_name", "hr_scheduler", "hr_prompt"),
        *("hr_negative_prompt", "force_task_id", "sampler_index", "script_name", "script_args"),
        *("send_images", "save_images", "alwayson_scripts", "infotext"),
    }
)

#: The fields of StableDiffusionImg2ImgProcessingAPI that the one above lacks, or means otherwise.
A1111_IMG2IMG_FIELDS = frozenset(
    {
        *("init_images", "denoising_strength", "resize_mode", "image_cfg_scale", "mask"),
        *("mask_blur", "mask_blur_x", "mask_blur_y", "mask_round", "inpainting_fill"),
        *("inpaint_full_res", "inpaint_full_res_padding", "inpainting_mask_invert"),
        *("initial_noise_multiplier", "latent_mask", "include_init_images"),
    }
)

#: The fields of ExtrasSingleImageRequest.
A1111_EXTRAS_FIELDS = frozenset(
    {
        *("resize_mode", "show_extras_results", "gfpgan_visibility", "codeformer_visibility"),
        *("codeformer_weight", "upscaling_resize", "upscaling_resize_w", "upscaling_resize_h"),
        *("upscaling_crop", "upscaler_1", "upscaler_2", "extras_upscaler_2_visibility"),
        *("upscale_first", "image"),
    }
)

#: Forge's, a fork of the same API.
FORGE_FIELDS = frozenset({"distilled_cfg_scale"})

#: They set fields of a job.
ALIASES = frozenset({"override_settings", "sampler_index", extras.IMAGE})


class Row(NamedTuple):
    verdict: str
    accepted: tuple[Any, ...]


def rows(section: str) -> dict[str, Row]:
    """What the page's table says of each name."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return dict(_rows(text))


def _rows(text: str) -> Iterator[tuple[str, Row]]:
    for names, verdict, notes in re.findall(r"^\| (`.+?) \| (.+?) \| (.*?)\|$", text, re.MULTILINE):
        accepted = re.findall(r"`([^`]+)`", notes) if verdict == "rejected" else []
        for name in re.findall(r"`([^`]+)`", names):
            yield name, Row(verdict, tuple(json.loads(value) for value in accepted))


FIELDS = rows("Its fields")
IMG2IMG_FIELDS = rows("Its fields of img2img")
EXTRAS_FIELDS = rows("Its fields of extras")
UNIT_FIELDS = rows("ControlNet")
SETTINGS = rows("Its settings")


def read(**fields: Any) -> Job:
    return read_job(json.dumps({"prompt": "a cat", **fields}), "message-1")


def neutral(values: Mapping[str, tuple[object, ...]]) -> dict[str, set[str]]:
    return {
        name: {json.dumps(value) for value in each if value is not None}
        for name, each in values.items()
    }


def documented(table: Mapping[str, Row]) -> dict[str, set[str]]:
    return {
        name: {json.dumps(value) for value in row.accepted}
        for name, row in table.items()
        if row.verdict == "rejected"
    }


def test_the_page_has_every_field_of_the_api() -> None:
    assert FIELDS.keys() == A1111_FIELDS | FORGE_FIELDS
    assert {row.verdict for row in FIELDS.values()} == {"honoured", "no effect", "rejected"}
    assert IMG2IMG_FIELDS.keys() == A1111_IMG2IMG_FIELDS
    assert EXTRAS_FIELDS.keys() == A1111_EXTRAS_FIELDS


def test_the_page_tells_what_the_code_does_with_each_field() -> None:
    assert documented(FIELDS) == neutral(fields.NEUTRAL_VALUES)
    honoured = {name for name, row in FIELDS.items() if row.verdict == "honoured"}
    assert honoured - ALIASES <= Job.model_fields.keys()
    without = {name for name, row in FIELDS.items() if row.verdict == "no effect"}
    assert without >= fields.WITHOUT_EFFECT
    with_second_pass = without - fields.WITHOUT_EFFECT
    assert with_second_pass == hires.NEUTRAL_VALUES.keys()


def test_the_page_tells_what_the_code_does_with_each_field_of_img2img() -> None:
    assert documented(IMG2IMG_FIELDS) == neutral(img2img.NEUTRAL_VALUES)
    verdicts = {name: row.verdict for name, row in IMG2IMG_FIELDS.items()}
    honoured = {name for name, verdict in verdicts.items() if verdict == "honoured"}
    assert honoured == img2img.FIELDS
    without = {name for name, verdict in verdicts.items() if verdict == "no effect"}
    assert without == img2img.WITHOUT_EFFECT


def test_the_page_tells_what_the_code_does_with_each_field_of_extras() -> None:
    assert documented(EXTRAS_FIELDS) == neutral(extras.NEUTRAL_VALUES)
    verdicts = {name: row.verdict for name, row in EXTRAS_FIELDS.items()}
    honoured = {name for name, verdict in verdicts.items() if verdict == "honoured"}
    assert honoured - ALIASES == extras.FIELDS | {"resize_mode"}
    without = {name for name, verdict in verdicts.items() if verdict == "no effect"}
    assert without == extras.WITHOUT_EFFECT


def test_the_page_tells_what_the_code_does_with_each_field_of_a_controlnet() -> None:
    honoured = {name for name, row in UNIT_FIELDS.items() if row.verdict == "honoured"}
    rejected = {name for name, row in UNIT_FIELDS.items() if row.verdict == "rejected"}
    without = {name for name, row in UNIT_FIELDS.items() if row.verdict == "no effect"}
    assert without == controlnet.WITHOUT_EFFECT
    assert honoured - {"enabled", "input_image", "guidance"} == (
        controlnet.Unit.model_fields.keys() - {"module", "control_mode"}
    )
    assert rejected == {"module", "control_mode", *controlnet.UNSUPPORTED}


def test_the_page_has_every_setting_that_matters_in_these_passes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in (*img2img.NEUTRAL_SETTINGS, *hires.NEUTRAL_SETTINGS):
        assert f"`{name}`" in text


def test_the_page_tells_what_the_code_does_with_each_setting() -> None:
    assert documented(SETTINGS) == neutral(override_settings.NEUTRAL_VALUES)
    honoured = {name for name, row in SETTINGS.items() if row.verdict == "honoured"}
    assert honoured == override_settings.FIELDS.keys()


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].verdict == "no effect"])
def test_a_field_without_effect_changes_no_job_whatever_its_value(name: str) -> None:
    for value in (None, True, 5, 0.3, "x", [1], {"a": 1}):
        assert read(**{name: value}) == read()


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].verdict == "rejected"])
def test_a_rejected_field_is_named_and_its_neutral_values_change_nothing(name: str) -> None:
    for value in (None, *FIELDS[name].accepted):
        assert read(**{name: value}) == read()
    for value in (0.123, "x", [1], {"a": {"args": []}}):
        with pytest.raises(errors.InvalidMessageError, match=rf"{name} is not supported"):
            read(**{name: value})


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if SETTINGS[name].verdict == "rejected"]
)
def test_a_rejected_setting_is_named_and_its_neutral_values_change_nothing(name: str) -> None:
    for value in (None, *SETTINGS[name].accepted):
        assert read(override_settings={name: value}) == read()
    with pytest.raises(errors.InvalidMessageError, match=rf"override_settings\.{name} is not"):
        read(override_settings={name: 0.123})


#: A value for each honoured field, other than the default.
VALUES: dict[str, Any] = {
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
    "eta": 0.5,
    "s_churn": 1,
    "s_tmin": 1,
    "s_tmax": 2,
    "s_noise": 0.9,
    "s_min_uncond": 1,
    "override_settings": {"randn_source": "NV"},
    "alwayson_scripts": {"controlnet": {"args": [{"image": "a.png", "model": "b"}]}},
}

#: Of the second pass, which has to be switched on.
HIRES_VALUES: dict[str, Any] = {
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
}


def test_every_honoured_field_reaches_the_job() -> None:
    honoured = {name for name, row in FIELDS.items() if row.verdict == "honoured"}
    assert VALUES.keys() | HIRES_VALUES.keys() == honoured
    jobs = [read(**{name: value}) for name, value in VALUES.items()]
    jobs += [read(**{"enable_hr": True, name: value}) for name, value in HIRES_VALUES.items()]
    different = {job.to_message() for job in [read(), *jobs]}
    assert len(different) == len(VALUES) + len(HIRES_VALUES) + 1


def test_the_fields_of_the_second_pass_have_no_effect_without_it() -> None:
    for name in {*HIRES_VALUES, "hr_cfg", "hr_additional_modules"} - {"enable_hr"}:
        for value in (None, True, -5, 0.3, "x", [1], {"a": 1}):
            assert read(**{name: value}) == read(enable_hr=False, **{name: value}) == read()
