"""A job, its picture's text, and the job of that text draw the same picture."""

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from imagefleet import errors
from imagefleet.job import samplers
from imagefleet.job.message import SUFFIXES, Job, Output, read_job
from imagefleet.job.passes import extras, hires, img2img
from imagefleet.job.prompt import Subprompt
from imagefleet.validation import JSONDict
from loadgen.infotext import a1111, source
from worker.stages import encode, infotext

JOBS = 300

NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)

WORDS = (
    "a red house",
    "(misty:1.3) hills",
    "[soft] light",
    "((detailed))",
    "café, 猫",
    "1girl",
    "Steps: 20, Seed: 4",
    "Negative prompt",
    "\\(2019\\)",
    '"quoted"',
    "3:2 format",
    "# a note",
    "<lora:ink wash v2:0.8>",
    "<lora:night_market:0.5:0.25>",
    "\nBREAK\n",
    "\n",
    ":1.2",
    "100%",
    "[dawn:dusk:0.5]",
    "a [cat|dog]",
    "[mist::4]",
    "hills AND a gull :0.8",
    "[fog:3]",
    "\nNegative prompt: mine",
    "\nTemplate: x, Steps: 1, Seed: 2, CFG scale: 3",
    "a\\b",
    " ",
)
SAMPLERS = sorted({each.name for each in samplers.SAMPLERS.values()})
UPSCALERS = (*hires.LATENT, *hires.RESAMPLING, "4x_Sharp, no", "R-ESRGAN 4x+")
MODEL = "dreamy, v1: (final)"


def text(chance: random.Random) -> str:
    return ", ".join(chance.sample(WORDS, chance.randint(0, 6)))


def fields_of(chance: random.Random) -> JSONDict:
    """A payload with any of the fields that are drawn; it may be no valid one."""

    def maybe(**fields: Any) -> JSONDict:
        return {name: value for name, value in fields.items() if chance.random() < 0.4}

    side = [chance.randrange(64, 1024, 8) for _ in range(4)]
    fields = {"prompt": text(chance), "steps": chance.randint(1, 60)}
    fields |= {
        "seed": chance.choice([0, 1, 2**31, 2**32 - 1, chance.randrange(2**63 - 9)])
    }
    fields |= {"width": side[0], "height": side[1]} if chance.random() < 0.8 else {}
    fields |= maybe(
        negative_prompt=text(chance),
        sampler_name=chance.choice(SAMPLERS),
        scheduler=chance.choice(samplers.SCHEDULERS),
        cfg_scale=chance.choice([1, 7.5, 6.123456789, 12]),
        batch_size=chance.randint(1, 4),
        n_iter=chance.randint(1, 2),
        clip_skip=chance.randint(1, 4),
        eta=chance.choice([0, 0.3, 0.67, 1]),
        eta_ancestral=chance.choice([0, 0.3, 1]),
        eta_ddim=chance.choice([0, 0.3, 1]),
        s_churn=chance.choice([0, 2.5]),
        s_tmin=0.05,
        s_tmax=9.5,
        s_noise=1.003,
        s_min_uncond=chance.choice([0, 1.5]),
        use_downcasted_alpha_bar=True,
        tiling=True,
        randn_source=chance.choice(["CPU", "GPU", "NV"]),
        eta_noise_seed_delta=31337,
        subseed=chance.choice([2**32 - 1, chance.randrange(2**63 - 9)]),
        subseed_strength=chance.choice([0, 0.25, 1e-05]),
        seed_resize_from_w=side[2],
        seed_resize_from_h=side[3],
        enable_prompt_comments=False,
        sd_vae_decode_method=chance.choice(["Full", "TAESD"]),
        img2img_extra_noise=0.05,
        model="dreamy",
        refiner_checkpoint=chance.choice(["late_v2", "7"]),
        refiner_switch_at=chance.choice([0, 0.35, 1]),
        refiner_switch_by_sample_steps=True,
        hr_checkpoint_name=chance.choice(["sharp (1)", "9.5"]),
        override_settings=chance.choice(
            [{"sd_vae": "soft, v2"}, {"sd_vae": "warm.vae.pt"}, {}]
        ),
    )
    kind = chance.random()
    if kind < 0.35:
        fields |= {
            "enable_hr": True,
            "denoising_strength": chance.choice([0.3, 0.75, 1]),
        }
        resized = {"hr_resize_x": side[2], "hr_resize_y": side[3]}
        fields |= (
            resized
            if chance.random() < 0.3
            else maybe(hr_scale=chance.choice([1.5, 2]))
        )
        fields |= maybe(
            hr_upscaler=chance.choice(UPSCALERS),
            hr_second_pass_steps=chance.randint(0, 30),
            hr_sampler_name=chance.choice(SAMPLERS),
            hr_scheduler=chance.choice(samplers.SCHEDULERS),
            hr_prompt=fields["prompt"] + chance.choice(["", ", crisp", ' "so"']),
            hr_negative_prompt=chance.choice(['"noise"', "noise, blur", "5"]),
        )
    elif kind < 0.7:
        fields["init_images"] = [chance.choice(["cat.png", "images/spring/0001.png"])]
        fields |= maybe(denoising_strength=chance.choice([0, 0.4, 1]), resize_mode=2)
        if chance.random() < 0.6:
            fields["mask"] = "masks/cat (1).png"
            fields |= maybe(
                mask_blur=chance.choice([0, 9]),
                mask_blur_x=2,
                mask_blur_y=chance.choice([0, 3]),
                inpainting_fill=chance.randint(0, 3),
                inpaint_full_res=False,
                inpaint_full_res_padding=48,
                inpainting_mask_invert=1,
            )
    if kind > 0.6:
        unit = {"image": "pose.png", "model": "openpose [cab727d4]", "weight": 0.85}
        unit |= maybe(guidance_start=0.1, guidance_end=0.9, resize_mode=2)
        fields["alwayson_scripts"] = {"controlnet": {"args": [unit]}}
    return fields


