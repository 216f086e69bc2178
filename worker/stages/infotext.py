"""The `parameters` text of an image: AUTOMATIC1111, its users and many viewers read it."""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from imagefleet.files.picture import OWN_FIELDS, OWN_WORD
from imagefleet.job import samplers
from imagefleet.job.message import Job
from imagefleet.job.passes import adetailer, hires, img2img
from imagefleet.job.passes.adetailer import Detail
from imagefleet.job.passes.first import VaeDecoder
from imagefleet.job.samplers import Sampler
from imagefleet.job.sizes import Size
from worker.engine.contract import Embedding
from worker.settings import version

#: What is told of an image, by AUTOMATIC1111's words; None and '' are left out.
Facts = dict[str, str | float | None]

#: Signs that would end a LoRA's name in "Lora hashes".
_SEPARATORS = str.maketrans("", "", ":,")

#: AUTOMATIC1111's words for options of samplers but eta, and their usual values.
_OPTIONS: Mapping[str, tuple[str, float]] = {
    "s_churn": ("Sigma churn", 0.0),
    "s_tmin": ("Sigma tmin", 0.0),
    "s_tmax": ("Sigma tmax", 0.0),
    "s_noise": ("Sigma noise", 1.0),
}

#: A line of a prompt that is read as the negative prompt's.
_MISREAD = re.compile(r"^\s*Negative prompt:", re.MULTILINE)

#: Words for the masked content by `inpainting_fill`; the original is not written.
_MASKED_CONTENT = {0: "fill", 2: "latent noise", 3: "latent nothing"}

_CONTROL_RESIZE_MODES = ("Just Resize", "Crop and Resize", "Resize and Fill")


def parameters(
    job: Job,
    index: int,
    size: Size,
    model: str,
    *,
    vae: str | None = None,
    model_hashes: Mapping[str, str] = MappingProxyType({}),
    lora_hashes: Mapping[str, str] = MappingProxyType({}),
    embeddings: Sequence[Embedding] = (),
    is_cut_out: bool = False,
    decoder: VaeDecoder | None = None,
    weights: str | None = None,
) -> str:
    """The `parameters` of image *index* of a job; *size* is (width, height) in pixels.

    *is_cut_out*: only the masked part of the image that it was given was drawn, in that size.
    *decoder*: what decoded it; None for the VAE. *vae*: the worker's own, if it has one.
    *model_hashes*: that of the model itself, as "model", and those of the VAE and of other
    checkpoints, by the fields that name them. *weights*: their type, if that is no usual one.

    'RNG: CPU' makes AUTOMATIC1111 draw the same noise; its default, the GPU's, is not written.
    """
    width, height = size
    sampler = samplers.NAMES[job.sampler]
    varies = bool(job.subseed_strength)
    is_denoised = bool(job.init_images) or job.enable_hr
    resized = job.seed_resize_from
    extra_noise = job.img2img_extra_noise
    vae = job.sd_vae or vae
    facts: Facts = {
        "Steps": job.steps,
        "Sampler": sampler.title,
        "Schedule type": sampler.schedule_type,
        "CFG scale": job.cfg_scale,
        "Seed": job.image_seed(index),
        "Size": f"{width}x{height}",
        "Model hash": model_hashes.get("model"),
        "Model": model,
        "VAE hash": model_hashes.get("sd_vae"),
        "VAE": f"{vae}.safetensors" if vae else None,
        "Variation seed": job.image_subseed(index) if varies else None,
        "Variation seed strength": job.subseed_strength or None,
        "Seed resize from": f"{resized[0]}x{resized[1]}" if resized else None,
        "Denoising strength": job.denoising_strength if is_denoised else None,
        "Extra noise": (is_denoised and extra_noise) or None,
        "Clip skip": job.clip_skip if job.clip_skip > 1 else None,
        "ENSD": job.eta_noise_seed_delta or None,
        "RNG": job.randn_source if job.randn_source != "GPU" else None,
        "Tiling": job.tiling or None,
    }
    facts |= _controls(job)
    if job.mask is not None:
        facts |= _img2img(job, is_cut_out=is_cut_out)
    if job.enable_hr:
        facts |= _hires(job, model_hashes.get("hr_checkpoint_name"))
    if job.refiner_checkpoint:
        model_hash = model_hashes.get("refiner_checkpoint")
        facts |= {
            "Refiner": _title(job.refiner_checkpoint, model_hash),
            "Refiner switch at": job.refiner_switch_at,
            "Refiner switch by sampling steps": job.refiner_switch_by_sample_steps
            or None,
        }
    facts |= _details(job)
    facts["NGMS"] = job.s_min_uncond or None
    facts |= _options(job, sampler)
    facts |= _etas(job)
    facts["Downcast alphas_cumprod"] = job.use_downcasted_alpha_bar or None
    facts["Weights"] = weights
    facts["VAE Decoder"] = decoder if decoder != "Full" else None
    facts["Lora hashes"] = ", ".join(
        f"{name.translate(_SEPARATORS)}: {sha256}"
        for name, sha256 in lora_hashes.items()
    )
    facts["TI hashes"] = ", ".join(
        f"{each.name}: {each.sha256[:12]}" for each in embeddings
    )
    # None that AUTOMATIC1111 would take for one of its own, and be compatible with.
    facts["Version"] = f"imagefleet {version()}"
    facts[OWN_WORD] = _own(job)
    prompt, negative_prompt = job.shown_prompts
    lines = [prompt]
    if negative_prompt:
        lines.append(f"Negative prompt: {negative_prompt}")
    lines.append(_told(facts))
    return "\n".join(lines).strip()


