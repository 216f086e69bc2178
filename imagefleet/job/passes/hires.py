"""AUTOMATIC1111's second pass of txt2img ('hires fix'), with the defaults of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from imagefleet import errors
from imagefleet.job import clip, samplers
from imagefleet.job import prompt as prompts
from imagefleet.job.prompt import SAFE_NAME, Prompt
from imagefleet.job.samplers import MAX_GUIDANCE, MAX_SIDE, MIN_SIDE, FirstPass, PromptText

LATENT = (
    "Latent",
    "Latent (antialiased)",
    "Latent (bicubic)",
    "Latent (bicubic antialiased)",
    "Latent (nearest)",
    "Latent (nearest-exact)",
)

#: The upscalers that enlarge the picture without a file; `None` does it as `Lanczos` does.
RESAMPLING = ("None", "Lanczos", "Nearest")

#: One step of the latent, in pixels.
_CELL = 8

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "firstpass_image": (None, ""),
    "hr_checkpoint_name": (None, "", "Use same checkpoint"),
}

#: Settings that change the images of a second pass -> their neutral values.
NEUTRAL_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "hires_fix_use_firstpass_conds": (None, False),
    "inpainting_mask_weight": (None, 1),
}

PREFIX = "hr_"

Size = tuple[int, int]
"""Width and height in pixels."""


def check_upscaler(name: str) -> str:
    """The name of an upscaler or of its file; raises ValueError if it can be none."""
    if name in LATENT or name in RESAMPLING:
        return name
    if name.lower().startswith("latent"):
        raise ValueError(f"unknown; known: {', '.join(LATENT)}")
    if not SAFE_NAME.fullmatch(name):
        raise ValueError(
            "should be a name of letters, digits, spaces and _ . + ( ) - only, without a path"
        )
    return name


def _same_as_first(value: object) -> object:
    """None for what AUTOMATIC1111's page writes where the second pass has the first's value."""
    return None if value in ("", "Use same sampler", "Use same scheduler") else value


#: A second pass lengthens the schedule instead of shortening itself; DDIM has no more timesteps.
MOST_STEPS = 1000

_HiresSide = Annotated[int, Field(ge=0, le=MAX_SIDE)]
_OrSame = Annotated[str | None, BeforeValidator(_same_as_first)]


class Hires(FirstPass):
    """The fields that matter with `enable_hr`, beside `denoising_strength`; sizes in pixels."""

    enable_hr: bool = False
    hr_scale: float = Field(default=2.0, ge=1, le=8)
    hr_resize_x: _HiresSide = 0
    hr_resize_y: _HiresSide = 0
    hr_upscaler: Annotated[str, AfterValidator(check_upscaler)] | None = None
    """The upscaler of hires fix; None: `Latent`."""
    hr_second_pass_steps: int = Field(default=0, ge=0, le=150)
    """0: as the first."""
    hr_sampler_name: _OrSame = None
    hr_scheduler: _OrSame = None
    hr_prompt: PromptText = ""
    """Empty: the first's."""
    hr_negative_prompt: PromptText = ""

    @property
    def upscaler(self) -> str:
        return self.hr_upscaler or LATENT[0]

    @property
    def upscaler_file(self) -> str | None:
        is_file = self.enable_hr and self.upscaler not in {*LATENT, *RESAMPLING}
        return self.upscaler if is_file else None


FIELDS = frozenset(Hires.model_fields) - set(FirstPass.model_fields)


