import io
import json
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from packaging.version import InvalidVersion, Version
from PIL import Image
from sd_parsers import ParserManager

from imagefleet.job.message import Job, read_job
from imagefleet.validation import JSONDict
from worker.stages import encode, infotext

VERSION = f"Version: imagefleet {metadata.version('imagefleet')}"

NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)


def job_of(**fields: Any) -> Job:
    return read_job(json.dumps({"prompt": "a house", "seed": 1, **fields}), "m1")


def facts_of(**fields: Any) -> str:
    return infotext.parameters(job_of(**fields), 0, (512, 512), "m").split("\n")[-1]


def test_the_text_has_the_three_parts_that_viewers_expect():
    job = job_of(
        prompt="a house, <lora:x:0.5>",
        negative_prompt="people",
        steps=15,
        cfg_scale=7.5,
        seed=2**32 - 1,
        batch_size=2,
        clip_skip=2,
    )
    assert infotext.parameters(job, 1, (512, 768), "dreamy").split("\n") == [
        "a house, <lora:x:0.5>",
        "Negative prompt: people",
        (
            "Steps: 15, Sampler: Euler a, Schedule type: Automatic, CFG scale: 7.5,"
            " Seed: 4294967296, Size: 512x768, Model: dreamy, Clip skip: 2, RNG: CPU,"
            f" {VERSION}"
        ),
    ]


@pytest.mark.parametrize(
    ("source", "before"),
    [
        ("", ""),
        ("a hut\nSteps: 9, Seed: 1\n", "a hut\nSteps: 9, Seed: 1, "),
        ("a hut: by night", "a hut: by night\n"),
        ("Postprocess upscale by: 2", "Postprocess upscale by: 2, "),
    ],
)
def test_the_text_of_an_enlarged_image_begins_with_that_of_the_image(
    source: str, before: str
):
    given = {
        "init_images": ["a.png"],
        "upscaler_1": "4x_Sharp",
        "upscaling_resize": 1.5,
    }
    facts = "Postprocess upscale by: 1.5, Postprocess upscaler: 4x_Sharp"
    assert infotext.of_enlarged(job_of(**given), source) == before + facts
    both = {
        "upscaler_2": "Lanczos",
        "extras_upscaler_2_visibility": 0.5,
        "resize_mode": 1,
    }
    assert infotext.of_enlarged(job_of(**given, **both), source) == (
        f"{before}Postprocess upscale to: 512x512, Postprocess crop to: 512x512, Postprocess"
        " upscaler: 4x_Sharp, Postprocess upscaler 2: Lanczos"
    )