def _told(facts: Facts) -> str:
    """The facts that there are; one that would be read otherwise as a JSON string."""
    told = []
    for name, fact in facts.items():
        if fact in (None, ""):
            continue
        text = fact if isinstance(fact, str) else str(fact).removesuffix(".0")
        if re.search(r'^"|^\s|\s$|[,:\n]', text):
            text = json.dumps(text, ensure_ascii=False)
        told.append(f"{name}: {text}")
    return ", ".join(told)


def of_enlarged(job: Job, source: str) -> str:
    """The text of an image that a job only enlarges: that of its *source*, and what was done.

    AUTOMATIC1111 writes both, into two texts of the file where it is a PNG. Here they are one, as
    it writes them where it enlarges what it has just drawn.
    """
    size = f"{job.upscaling_resize_w}x{job.upscaling_resize_h}"
    to_size = bool(job.resize_mode)
    upscalers = "Postprocess upscaler", "Postprocess upscaler 2"
    facts = {
        "Postprocess upscale to": size if to_size else None,
        "Postprocess upscale by": None if to_size else job.upscaling_resize,
        "Postprocess crop to": size if to_size and job.upscaling_crop else None,
        **dict(zip(upscalers, job.upscalers, strict=False)),
    }
    text = _told(facts)
    source = source.rstrip()
    if not source:
        return text
    has_facts = source.rpartition("\n")[2].startswith(("Steps: ", "Postprocess "))
    return f"{source}{', ' if has_facts else chr(10)}{text}"


def _own(job: Job) -> str | None:
    """The fields that AUTOMATIC1111 has no words for, as JSON; without images in the job itself."""
    prompts = {"prompt": job.prompt, "negative_prompt": job.negative_prompt}
    names = OWN_FIELDS - prompts.keys() - _OPTIONS.keys()
    if not all(map(img2img.place, job.sources)):
        names -= {"init_images", "mask", "alwayson_scripts"}
    fields = {name: value for name, value in job.given_fields.items() if name in names}
    if job.init_images:
        fields |= job.model_dump(mode="json", include={*names} & img2img.OWN_FIELDS)
    if any(map(_MISREAD.search, job.shown_prompts)):
        fields |= prompts
    if job.enable_hr:
        first, second = (
            samplers.SAMPLERS[key] for key in (job.sampler, hires.sampler(job))
        )
        others = second.options if second.method != first.method else ()
        fields |= {name: getattr(job, name) for name in others if name != "eta"}
    return json.dumps(fields) if fields else None


