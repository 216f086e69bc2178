"""A job with `defaults` has those of AUTOMATIC1111's API where it leaves fields out."""

import json

import pytest

from imagefleet import errors
from imagefleet.job import settings_table
from imagefleet.job.message import read_job
from messages import read

A1111 = settings_table.A1111


def test_what_is_left_out_is_as_the_api_has_it_and_so_is_the_digest():
    # StableDiffusionTxt2ImgProcessingAPI of 1.10 and `randn_source` as installed.
    there = {
        "sampler_name": "Euler",
        "scheduler": "Automatic",
        "steps": 50,
        "width": 512,
    }
    there |= {"height": 512, "randn_source": "GPU", "sd_vae_decode_method": "Full"}
    job = read(defaults=A1111)
    assert job.digest == read(**there).digest != read().digest
    assert read_job(job.to_message(), "message-2").digest == job.digest


def test_what_a_payload_gives_in_any_of_its_ways_stays():
    job = read(
        defaults=A1111,
        sampler_index="DDIM",
        steps=7,
        width=768,
        override_settings={"randn_source": "NV"},
    )
    assert (job.sampler, job.steps, job.width, job.height) == ("ddim", 7, 768, 512)
    assert job.randn_source == "NV"
    assert read(defaults=A1111, steps=None).steps == 50


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("DPM++ 2M", "dpmpp_2m_karras"),
        ("DPM++ 2M SDE", "dpmpp_2m_sde_exponential"),
        ("DPM++ 2M Karras", "dpmpp_2m_karras"),
        ("DPM++ 2M SDE Karras", "dpmpp_2m_sde_karras"),
        ("Euler Karras", "euler_karras"),
        ("Euler", "euler"),
        ("DDIM", "ddim"),
    ],
)
def test_a_samplers_name_alone_has_the_schedule_of_1_10(name: str, sampler: str):
    assert read(defaults=A1111, sampler_name=name).sampler == sampler


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 20},
        {"sampler_name": "Euler a"},
        {"steps": 20, "then": [{"cfg_scale": 5.0}]},
    ],
)
def test_a_value_that_is_our_own_default_is_told_beside_others_defaults(given):
    """Most payloads of A1111's page have 20 steps of Euler a."""
    job = read(defaults=A1111, id="a", **given)
    again = read_job(job.to_message(), "message")
    assert again.digest == job.digest
    assert (again.sampler, again.steps) == (job.sampler, job.steps)
    assert again.at_stage(again.stages).steps == job.steps
    assert read(**json.loads(job.to_message())).digest == job.digest


def test_every_stage_of_a_chain_has_them():
    stages = [{"sampler_name": "DPM++ 2M"}, {"upscaler_1": "Lanczos"}]
    job = read(defaults=A1111, then=stages)
    assert [job.at_stage(2).sampler, job.at_stage(2).steps] == ["dpmpp_2m_karras", 50]
    assert job.at_stage(3).final_size == (1024, 1024)
    with pytest.raises(errors.InvalidMessageError, match="defaults is the job's"):
        read(then=[{"defaults": A1111}])


def test_a_job_that_only_enlarges_has_none_of_a_drawing():
    fields = {"upscaler_1": "Lanczos", "init_images": ["a.png"]}
    assert read(defaults=A1111, **fields).digest == read(**fields).digest


def test_unknown_ones_are_refused():
    for defaults in ("a1111-1.9", [], 1):
        with pytest.raises(
            errors.InvalidMessageError, match=r"defaults: should be 'a1111-1\.10'"
        ):
            read(defaults=defaults)