def test_unset_fields_are_not_written():
    assert infotext.parameters(job_of(sampler_name="DDIM"), 0, (64, 64), "m").split(
        "\n"
    ) == [
        "a house",
        (
            "Steps: 20, Sampler: DDIM, CFG scale: 7, Seed: 1, Size: 64x64, Model: m, RNG: CPU,"
            f" {VERSION}"
        ),
    ]
    assert infotext.parameters(job_of(prompt=""), 0, (64, 64), "m").startswith(
        "Steps: 20"
    )


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        (
            {"sampler_name": "DPM++ 2M Karras"},
            "Sampler: DPM++ 2M, Schedule type: Karras,",
        ),
        (
            {"sampler_name": "DPM++ 2M", "scheduler": "Automatic"},
            "Sampler: DPM++ 2M, Schedule type: Karras,",
        ),
        # "Automatic" would be Karras there: pasted back, it has to be the same sampler.
        ({"sampler_name": "k_dpmpp_2m"}, "Sampler: DPM++ 2M, Schedule type: Uniform,"),
        ({"sampler_name": "euler"}, "Sampler: Euler, Schedule type: Automatic,"),
        ({"sampler_name": "plms", "scheduler": "Karras"}, "Sampler: PLMS, CFG scale"),
        ({"cfg_scale": 7.123456789}, "CFG scale: 7.123456789,"),
        (
            {"randn_source": "GPU"},
            "Model: m, Version",
        ),  # A1111's default, which it leaves out
        ({"sampler_name": "DDIM", "eta": 1}, "RNG: CPU, Eta DDIM: 1, Version"),
        ({"sampler_name": "DDIM", "eta": 0}, "RNG: CPU, Version"),
        ({"eta": 1}, "RNG: CPU, Version"),
        ({"sampler_name": "DPM++ 2M", "eta": 0.5}, "RNG: CPU, Version"),  # it has none
        (
            {
                "sampler_name": "Euler",
                "s_churn": 2,
                "s_tmin": 0.1,
                "s_tmax": 5,
                "s_noise": 1.1,
            },
            "Sigma churn: 2, Sigma tmin: 0.1, Sigma tmax: 5, Sigma noise: 1.1, Version",
        ),
        ({"sampler_name": "Euler", "s_noise": 1.1}, "RNG: CPU, Version"),
        (
            {"sampler_name": "DPM++ SDE", "s_noise": 1.1},
            "RNG: CPU, Sigma noise: 1.1, Version",
        ),
        ({"sampler_name": "TCD", "eta": 0}, "RNG: CPU, Eta: 0, Version"),
        (
            {
                "sampler_name": "Euler a",
                "enable_hr": True,
                "hr_sampler_name": "DDIM",
                "eta": 0.5,
            },
            "Eta: 0.5, Eta DDIM: 0.5, Version",
        ),
        (
            {
                "sampler_name": "Euler a",
                "enable_hr": True,
                "hr_sampler_name": "DDIM",
                "eta_ancestral": 0.5,
            },
            "Eta: 0.5, Version",
        ),
        (
            {"sampler_name": "DPM++ 2M SDE"},
            "Sampler: DPM++ 2M SDE, Schedule type: Uniform, ",
        ),
        (
            {"sampler_name": "DPM++ 2M SDE", "scheduler": "Automatic"},
            "Sampler: DPM++ 2M SDE, Schedule type: Exponential, ",
        ),
        (
            {"sampler_name": "DPM++ 2M SDE Karras"},
            "Sampler: DPM++ 2M SDE, Schedule type: Karras, ",
        ),
        ({"sampler_name": "DDIM CFG++"}, "Sampler: DDIM CFG++, CFG scale"),
    ],
)
def test_settings_that_the_sampler_has_are_spelt_as_a1111_spells_them_and_no_others(
    fields: JSONDict, written: str
):
    assert written in facts_of(**fields)


def test_each_option_is_stated_in_a1111s_words_and_place():
    job = job_of(
        prompt="a house # mine\n<lora:x:0.5>",
        negative_prompt="# none",
        subseed=7,
        subseed_strength=0.25,
        seed_resize_from_w=512,
        seed_resize_from_h=768,
        eta=0.5,
        eta_noise_seed_delta=31337,
        randn_source="NV",
        s_min_uncond=1.5,
        use_downcasted_alpha_bar=True,
        batch_size=2,
    )
    text = infotext.parameters(
        job,
        1,
        (64, 64),
        "m",
        model_hashes={"model": "6ce0161689"},
        lora_hashes={"x": "0123456789ab", "y:,": "f" * 12},
    )
    assert text.split("\n") == [
        "a house ",
        "<lora:x:0.5>",
        "Negative prompt: ",
        "",
        (
            "Steps: 20, Sampler: Euler a, Schedule type: Automatic, CFG scale: 7, Seed: 1,"
            " Size: 64x64, Model hash: 6ce0161689, Model: m, Variation seed: 8,"
            " Variation seed strength: 0.25, Seed resize from: 512x768, ENSD: 31337, RNG: NV,"
            " NGMS: 1.5, Eta: 0.5, Downcast alphas_cumprod: True,"
            f' Lora hashes: "x: 0123456789ab, y: ffffffffffff", {VERSION}'
        ),
    ]  # fmt: skip


def test_the_version_is_none_that_a1111_would_be_compatible_with():
    """It reads a bare number as one of its own, and would then draw as it did then."""
    with pytest.raises(InvalidVersion):
        Version(VERSION.removeprefix("Version: "))