def size_after(job: Hires, size: Size) -> Size:
    """The size after a first pass of *size* in pixels; raises JobError beyond the limits."""
    width, height = size
    x, y = job.hr_resize_x, job.hr_resize_y
    cut = (0, 0)
    if not (x or y):
        field, enlarged = "hr_scale", (int(width * job.hr_scale), int(height * job.hr_scale))
    else:
        field = "hr_resize_x" if x else "hr_resize_y"
        enlarged = covering(size, (x, y)) if x and y else _with_side(size, x, y)
        if x and y:
            cut = ((enlarged[0] - x) // _CELL, (enlarged[1] - y) // _CELL)
    final = (enlarged[0] // _CELL - cut[0]) * _CELL, (enlarged[1] // _CELL - cut[1]) * _CELL
    shown = f"{field}: the image would have {final[0]}x{final[1]} pixels"
    if enlarged != final:
        shown += f", of {enlarged[0]}x{enlarged[1]}"
    if min(final) < MIN_SIDE or max(*enlarged, *final) > MAX_SIDE:
        raise errors.JobError(f"{shown}; {MIN_SIDE} to {MAX_SIDE} a side are allowed")
    if _cells(job, covering(size, final)) != _cells(job, enlarged):
        raise errors.JobError(
            f"{shown}, which has another ratio than the first pass: give sizes that are multiples"
            f" of {_CELL} pixels in both passes"
        )
    return final


def _with_side(size: Size, x: int, y: int) -> Size:
    width, height = size
    return (x, x * height // width) if x else (y * width // height, y)


def covering(size: Size, target: Size) -> Size:
    """The smallest size of the ratio of *size* that has all of *target* in it, up to rounding."""
    by_width = size[0] / size[1] < target[0] / target[1]
    return _with_side(size, *((target[0], 0) if by_width else (0, target[1])))


def _cells(job: Hires, size: Size) -> Size:
    """What matters of a size: of a latent, whole cells do."""
    return (size[0] // _CELL, size[1] // _CELL) if job.upscaler in LATENT else size


def steps(job: Hires) -> int:
    """The number of steps of the second pass, all of which are done whatever its strength."""
    return job.hr_second_pass_steps or job.steps


def check_strength(steps: int, strength: float) -> None:
    """Raises JobError for a strength by which so many steps are the last of too many."""
    if strength and steps / strength > MOST_STEPS:
        raise errors.JobError(
            f"denoising_strength {strength:g} is too small for a second pass of {steps} steps: they"
            f" would be the last of {steps / strength:.0f} steps, more than a model's"
            f" {MOST_STEPS:,} timesteps"
        )


def sampler(job: Hires) -> str:
    name = job.hr_sampler_name or job.sampler_name
    return samplers.find(name, job.hr_scheduler or job.scheduler).key


def check(job: Hires, strength: float) -> None:
    """Raises ValueError if the fields of the second pass of that *strength* do not fit the job."""
    try:
        check_strength(steps(job), strength)
    except errors.JobError as error:
        raise ValueError(error.message) from None
    try:
        samplers.check_scheduler(job.hr_scheduler)
        key = sampler(job)
    except ValueError as error:
        raise ValueError(f"hr_sampler_name or hr_scheduler: {error}") from None
    if steps(job) < samplers.least_steps(key):
        raise ValueError(f"hr_second_pass_steps: {samplers.too_few_steps(key)}")
    if job.width is not None and job.height is not None:
        try:
            size_after(job, (job.width, job.height))
        except errors.JobError as error:
            raise ValueError(error.message) from None


def read_prompts(job: Hires) -> tuple[Prompt | None, Prompt | None]:
    """The prompts of the second pass; raises ValueError if they cannot be read."""
    field, comments = "hr_prompt", job.enable_prompt_comments
    positive = negative = None
    try:
        if job.hr_prompt:
            positive = prompts.read_prompt(job.hr_prompt, comments=comments)
        field = "hr_negative_prompt"
        if job.hr_negative_prompt:
            negative = prompts.read_negative_prompt(job.hr_negative_prompt, comments=comments)
        field = "hr_prompt or hr_negative_prompt"
        for prompt in filter(None, (positive, negative)):
            clip.check_length(prompt)
    except errors.JobError as error:
        raise ValueError(f"{field}: {error.message}") from None
    if positive is not None and abs(job.cfg_scale * positive.weight) > MAX_GUIDANCE:
        raise ValueError(
            f"cfg_scale: {job.cfg_scale:g} times the weight of hr_prompt, which is"
            f" {positive.weight:g}, is more than {MAX_GUIDANCE}"
        )
    if positive is not None and positive.loras != job.parsed_prompt.loras:
        raise ValueError(
            "hr_prompt: its LoRAs should be those of the prompt, with the same weights: others for"
            " the second pass are not supported"
        )
    return positive, negative
