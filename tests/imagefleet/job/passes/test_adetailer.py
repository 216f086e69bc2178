"""ADetailer's units in a payload."""

import json
from typing import Any

import pytest

from fleet.plan import work
from imagefleet import errors
from imagefleet.job import differences
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes.fields import Pass
from imagefleet.validation import JSONDict

UNIT = {"ad_model": "face_yolov8n.pt"}


def read(*args: Any, **fields: Any) -> Job:
    scripts = {"ADetailer": {"args": [*args]}}
    payload = {"prompt": "a portrait", "alwayson_scripts": scripts, **fields}
    return read_job(json.dumps(payload), "one")


def test_the_units_that_are_switched_on_are_read_with_its_defaults():
    off = [{"ad_model": "None"}, {**UNIT, "ad_tab_enable": False}]
    job = read(
        True, False, *off, UNIT, {"ad_model": "hand_yolov8n", "ad_confidence": 0.5}
    )
    first, second = job.details
    assert (first.ad_model, first.ad_confidence, first.ad_denoising_strength) == (
        "face_yolov8n",
        0.3,
        0.4,
    )
    assert (second.ad_model, second.ad_confidence) == ("hand_yolov8n", 0.5)
    assert read(False, False, UNIT).details == ()
    assert read(UNIT).digest != read(False, False, UNIT).digest == read().digest
    assert read_job(job.to_message(), "two").digest == job.digest


def test_numbers_count_where_a_switch_says_so():
    given = {**UNIT, "ad_steps": 7, "ad_cfg_scale": 3, "ad_inpaint_width": 640}
    switches = {"ad_use_steps": True, "ad_use_cfg_scale": False}
    (unit,) = read({**given, **switches}).details
    own = [
        unit.own(name, 1) for name in ("ad_steps", "ad_cfg_scale", "ad_inpaint_width")
    ]
    assert own == [7, 1, 1]
    assert (
        read({**given, **switches}).digest
        == read({**UNIT, **switches, "ad_steps": 7}).digest
    )
    (unit,) = read({**UNIT, "ad_use_steps": True}).details
    assert unit.own("ad_steps", 1) == 28, "the extension's own"


def test_a_part_of_each_unit_counts_as_a_pass():
    units = [
        {**UNIT, "ad_use_steps": True, "ad_steps": 8, "ad_denoising_strength": 0.5},
        {**UNIT, "ad_use_inpaint_width_height": True, "ad_inpaint_width": 768},
        {**UNIT, "ad_use_cfg_scale": True, "ad_cfg_scale": 1},
    ]
    job = read(*units, steps=20, enable_hr=True)
    assert job.detail_passes(256, 320) == [
        Pass(256, 320, 5, encodes=True),
        Pass(768, 512, 9, encodes=True),
        Pass(256, 320, 9, encodes=True, rows=1),
    ]
    whole: dict[str | None, work.ModelJobs] = {}
    plain: dict[str | None, work.ModelJobs] = {}
    models = work.read_models([], "sd1")
    work.add_stages(whole, models, read(UNIT, steps=20))
    work.add_stages(plain, models, read(steps=20))
    assert 1.4 < whole[None].tflop / plain[None].tflop < 1.7


def test_settings_of_img2img_are_those_of_the_parts():
    """Its passes are img2img of A1111's own, which has the settings of the job."""
    own = {"img2img_extra_noise": 0.25}
    assert read(UNIT, override_settings=own).sampler_options.extra_noise == 0.25
    without = json.dumps({"prompt": "a portrait", "override_settings": own})
    assert read_job(without, "one").sampler_options.extra_noise == 0
    with pytest.raises(errors.InvalidMessageError, match="img2img_fix_steps"):
        read(UNIT, override_settings={"img2img_fix_steps": True})


def test_options_of_the_payload_that_its_parts_lack_there_are_told():
    assert [*differences.of_job(read(UNIT), (64, 64))] == []
    for given in ({"eta": 0.5}, {"s_churn": 4}):
        found = differences.of_job(read(UNIT, **given), (64, 64))
        assert [*found] == ["options_of_parts"]
        assert [*differences.of_job(read(**given), (64, 64))] == []


def test_words_of_its_own_are_edited_by_the_parts_steps():
    unit = {**UNIT, "ad_prompt": "a face [smiling:0.5]", "ad_steps": 4}
    ((positive, negative),) = read({**unit, "ad_use_steps": True}).detail_prompts
    assert negative is None
    assert [state.until for state in positive.subprompts[0].states] == [2, 4]


@pytest.mark.parametrize(
    ("args", "fields", "said"),
    [
        ([{**UNIT, "ad_model": "../x"}], {}, "detectors/ of the container"),
        ([{**UNIT, "ad_model": "mediapipe_face_full"}], {}, "is no YOLO"),
        ([{**UNIT, "ad_prompt": "a [SEP] b"}], {}, r"\[SEP\]"),
        ([{**UNIT, "ad_prompt": "a [b:c:0.5"}], {}, None),
        ([{**UNIT, "ad_prompt": "<lora:x:1>"}], {}, "LoRAs and the words"),
        ([{**UNIT, "ad_use_sampler": True}], {}, "ad_use_sampler is not supported"),
        ([{**UNIT, "ad_controlnet_model": "x"}], {}, "ad_controlnet_model is not supp"),
        ([{**UNIT, "ad_confidense": 1}], {}, "ad_confidense"),
        ([True, True, UNIT], {}, "skip_img2img is not supported"),
        (
            [{**UNIT, "ad_use_steps": True, "ad_steps": 1}],
            {"sampler_name": "DDIM"},
            "2 at least",
        ),
        ([UNIT] * 5, {}, "at most 4"),
        ([UNIT], {"init_images": ["a.png"], "mask": "m.png"}, "ADetailer with a mask"),
        (
            [UNIT],
            {"init_images": ["a.png"], "upscaler_1": "Lanczos"},
            "alwayson_scripts",
        ),
    ],
)
def test_what_would_change_the_picture_and_is_not_drawn_is_refused(
    args: list[Any], fields: JSONDict, said: str | None
):
    if said is None:
        assert read(*args, **fields).details
        return
    with pytest.raises(errors.InvalidMessageError, match=said):
        read(*args, **fields)