@pytest.mark.parametrize(
    ("model", "written"),
    [
        ("dreamy v1.5", "Model: dreamy v1.5, "),
        ("a, b", 'Model: "a, b", '),
        ("a: b", 'Model: "a: b", '),
        ("ä, 猫", 'Model: "ä, 猫", '),
        ('a "b", c\nd', 'Model: "a \\"b\\", c\\nd", '),
    ],
)
def test_a_value_that_would_break_the_line_is_quoted(model: str, written: str):
    text = infotext.parameters(job_of(), 0, (64, 64), model)
    assert written in text.split("\n")[1]


#: sd-parsers knows the last picture by its address in memory, and takes a new one there for it.
_kept: list[Image.Image] = []


def opened(data: bytes) -> Image.Image:
    _kept.append(Image.open(io.BytesIO(data)))
    return _kept[-1]


words = st.text(
    st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=60
)


@settings(max_examples=60)
@given(words, words, st.sampled_from(["png", "jpeg", "webp"]))
@example("a cat, (red:1.3)\nBREAK Steps: 5, a: b", "ugly,\nSize: 1x1", "png")
@example("猫 🎨", "ä", "jpeg")
@example("", "", "webp")
def test_sd_parsers_reads_the_jobs_values_back(prompt: str, negative: str, name: str):
    assume("Negative prompt:" not in prompt + negative)  # it takes that for its own
    job = job_of(sampler_name="k_dpmpp_2m_ka", steps=15, cfg_scale=6.5, seed=2**32 - 1)
    # Not read from a message: what the words mean, and whether they are allowed, is not asked here.
    words = {
        "prompt": prompt,
        "negative_prompt": negative,
        "enable_prompt_comments": False,
    }
    job = job.model_copy(update=words)
    text = infotext.parameters(job, 0, (512, 768), "dreamy")
    file = encode.encode(NOISE, job.output.model_copy(update={"format": name}), text)

    read = ParserManager().parse(opened(file.data))
    assert read is not None
    (sampler,) = read.samplers
    assert read.full_prompt == prompt.strip()
    assert read.full_negative_prompt == negative.strip()
    assert (sampler.name, sampler.parameters["scheduler"]) == ("DPM++ 2M", "Karras")
    assert (sampler.parameters["steps"], sampler.parameters["cfg_scale"]) == (
        "15",
        "6.5",
    )
    assert sampler.parameters["seed"] == "4294967295"
    assert sampler.model is not None
    assert sampler.model.name == "dreamy"
    assert read.metadata["Size"] == "512x768"


def test_what_decoded_in_place_of_the_vae_is_told_as_a1111_tells_it():
    told = infotext.parameters(job_of(), 0, (512, 512), "m", decoder="TAESD")
    assert ", VAE Decoder: TAESD, " in told
    assert "VAE Decoder" not in facts_of()
    assert "VAE Decoder" not in infotext.parameters(
        job_of(), 0, (512, 512), "m", decoder="Full"
    )


def test_other_checkpoints_are_stated_as_a1111_does():
    job = {"refiner_checkpoint": "late", "refiner_switch_at": 0.7}
    assert "Refiner: late, Refiner switch at: 0.7, Version" in facts_of(**job)
    by_steps = {"refiner_switch_by_sample_steps": True, "enable_hr": True}
    assert (
        "Hires checkpoint: sharp, Refiner: late, Refiner switch at: 0.7,"
        " Refiner switch by sampling steps: True, Version"
    ) in facts_of(**job, **by_steps, hr_checkpoint_name="sharp")
    assert "Refiner" not in facts_of(refiner_switch_at=0.7)
    hashes = {"hr_checkpoint_name": "0123456789", "refiner_checkpoint": "6ce0161689"}
    named = job_of(**job, enable_hr=True, hr_checkpoint_name="sharp")
    text = infotext.parameters(named, 0, (64, 64), "m", model_hashes=hashes)
    assert "Hires checkpoint: sharp [0123456789], Refiner: late [6ce0161689], " in text
