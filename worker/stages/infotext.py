"""AUTOMATIC1111's `parameters`: the text from which its users, and many viewers, read an image."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import metadata

from imagefleet.job import samplers
from imagefleet.job.message import Job
from imagefleet.job.passes import hires

_DELIMITER = re.compile("[,:\n]")

#: Signs that would end a LoRA's name in "Lora hashes".
_SEPARATORS = str.maketrans("", "", ":,")

#: Characters of an embedding's SHA-256 that are shown.
_HASH_CHARACTERS = 12

#: AUTOMATIC1111's words for options of samplers, and their fields of a job, by sampler.
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "Euler a": {"Eta": "eta"},
    "DDIM": {"Eta DDIM": "eta"},
    "Euler": {
        "Sigma churn": "s_churn",
        "Sigma tmin": "s_tmin",
        "Sigma tmax": "s_tmax",
        "Sigma noise": "s_noise",
    },
}
#: Words for the masked content by `inpainting_fill`; the original is not written.
_MASKED_CONTENT = {0: "fill", 2: "latent noise", 3: "latent nothing"}

_CONTROL_RESIZE_MODES = ("Just Resize", "Crop and Resize", "Resize and Fill")

_USUAL_ETA = {"Euler a": 1.0, "DDIM": 0.0}


def parameters(
    job: Job,
    index: int,
    size: tuple[int, int],
    model: str,
    *,
    model_hash: str | None = None,
    lora_hashes: Mapping[str, str] | None = None,
    embedding_hashes: Mapping[str, str] | None = None,
    is_cut_out: bool = False,
) -> str:
    """The `parameters` of image *index* of a job; *size* is (width, height) in pixels.

    *is_cut_out*: only the masked part of the image that it was given was drawn, in that size.

    'RNG: CPU' makes AUTOMATIC1111 draw the same noise; its default, the GPU's, is not written.
    """
    width, height = size
    sampler = samplers.NAMES[job.sampler]
    varies = bool(job.subseed_strength)
    resized = job.seed_resize_from
    loras = {name.translate(_SEPARATORS): each for name, each in (lora_hashes or {}).items()}
    embeddings = {name: each[:_HASH_CHARACTERS] for name, each in (embedding_hashes or {}).items()}
    facts = {
        "Steps": str(job.steps),
        "Sampler": sampler.title,
        "Schedule type": sampler.schedule_type,
        "CFG scale": _number(job.cfg_scale),
        "Seed": str(job.image_seed(index)),
        "Size": f"{width}x{height}",
        "Model hash": model_hash,
        "Model": model,
        "Variation seed": str(job.image_subseed(index)) if varies else None,
        "Variation seed strength": _number(job.subseed_strength) if varies else None,
        "Seed resize from": f"{resized[0]}x{resized[1]}" if resized else None,
        "Denoising strength": _number(job.denoising_strength) if _is_denoised(job) else None,
        "Clip skip": str(job.clip_skip) if job.clip_skip > 1 else None,
        "ENSD": str(job.eta_noise_seed_delta) if job.eta_noise_seed_delta else None,
        "RNG": job.randn_source if job.randn_source != "GPU" else None,
        **_controls(job),
        **_img2img(job, is_cut_out=is_cut_out),
        **_hires(job),
        "NGMS": _number(job.s_min_uncond) if job.s_min_uncond else None,
        **_options(job, sampler.title),
        "Lora hashes": ", ".join(f"{name}: {each}" for name, each in loras.items()) or None,
        "TI hashes": ", ".join(f"{name}: {each}" for name, each in embeddings.items()) or None,
        "Version": _version(),
    }
    prompt, negative_prompt = job.shown_prompts
    lines = [prompt]
    if negative_prompt:
        lines.append(f"Negative prompt: {negative_prompt}")
    lines.append(", ".join(f"{name}: {_quoted(fact)}" for name, fact in facts.items() if fact))
    return "\n".join(lines).strip()


def of_enlarged(job: Job, source: str) -> str:
    """The text of an image that a job only enlarges: that of its *source*, and what was done.

    AUTOMATIC1111 writes both, into two texts of the file where it is a PNG. Here they are one, as
    it writes them where it enlarges what it has just drawn.
    """
    size = f"{job.upscaling_resize_w}x{job.upscaling_resize_h}"
    to_size = bool(job.resize_mode)
    named = dict(
        zip(("Postprocess upscaler", "Postprocess upscaler 2"), job.upscalers, strict=False)
    )
    facts = {
        "Postprocess upscale to": size if to_size else None,
        "Postprocess upscale by": None if to_size else _number(job.upscaling_resize),
        "Postprocess crop to": size if to_size and job.upscaling_crop else None,
        **named,
    }
    text = ", ".join(f"{name}: {_quoted(fact)}" for name, fact in facts.items() if fact)
    source = source.rstrip()
    if not source:
        return text
    has_facts = source.rpartition("\n")[2].startswith(("Steps: ", "Postprocess "))
    return f"{source}{', ' if has_facts else chr(10)}{text}"


def _is_denoised(job: Job) -> bool:
    return bool(job.init_images) or job.enable_hr


def _img2img(job: Job, *, is_cut_out: bool) -> dict[str, str | None]:
    if job.mask is None:
        return {}
    blur_x, blur_y = job.blur
    is_empty = job.inpaint_full_res and not is_cut_out  # so it is img2img without a mask
    return {
        "Mask mode": "Inpaint not masked" if job.inpainting_mask_invert else None,
        # Two that differ are not written there either.
        "Mask blur": str(blur_x) if blur_x == blur_y != 0 else None,
        "Inpaint area": "Only masked" if is_cut_out else None,
        "Masked area padding": str(job.inpaint_full_res_padding) if is_cut_out else None,
        "Masked content": None if is_empty else _MASKED_CONTENT.get(job.inpainting_fill),
    }


def _hires(job: Job) -> dict[str, str | None]:
    if not job.enable_hr:
        return {}
    first, second = samplers.SAMPLERS[job.sampler], samplers.SAMPLERS[hires.sampler(job)]
    shown = job.shown_prompts
    prompts = [
        text if text and text != first_text else None
        for text, first_text in zip(job.shown_hires_prompts, shown, strict=True)
    ]
    is_resized = job.hr_resize_x or job.hr_resize_y
    is_rescheduled = second.schedule_type != first.schedule_type
    return {
        "Hires sampler": second.title if second.title != first.title else None,
        "Hires prompt": prompts[0],
        "Hires negative prompt": prompts[1],
        "Hires schedule type": second.schedule_type if is_rescheduled else None,
        "Hires upscale": None if is_resized else _number(job.hr_scale),
        "Hires resize": f"{job.hr_resize_x}x{job.hr_resize_y}" if is_resized else None,
        "Hires steps": str(job.hr_second_pass_steps) if job.hr_second_pass_steps else None,
        "Hires upscaler": job.hr_upscaler,
    }


def _controls(job: Job) -> dict[str, str]:
    """Units as sd-webui-controlnet writes them, with the numbers of one without preprocessor."""
    return {
        f"ControlNet {number}": (
            f"Module: none, Model: {unit.model}, Weight: {unit.weight}, Resize Mode:"
            f" {_CONTROL_RESIZE_MODES[unit.resize_mode]}, Processor Res: 512, Threshold A: 0.5,"
            f" Threshold B: 0.5, Guidance Start: {unit.guidance_start}, Guidance End:"
            f" {unit.guidance_end}, Pixel Perfect: False, Control Mode: Balanced"
        )
        for number, unit in enumerate(job.controls)
    }


def _options(job: Job, sampler: str) -> dict[str, str]:
    """Options of its sampler that are not as usual; churn's details matter only with some churn."""
    fields = _OPTIONS.get(sampler, {})
    usual = {"eta": (None, _USUAL_ETA.get(sampler)), "s_noise": (1.0,)}
    if sampler == "Euler" and not job.s_churn:
        return {}
    return {
        word: _number(value)
        for word, field in fields.items()
        if (value := getattr(job, field)) not in usual.get(field, (0.0,))
    }


@functools.cache
def _version() -> str:
    """No version that AUTOMATIC1111 would take for one of its own, and be compatible with."""
    try:
        return f"imagefleet {metadata.version('imagefleet')}"
    except metadata.PackageNotFoundError:
        return "imagefleet"


def _number(value: float) -> str:
    return str(value).removesuffix(".0")


def _quoted(fact: str) -> str:
    """A fact, written as a JSON string if it contains a delimiter."""
    if _DELIMITER.search(fact):
        return json.dumps(fact, ensure_ascii=False)
    return fact
