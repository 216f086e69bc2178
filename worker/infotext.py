"""The text that AUTOMATIC1111 writes into its pictures, which the usual viewers read."""

from __future__ import annotations

from jobs.job import Job

#: The names that AUTOMATIC1111 shows for the samplers.
SAMPLER_TITLES = {"euler_ancestral": "Euler a"}


def parameters(job: Job, index: int, size: tuple[int, int], model: str) -> str:
    """The `parameters` of image *index* of a job; *size* is (width, height) in pixels."""
    width, height = size
    facts = {
        "Steps": job.steps,
        "Sampler": SAMPLER_TITLES[job.sampler],
        "CFG scale": f"{job.cfg_scale:g}",
        "Seed": job.image_seed(index),
        "Size": f"{width}x{height}",
        "Model": model,
    }
    if job.clip_skip > 1:
        facts["Clip skip"] = job.clip_skip
    facts["Version"] = "imagefleet"
    lines = [job.prompt]
    if job.negative_prompt:
        lines.append(f"Negative prompt: {job.negative_prompt}")
    lines.append(", ".join(f"{name}: {value}" for name, value in facts.items()))
    return "\n".join(lines)
