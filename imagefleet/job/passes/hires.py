"""AUTOMATIC1111's second pass of txt2img ('hires fix'), with the defaults of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from imagefleet import errors
from imagefleet.job import prompt as prompts
from imagefleet.job import samplers
from imagefleet.job.passes.limits import MAX_GUIDANCE, MAX_SIDE, MIN_SIDE, PromptText
from imagefleet.job.prompt import SAFE_NAME, Prompt

if TYPE_CHECKING:
    from imagefleet.job.message import Job

#: Upscalers that enlarge the latent.
LATENT = (
    "Latent",
    "Latent (antialiased)",
    "Latent (bicubic)",
    "Latent (bicubic antialiased)",
    "Latent (nearest)",
    "Latent (nearest-exact)",
)

#: Those that enlarge the picture without a file; `None` does it as `Lanczos` does.
RESAMPLING = ("None", "Lanczos", "Nearest")

#: One step of the latent, in pixels.
_CELL = 8

#: Fields that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "firstpass_image": (None, ""),
    "hr_checkpoint_name": (None, "", "Use same checkpoint"),
}

#: Settings that change the images of a second pass -> their neutral values.
NEUTRAL_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "hires_fix_use_firstpass_conds": (None, False),
}

PREFIX = "hr_"


def _is_upscaler(name: str) -> str:
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
    """As its page writes it."""
    return None if value in ("", "Use same sampler", "Use same scheduler") else value


_HiresSide = Annotated[int, Field(ge=0, le=MAX_SIDE)]
_OrSame = Annotated[str | None, BeforeValidator(_same_as_first)]


class Hires(BaseModel):
    """The fields that matter with `enable_hr`, beside `denoising_strength`; sizes in pixels."""

    enable_hr: bool = False
    hr_scale: float = Field(default=2.0, ge=1, le=8)
    hr_resize_x: _HiresSide = 0
    hr_resize_y: _HiresSide = 0
    hr_upscaler: Annotated[str, AfterValidator(_is_upscaler)] | None = None
    """None: `Latent`."""
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
        """The name of the upscaler's file, where it has one."""
        is_file = self.enable_hr and self.upscaler not in {*LATENT, *RESAMPLING}
        return self.upscaler if is_file else None


FIELDS = frozenset(Hires.model_fields)


def is_asked_for(payload: Mapping[str, Any]) -> bool:
    value = payload.get("enable_hr")
    if isinstance(value, str):  # as tables have it
        value = value.strip().lower()
    return value not in (None, False, 0, "", "0", "false", "f", "no", "n", "off")


def size_after(job: Job, size: tuple[int, int]) -> tuple[int, int]:
    """The size of the second pass after a first one of *size*, (width, height) in pixels.

    Raises:
        JobError: it is beyond the limits; names the field.
    """
    width, height = size
    x, y = job.hr_resize_x, job.hr_resize_y
    if not (x or y):
        field, final = "hr_scale", (int(width * job.hr_scale), int(height * job.hr_scale))
    else:
        field = "hr_resize_x" if x else "hr_resize_y"
        by_width = not y or (x > 0 and width / height < x / y)
        final = (x, x * height // width) if by_width else (y * width // height, y)
    if job.upscaler in LATENT:
        final = (final[0] // _CELL * _CELL, final[1] // _CELL * _CELL)
    shown = f"{field}: the image would have {final[0]}x{final[1]} pixels"
    if x and y and any(has - asked >= _CELL for has, asked in zip(final, (x, y), strict=True)):
        raise errors.JobError(
            f"{shown}, of which {x}x{y} were kept: cutting them out is not supported; give"
            " hr_resize_x or hr_resize_y alone"
        )
    if min(final) < MIN_SIDE or max(final) > MAX_SIDE:
        raise errors.JobError(f"{shown}; {MIN_SIDE} to {MAX_SIDE} a side are allowed")
    if any(side % _CELL for side in final):
        raise errors.JobError(f"{shown}; with {job.upscaler} they should be multiples of {_CELL}")
    return final


def steps(job: Job) -> int:
    """Of the second pass, all of which are done whatever its strength."""
    return job.hr_second_pass_steps or job.steps


def sampler(job: Job) -> str:
    """The key of the second pass's sampler."""
    name = job.hr_sampler_name or job.sampler_name
    return samplers.find(name, job.hr_scheduler or job.scheduler).key


def check(job: Job) -> None:
    """Raises ValueError if the fields of the second pass do not fit the job."""
    if job.init_images:
        raise ValueError("enable_hr: is for txt2img; remove it, or init_images")
    if not job.denoising_strength:
        raise ValueError("denoising_strength: is 0: the second pass would draw nothing")
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


def read_prompts(job: Job) -> tuple[Prompt | None, Prompt | None]:
    """The prompts of the second pass; raises ValueError if they cannot be read."""
    field, comments = "hr_prompt", job.enable_prompt_comments
    positive = negative = None
    try:
        if job.hr_prompt:
            positive = prompts.read_prompt(job.hr_prompt, comments=comments)
        field = "hr_negative_prompt"
        if job.hr_negative_prompt:
            negative = prompts.read_negative_prompt(job.hr_negative_prompt, comments=comments)
    except errors.JobError as error:
        raise ValueError(f"{field}: {error.message}") from None
    if positive is not None and abs(job.cfg_scale * positive.weight) > MAX_GUIDANCE:
        raise ValueError(
            f"cfg_scale: {job.cfg_scale:g} times the weight of hr_prompt, which is"
            f" {positive.weight:g}, is more than {MAX_GUIDANCE}"
        )
    if positive is not None and positive.loras != _loras(job):
        raise ValueError(
            "hr_prompt: its LoRAs should be those of the prompt, with the same weights: others for"
            " the second pass are not supported"
        )
    return positive, negative


def _loras(job: Job) -> tuple[prompts.LoraTag, ...]:
    try:
        return prompts.read_prompt(job.prompt, comments=job.enable_prompt_comments).loras
    except errors.JobError as error:
        raise ValueError(f"prompt: {error.message}") from None
