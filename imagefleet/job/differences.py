"""Warnings that a picture may differ from AUTOMATIC1111's; docs/a1111.md lists all differences.

A worker says so in its log, once for each, and `imagefleet load` in its summary those that a job
alone tells.
"""

import functools
import math
import re
from collections.abc import Iterator

from imagefleet.job import samplers
from imagefleet.job.passes import hires
from imagefleet.job.passes.fields import PassFields
from imagefleet.job.sizes import PartialSize
from imagefleet.telemetry.logs import log

KNOWN = {
    "control_size": "a ControlNet's image of another size than the drawing's is resized with"
    " Pillow, where sd-webui-controlnet uses OpenCV and thins lines again: give it in that size",
    "gpu_noise": "with randn_source GPU, a small GPU draws the noise of more than some 700,000"
    " pixels in another order than a large one, whose order is taken here, as by NV",
    "dotted_lora": "LoRAs in the names of diffusers or peft are drawn; there they change nothing",
    "mixed_loras": "a DoRA, IA3, GLoRA or OFT beside other LoRAs changes the checkpoint's weights;"
    " there what the LoRAs before it made of them",
    "one_aligned_step": "one step of Align Your Steps begins with noise, as all others do; there at"
    " its smallest sigma, so that the image is grey",
    "dynamic_prompt": "alternatives ({a|b}) and wildcards (__name__) in a prompt are words; there"
    " the extension sd-dynamic-prompts, where it is installed, chooses one of them",
    "options_of_parts": "ADetailer's parts are drawn with the payload's eta, s_churn, s_tmin,"
    " s_tmax, s_noise and s_min_uncond; there with those of the settings alone",
    "lcm_of_velocities": "LCM reads the output of a checkpoint of v-prediction as the velocity that"
    " it is; there as noise",
}

#: Pixels beyond which the noise of a small GPU has another order than that of a large one.
GPU_NOISE_PIXELS = 700_000


#: Alternatives, and wildcards, of sd-dynamic-prompts.
DYNAMIC = re.compile(r"\{[^{}]*\|[^{}]*\}|(?<![\w-])__[\w*/-]+?__(?![\w-])")


def _has_much_gpu_noise(job: PassFields, size: PartialSize) -> bool:
    width, height = size
    if job.randn_source != "GPU" or width is None or height is None:
        return False
    sizes = [(width, height)]
    if job.enable_hr:
        sizes.append(hires.sizes_after(job, sizes[0])[1])
    return max(map(math.prod, sizes)) > GPU_NOISE_PIXELS


def _has_one_aligned_step(job: PassFields, _: PartialSize) -> bool:
    passes = [(job.steps, job.sampler)]
    if job.enable_hr:
        passes.append((hires.steps(job), hires.sampler(job)))
    return any(
        steps == 1 and samplers.NAMES[key].schedule == "align_your_steps"
        for steps, key in passes
    )


def _has_dynamic_prompt(job: PassFields, _: PartialSize) -> bool:
    prompts = job.prompt, job.negative_prompt, job.hr_prompt, job.hr_negative_prompt
    return any("|" in text or "__" in text for text in prompts) and any(
        map(DYNAMIC.search, prompts)
    )


def _has_options_of_parts(job: PassFields, _: PartialSize) -> bool:
    own = job.eta, job.s_churn, job.s_tmin, job.s_tmax, job.s_noise, job.s_min_uncond
    return bool(job.details) and own != (None, 0, 0, 0, 1, 0)


#: The differences that a job alone tells, but for the size that it may leave to the checkpoint.
OF_JOBS = {
    "gpu_noise": _has_much_gpu_noise,
    "one_aligned_step": _has_one_aligned_step,
    "dynamic_prompt": _has_dynamic_prompt,
    "options_of_parts": _has_options_of_parts,
}


def of_job(job: PassFields, size: PartialSize) -> Iterator[str]:
    """The names of the differences of a job whose first pass has that *size*."""
    if job.only_upscales:
        return
    for name, applies in OF_JOBS.items():
        if applies(job, size):
            yield name


@functools.cache
def warn(difference: str) -> None:
    """Logs one of `KNOWN`, once in a process."""
    log.warning(
        f"an image may differ from AUTOMATIC1111's: {KNOWN[difference]}",
        action="differs_from_a1111",
        difference=difference,
    )
