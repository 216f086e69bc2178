"""ADetailer's units in a payload."""

import json
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job.message import Job, read_job

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
    (unit,) = read({**given, **switches, "ad_use_inpaint_width_height": False}).details
    assert (unit.ad_steps, unit.ad_cfg_scale, unit.ad_inpaint_width) == (7, None, None)


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
    args: list[Any], fields: dict[str, Any], said: str | None
):
    if said is None:
        assert read(*args, **fields).details
        return
    with pytest.raises(errors.InvalidMessageError, match=said):
        read(*args, **fields)
