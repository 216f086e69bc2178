"""AUTOMATIC1111's `parameters`: the text from which its users, and many viewers, read an image."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import metadata

from imagefleet.job import samplers
from imagefleet.job.message import Job

_DELIMITER = re.compile("[,:\n]")

#: Signs that would end a LoRA's name in "Lora hashes".
_SEPARATORS = str.maketrans("", "", ":,")

#: Of an embedding's SHA-256.
_HASH_CHARACTERS = 12

#: Its words for its options of samplers, and their fields of a job, by sampler.
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
) -> str:
    """The `parameters` of image *index* of a job; *size* is (width, height) in pixels.

    'RNG: CPU' makes AUTOMATIC1111 draw the same noise; its default, the GPU's, is not written.
    """
    width, height = size
    sampler = samplers.SAMPLERS[job.sampler]
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
        "Clip skip": str(job.clip_skip) if job.clip_skip > 1 else None,
        "ENSD": str(job.eta_noise_seed_delta) if job.eta_noise_seed_delta else None,
        "RNG": job.randn_source if job.randn_source != "GPU" else None,
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


def _options(job: Job, sampler: str) -> dict[str, str]:
    """Those of its sampler that are not as usual; churn's details matter only with some churn."""
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
    """As a JSON string if it contains a delimiter."""
    if _DELIMITER.search(fact):
        return json.dumps(fact, ensure_ascii=False)
    return fact