def _img2img(job: Job, *, is_cut_out: bool) -> Facts:
    blur_x, blur_y = job.blur
    # With an empty mask it is img2img without one.
    is_empty = job.inpaint_full_res and not is_cut_out
    content = None if is_empty else _MASKED_CONTENT.get(job.inpainting_fill)
    return {
        "Mask mode": "Inpaint not masked" if job.inpainting_mask_invert else None,
        # Two that differ are not written there either.
        "Mask blur": blur_x if blur_x == blur_y != 0 else None,
        "Inpaint area": "Only masked" if is_cut_out else None,
        "Masked area padding": job.inpaint_full_res_padding if is_cut_out else None,
        "Masked content": content,
    }


def _hires(job: Job, model_hash: str | None) -> Facts:
    first = samplers.SAMPLERS[job.sampler]
    second = samplers.SAMPLERS[hires.sampler(job)]
    prompt, negative_prompt = job.shown_hires_prompts
    first_prompt, first_negative = job.shown_prompts
    is_resized = job.hr_resize_x or job.hr_resize_y
    is_rescheduled = second.schedule_type != first.schedule_type
    return {
        "Hires sampler": second.title if second.title != first.title else None,
        "Hires prompt": prompt if prompt != first_prompt else None,
        "Hires negative prompt": negative_prompt
        if negative_prompt != first_negative
        else None,
        "Hires schedule type": second.schedule_type if is_rescheduled else None,
        "Hires upscale": None if is_resized else job.hr_scale,
        "Hires resize": f"{job.hr_resize_x}x{job.hr_resize_y}" if is_resized else None,
        "Hires steps": job.hr_second_pass_steps or None,
        "Hires upscaler": job.hr_upscaler,
        "Hires checkpoint": _title(job.hr_checkpoint_name, model_hash),
    }


def _details(job: Job) -> Facts:
    """ADetailer's units as it writes them, without what is as usual where it leaves that out."""
    facts: Facts = {}
    for detail, ordinal in zip(job.details, adetailer.ORDINALS, strict=False):
        usual = Detail(ad_model=detail.ad_model)
        for field, word in adetailer.WORDS.items():
            value = getattr(detail, field)
            if field not in adetailer.ALWAYS_TOLD and value == getattr(usual, field):
                continue
            suffix = ".pt" if field == "ad_model" else ""
            facts[f"ADetailer {word}{ordinal}"] = f"{value}{suffix}"
    return facts


def _controls(job: Job) -> Facts:
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


def _options(job: Job, sampler: Sampler) -> Facts:
    """Options of its sampler that are not as usual; churn's details matter only with some churn."""
    facts: Facts = {}
    if "s_churn" in sampler.options and not job.s_churn:
        return facts
    for field, (word, usual) in _OPTIONS.items():
        value = getattr(job, field)
        if field in sampler.options and value != usual:
            facts[word] = value
    return facts


def _etas(job: Job) -> Facts:
    """The etas of all passes' samplers that are not as usual, each with its sampler's word."""
    facts: Facts = {}
    for key in (job.sampler, *([hires.sampler(job)] if job.enable_hr else [])):
        sampler = samplers.NAMES[key]
        eta = job.options_of(key).eta
        if "eta" in sampler.options and eta not in (None, sampler.usual_eta):
            facts[sampler.eta_word] = eta
    return facts


def _title(name: str | None, model_hash: str | None) -> str | None:
    """A checkpoint as AUTOMATIC1111 shows it."""
    return f"{name} [{model_hash}]" if model_hash else name
