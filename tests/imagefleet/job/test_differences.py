"""What is drawn otherwise than by AUTOMATIC1111 is on the page, and said when it is drawn."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from imagefleet.job import differences
from imagefleet.job.message import read_job
from worker.inputs import pictures
from worker.stages.requests import requests_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def untold() -> None:
    differences.warn.cache_clear()


def test_the_code_warns_of_each_and_the_page_lists_it():
    sources = [*(ROOT / "imagefleet").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    warned = {
        name
        for source in sources
        for name in re.findall(r'differences\.warn\("(\w+)"\)', source.read_text())
    }
    assert warned | differences.OF_JOBS.keys() == differences.KNOWN.keys()
    page = (ROOT / "docs" / "a1111.md").read_text()
    assert all(
        f"- {text[0].upper()}{text[1:]}.\n" in page
        for text in differences.KNOWN.values()
    )


def test_a_worker_says_once_what_may_differ(caplog):
    differences.warn("control_size")
    differences.warn("control_size")
    (record,) = caplog.records
    assert (
        "an image may differ from AUTOMATIC1111's: a ControlNet's image"
        in record.getMessage()
    )


def test_a_controlnets_map_of_another_size(caplog):
    image = Image.new("RGB", (64, 64))
    pictures.control(image, 1, (64, 64))
    assert not caplog.records
    assert pictures.control(image, 1, (96, 64)).shape == (64, 96, 3)
    assert differences.KNOWN["control_size"] in caplog.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scheduler": "Align Your Steps", "steps": 1}, True),
        ({"scheduler": "Align Your Steps", "steps": 2}, False),
        ({"scheduler": "Karras", "steps": 1}, False),
        (
            {
                "enable_hr": True,
                "hr_scheduler": "Align Your Steps",
                "hr_second_pass_steps": 1,
            },
            True,
        ),
    ],
)
def test_one_step_of_align_your_steps(fields: dict[str, object], told: bool, caplog):
    job = read_job(json.dumps({"prompt": "a", **fields}), "one")
    requests_of(job, (512, 512), (), ())
    assert (differences.KNOWN["one_aligned_step"] in caplog.text) == told


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("a {red|blue} house", True),
        ("in __season__", True),
        ("a {house}, [a|b], snake__case", False),
    ],
)
def test_dynamic_prompts(prompt: str, told: bool):
    job = read_job(json.dumps({"prompt": prompt}), "one")
    assert ("dynamic_prompt" in differences.of_job(job, (None, None))) == told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"width": 1024, "height": 1024, "randn_source": "GPU"}, True),
        ({"width": 1024, "height": 1024, "randn_source": "NV"}, False),
        ({"width": 512, "height": 512, "randn_source": "GPU"}, False),
    ],
)
def test_the_noise_of_large_pictures_on_small_gpus(
    fields: dict[str, object], told: bool, caplog
):
    job = read_job(json.dumps({"prompt": "a", **fields}), "one")
    requests_of(
        job, (512 if job.width is None else job.width, job.height or 512), (), ()
    )
    assert len(caplog.records) == told
