"""The text that AUTOMATIC1111 (1.9 and later) writes into its images, which viewers read."""

from __future__ import annotations

import json

from imagefleet.job import samplers
from imagefleet.job.message import Job


def parameters(job: Job, index: int, size: tuple[int, int], model: str) -> str:
    """The `parameters` of image *index* of a job; *size* is (width, height) in pixels.

    'RNG: CPU' makes AUTOMATIC1111 draw the same noise; its default is the GPU's generator.
    """
    width, height = size
    sampler = samplers.SAMPLERS[job.sampler]
    facts = {
        "Steps": str(job.steps),
        "Sampler": sampler.title,
        "Schedule type": sampler.schedule_type,
        "CFG scale": str(job.cfg_scale).removesuffix(".0"),
        "Seed": str(job.image_seed(index)),
        "Size": f"{width}x{height}",
        "Model": model,
        "Clip skip": str(job.clip_skip) if job.clip_skip > 1 else None,
        "RNG": "CPU",
        "Version": "imagefleet",
    }
    lines = [job.prompt]
    if job.negative_prompt:
        lines.append(f"Negative prompt: {job.negative_prompt}")
    lines.append(", ".join(f"{name}: {_quoted(fact)}" for name, fact in facts.items() if fact))
    return "\n".join(lines).strip()


def _quoted(fact: str) -> str:
    """As a JSON string if it contains a delimiter."""
    if any(mark in fact for mark in ",:\n"):
        return json.dumps(fact, ensure_ascii=False)
    return fact
