"""A worker with an accelerator draws each job with the steps, sampler and guidance that fit it."""

from collections.abc import Callable
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes import hires
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from messages import image, message, records
from worker.accelerator import KINDS, Accelerator

LIGHTNING = "sdxl_lightning_4step_lora"


def job_of(**fields: Any) -> Job:
    return read_job(message(id="a", **fields), "m1")


@pytest.mark.parametrize(
    ("name", "title", "steps", "guidance", "sampler"),
    [
        (LIGHTNING, "SDXL-Lightning", 4, 1.0, "euler_sgm_uniform"),
        (
            "Hyper-SDXL-8steps-CFG-lora",
            "Hyper-SD with CFG",
            8,
            5.0,
            "euler_sgm_uniform",
        ),
        ("Hyper-SD15-2steps-lora", "Hyper-SD", 2, 1.0, "euler_sgm_uniform"),
        ("folder/dmd2_sdxl_4step_lora.safetensors", "DMD2", 4, 1.0, "lcm_turbo"),
        ("pcm_sd15_smallcfg_8step", "PCM", 8, 1.0, "euler_sgm_uniform"),
        ("lcm-lora-sdv1-5", "LCM", 4, 1.0, "lcm_sgm_uniform"),
        ("few-steps", "few steps", 4, 1.0, "euler_sgm_uniform"),
    ],
)
def test_a_job_that_says_nothing_is_drawn_as_the_kind_of_file_wants(
    name: str, title: str, steps: int, guidance: float, sampler: str
):
    accelerator = Accelerator.of(name)
    assert accelerator.kind.title == title
    for usual in ({}, {"steps": 20, "cfg_scale": 7, "scheduler": "Automatic"}):
        drawn = accelerator.fit(job_of(**usual))
        assert (drawn.steps, drawn.cfg_scale, drawn.sampler) == (
            steps,
            guidance,
            sampler,
        )


def test_every_sampler_of_every_kind_is_one_of_the_engines():
    for kind in KINDS:
        for name in kind.samplers:
            accelerator = Accelerator("x", kind, kind.steps[0])
            assert accelerator.fit(job_of(sampler_name=name)).sampler


def test_a_job_keeps_what_fits_and_its_digest():
    job = job_of(
        steps=8, cfg_scale=1.5, sampler_name="k_euler_a", then=[{"prompt": "a barn"}]
    )
    drawn = Accelerator.of("lcm").fit(job)
    assert (drawn.steps, drawn.cfg_scale, drawn.sampler) == (
        8,
        1.5,
        "euler_ancestral_sgm_uniform",
    )
    assert (drawn.digest, drawn.stage_digest) == (job.digest, job.stage_digest)
    assert drawn.prompt == job.prompt


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"steps": 15}, "steps is 15, and this worker .* 2 to 8: leave it out"),
        ({"cfg_scale": 5}, "cfg_scale is 5, .* takes 1: leave it out"),
        ({"sampler_name": "LCM Karras"}, "sampler is LCM Karras, .* with SGM Uniform"),
        (
            {"sampler_name": "DDIM"},
            "the sampler is DDIM, .* takes Euler with SGM Uniform",
        ),
        ({"sampler_name": "Euler Karras"}, "the sampler is Euler Karras"),
        (
            {"sampler_name": "Euler", "scheduler": "Karras"},
            "the sampler is Euler Karras",
        ),
        (
            {"prompt": f"a house <lora:{LIGHTNING}:1>"},
            "names the LoRA '.*', which this worker draws",
        ),
        (
            {"prompt": "a house:3"},
            "cfg_scale times the prompt's own weight is 3, .* takes 1:",
        ),
        (
            {"enable_hr": True, "hr_sampler_name": "DPM++ 2M"},
            "hr_sampler_name is DPM.. 2M SGM",
        ),
        (
            {"enable_hr": True, "hr_scheduler": "Karras"},
            "hr_sampler_name is Euler Karras",
        ),
        ({"enable_hr": True, "hr_second_pass_steps": 15}, "hr_second_pass_steps is 15"),
        (
            {"enable_hr": True, "hr_prompt": "a hut:2"},
            "the weight of hr_prompt is 2, .* takes 1",
        ),
    ],
)
def test_a_job_that_contradicts_has_failed(fields: JSONDict, complaint: str):
    with pytest.raises(errors.JobError, match=complaint):
        Accelerator.of(LIGHTNING).fit(job_of(**fields))


def test_a_second_pass_is_drawn_as_the_first():
    fields = {"enable_hr": True, "hr_scheduler": "Automatic", "hr_second_pass_steps": 3}
    for name, sampler in (
        (None, "lcm_turbo"),
        ("LCM", "lcm_turbo"),
        ("LCM Turbo", "lcm_turbo"),
    ):
        drawn = Accelerator.of("dmd2").fit(job_of(hr_sampler_name=name, **fields))
        assert (hires.sampler(drawn), hires.steps(drawn), drawn.steps) == (
            sampler,
            3,
            4,
        )


def test_a_file_whose_name_tells_no_kind_is_refused():
    with pytest.raises(
        errors.SetupError, match="'detail-tweaker': its name tells no kind"
    ):
        Accelerator.of("detail-tweaker")


async def test_images_and_records_tell_how_a_job_was_drawn(
    storage: Storage,
    run_pipeline,
    lora_bytes: Callable[[str], bytes],
):
    await storage.files.create(
        f"loras/{LIGHTNING}.safetensors", lora_bytes("x"), "text/plain", {}
    )
    sent = message(id="j", campaign="spring")
    pipeline = await run_pipeline(
        sent=[sent, message(id="k", steps=50)], accelerator=LIGHTNING
    )
    assert pipeline.metrics.outcomes == {"completed": 1, "failed": 1}
    job = read_job(sent, "m")
    text = (await image(storage, job.blob_name(0))).info["parameters"]
    assert "Steps: 4, Sampler: Euler, Schedule type: SGM Uniform, CFG scale: 1," in text
    assert (
        f'Lora hashes: "{LIGHTNING}: ' in text or f"Lora hashes: {LIGHTNING}: " in text
    )
    (record,) = await records(storage, "spring")
    assert (record.steps, record.cfg_scale, record.digest) == (4, 1.0, job.digest)


@pytest.mark.parametrize(
    ("family", "steps", "guidance"), [("klein", 4, 1.0), ("klein_base", 50, 4.0)]
)
def test_a_model_with_a_schedule_of_its_own_wants_settings_without_an_accelerator(
    family: str, steps: int, guidance: float
):
    own = Accelerator.of_family(family)
    assert own is not None
    drawn = own.fit(job_of(prompt="a ratio of 3:2"))
    assert (drawn.steps, drawn.cfg_scale, drawn.sampler) == (steps, guidance, "euler")
    with pytest.raises(errors.JobError, match=r"Euler a Karras, .* Euler with Auto"):
        own.fit(job_of(sampler_name="Euler a Karras"))
    assert Accelerator.of_family("sdxl") is None
