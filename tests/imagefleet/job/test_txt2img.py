"""AUTOMATIC1111's payload field by field: the code and docs/a1111.md say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from imagefleet import errors
from imagefleet.job import override_settings, txt2img
from imagefleet.job.message import Job, read_job

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

#: Forge's, a fork of the same API.
FORGE_FIELDS = frozenset({"distilled_cfg_scale"})

#: They set fields of a job.
ALIASES = frozenset({"override_settings", "sampler_index"})


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


def test_the_page_tells_what_the_code_does_with_each_field() -> None:
    assert documented(FIELDS) == neutral(txt2img.NEUTRAL_VALUES)
    honoured = {name for name, row in FIELDS.items() if row.verdict == "honoured"}
    assert honoured - ALIASES <= Job.model_fields.keys()
    without = {name for name, row in FIELDS.items() if row.verdict == "no effect"}
    assert without >= txt2img.WITHOUT_EFFECT
    assert all(txt2img.has_no_effect(name) for name in without)


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
}


def test_every_honoured_field_reaches_the_job() -> None:
    assert VALUES.keys() == {name for name, row in FIELDS.items() if row.verdict == "honoured"}
    jobs = [read(**{name: value}) for name, value in VALUES.items()]
    assert len({job.to_message() for job in [read(), *jobs]}) == len(VALUES) + 1