def subprompt(each: Subprompt) -> tuple[Any, ...]:
    """What is drawn of a prompt: white space between words is none of it."""
    states = [
        (
            until,
            [[(" ".join(p.text.split()), p.weight) for p in part] for part in sections],
        )
        for until, _, sections in each.states
    ]
    kept = [
        (until, [[p for p in part if p[0]] for part in parts])
        for until, parts in states
    ]
    return kept if len(kept) > 1 else kept[0][1], each.weight


def eta(job: Job, sampler: samplers.Sampler) -> float | None:
    if "eta" not in sampler.options:
        return None
    told = job.options_of(sampler.key).eta
    usual = {"ddim": 0, "ddim_cfgpp": 0, "tcd": 0.3}.get(sampler.method, 1)
    return usual if told is None else told


def decides(job: Job, index: int, size: tuple[int, int]) -> JSONDict:
    """All that decides image *index* of a job."""
    own = job.parsed_prompt, job.parsed_negative_prompt
    second_own = [
        each or first for each, first in zip(job.hires_prompts, own, strict=True)
    ]
    prompts = [
        (each.loras, [*map(subprompt, each.subprompts)]) for each in (*own, *second_own)
    ]
    first = samplers.SAMPLERS[job.sampler]
    second = samplers.SAMPLERS[hires.sampler(job)] if job.enable_hr else first
    with_options = [
        each for each in (first, second) if job.s_churn or "s_churn" not in each.options
    ]
    has_options = {option for each in with_options for option in each.options}
    options = dataclasses.asdict(job.sampler_options)
    options["eta"] = [eta(job, each) for each in (first, second)]
    is_denoised = job.enable_hr or bool(job.init_images)
    found: JSONDict = {
        "prompts": prompts,
        "samplers": (first.key, second.key),
        "options": {name: options[name] for name in has_options},
        "uncond": job.s_min_uncond,
        "extra_noise": is_denoised and job.img2img_extra_noise,
        "numbers": (
            job.steps,
            job.cfg_scale,
            job.clip_skip,
            job.image_seed(index),
            size,
        ),
        "noise": job.image_noise(index),
        "strength": is_denoised and job.denoising_strength,
        "controls": job.controls,
        "others": (
            job.hr_checkpoint_name,
            job.refiner_checkpoint,
            job.refiner_switch_at,
            job.refiner_switch_by_sample_steps,
        ),
        "schedule": (job.use_downcasted_alpha_bar, job.tiling),
        "decoder": (job.sd_vae_decode_method, getattr(job, "sd_vae", None)),
        "input": [
            getattr(job, name) for name in sorted(img2img.OWN_FIELDS - {"mask_blur"})
        ],
        "source": (job.init_images, job.mask and job.blur),
    }
    if job.enable_hr:
        found["second"] = job.passes(*size), job.upscaler, hires.steps(job)
    return found


#: Fields that decide no pixel of a picture that is drawn, and `sd_vae`, which jobs have among their
#: settings.
UNTOLD = {
    "awaited",
    "campaign",
    "defaults",
    "id",
    "keep",
    "metadata",
    "output",
    "sd_vae",
    "then",
    "verify",
}


def test_a_field_that_is_added_is_among_them():
    chance = random.Random(42)
    drawn = {name for _ in range(JOBS) for name in fields_of(chance)}

    assert Job.model_fields.keys() - drawn - extras.FIELDS == UNTOLD


def test_300_jobs_of_all_fields_come_back_from_their_pictures_as_they_were(
    tmp_path,
):
    chance = random.Random(42)
    done = 0
    while done < JOBS:
        fields = fields_of(chance)
        try:
            job = read_job(json.dumps(fields), "m1")
        except errors.JobError:
            continue
        index = chance.randrange(job.images)
        size = job.width or 512, job.height or 512
        told = infotext.parameters(
            job,
            index,
            size,
            MODEL,
            model_hashes={"model": "0123456789"},
            decoder=job.sd_vae_decode_method,
        )
        suffix, form = chance.choice([*SUFFIXES.items()])[::-1]
        path = tmp_path / f"picture.{suffix}"
        path.write_bytes(encode.encode(NOISE, Output(format=form), told).data)
        reading = source.read_file(path)
        assert reading.needs == []
        assert (
            reading.job["override_settings"]["sd_model_checkpoint"]
            == f"{MODEL} [0123456789]"
        )
        reading.job["override_settings"].pop("sd_model_checkpoint")
        again = read_job(json.dumps(reading.job), "m2")
        assert decides(again, 0, (again.width or 0, again.height or 0)) == decides(
            job, index, size
        ), told
        done += 1


@pytest.mark.parametrize("prompt", ["  a crisp house", " a house, crisp", "house  "])
def test_blanks_around_a_second_passs_prompt_stay(prompt: str):
    fields = {"prompt": "a house", "enable_hr": True, "hr_prompt": prompt}
    job = read_job(json.dumps({**fields, "seed": 1}), "one")
    text = infotext.parameters(job, 0, (512, 512), "m")
    assert a1111.read(text).job["hr_prompt"] == prompt
