"""AUTOMATIC1111's second pass of txt2img ('hires fix'), with the defaults of its API."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from imagefleet import validation
from imagefleet.errors import JobError
from imagefleet.job import prompt as prompts
from imagefleet.job import samplers
from imagefleet.job.passes.first import FirstPass, PromptText, check_guidance
from imagefleet.job.prompt import SAFE_NAME, Prompt
from imagefleet.job.sizes import CELL, MAX_SIDE, MIN_SIDE, Size, whole_cells

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


def check_upscaler(name: str) -> str:
    """The name of an upscaler or of its file; raises ValueError if it can be none."""
    if name in LATENT or name in RESAMPLING:
        return name
    if name.lower().startswith("latent"):
        hint = validation.suggestion(name, LATENT)
        raise ValueError(f"unknown{hint}; known: {', '.join(LATENT)}")
    if not SAFE_NAME.fullmatch(name):
        raise ValueError(
            "should be a name of letters, digits, spaces and _ . + ( ) - only, without a path"
        )
    return name


#: A prompt and a negative prompt; None: those of the first pass.
PromptPair = tuple[Prompt | None, Prompt | None]

#: A second pass lengthens the schedule instead of shortening itself; DDIM has no more timesteps.
MOST_STEPS = 1000

_HiresSide = Annotated[int, Field(ge=0, le=MAX_SIDE)]
#: None: the first's value; AUTOMATIC1111's page writes one of the others for it.
_SAME = (None, "", "Use same sampler", "Use same scheduler")
_OrSame = Annotated[str | None, BeforeValidator(lambda it: None if it in _SAME else it)]


class Hires(FirstPass):
    """The fields that matter with `enable_hr`, beside `denoising_strength`; sizes in pixels."""

    enable_hr: bool = False
    hr_scale: float = Field(default=2.0, ge=1, le=8)
    hr_resize_x: _HiresSide = 0
    hr_resize_y: _HiresSide = 0
    #: The upscaler of hires fix; None: `Latent`.
    hr_upscaler: Annotated[str, AfterValidator(check_upscaler)] | None = None
    #: 0: as the first.
    hr_second_pass_steps: int = Field(default=0, ge=0, le=150)
    hr_sampler_name: _OrSame = None
    hr_scheduler: _OrSame = None
    #: Empty: the first's.
    hr_prompt: PromptText = ""
    hr_negative_prompt: PromptText = ""

    @property
    def upscaler(self) -> str:
        return self.hr_upscaler or LATENT[0]

    @property
    def upscaler_file(self) -> str | None:
        is_file = self.enable_hr and self.upscaler not in {*LATENT, *RESAMPLING}
        return self.upscaler if is_file else None


FIELDS = frozenset(Hires.model_fields) - set(FirstPass.model_fields)


def sizes_after(job: Hires, size: Size) -> tuple[Size, Size]:
    """Sizes that a first pass of *size* is enlarged to, and cut to for the second, in pixels.

    As `calculate_target_resolution` (AUTOMATIC1111 1.10). Raises JobError beyond the limits.
    """
    width, height = size
    x = job.hr_resize_x
    y = job.hr_resize_y
    cut = (0, 0)
    field = "hr_resize_x" if x else "hr_resize_y" if y else "hr_scale"
    if x and y:
        whole = covering(size, (x, y))
        cut = ((whole[0] - x) // CELL, (whole[1] - y) // CELL)
    elif x or y:
        whole = _with_side(size, x, y)
    else:
        whole = (int(width * job.hr_scale), int(height * job.hr_scale))
    final = whole_cells(whole[0] - CELL * cut[0], whole[1] - CELL * cut[1])
    if min(final) < MIN_SIDE or max(*whole, *final) > MAX_SIDE:
        of = f", of {whole[0]}x{whole[1]}" if whole != final else ""
        raise JobError(
            f"{field}: the image would have {final[0]}x{final[1]} pixels{of}; {MIN_SIDE} to"
            f" {MAX_SIDE} a side are allowed"
        )
    return whole, final


def _with_side(size: Size, x: int, y: int) -> Size:
    width, height = size
    return (x, x * height // width) if x else (y * width // height, y)


def covering(size: Size, target: Size) -> Size:
    """The smallest size of the ratio of *size* that has all of *target* in it, up to rounding."""
    by_width = size[0] / size[1] < target[0] / target[1]
    return _with_side(size, *((target[0], 0) if by_width else (0, target[1])))


def steps(job: Hires) -> int:
    """The number of steps of the second pass, all of which are done whatever its strength."""
    return job.hr_second_pass_steps or job.steps


def sampler(job: Hires) -> str:
    """The key of the second pass' sampler; without a scheduler of its own it has the first's."""
    scheduler = job.hr_scheduler
    if job.hr_sampler_name is None:
        return samplers.find(job.sampler_name, scheduler or job.scheduler).key
    if scheduler is None and samplers.find(job.hr_sampler_name).is_bare:
        scheduler = job.scheduler or samplers.scheduler_in(job.sampler_name)
    return samplers.find(job.hr_sampler_name, scheduler).key


def check(job: Hires, strength: float) -> None:
    """Raises ValueError if the fields of the second pass of that *strength* do not fit the job."""
    whole = steps(job) / strength if strength else 0.0
    if whole > MOST_STEPS:
        raise ValueError(
            f"denoising_strength {strength:g} is too small for a second pass of {steps(job)} steps:"
            f" they would be the last of {whole:.0f} steps, more than a model's {MOST_STEPS:,}"
            " timesteps"
        )
    if job.width is not None and job.height is not None:
        with validation.as_error(ValueError):
            sizes_after(job, (job.width, job.height))
    try:
        key = sampler(job)
    except ValueError as error:
        raise ValueError(f"hr_sampler_name or hr_scheduler: {error}") from None
    with validation.as_error(ValueError, "hr_second_pass_steps: "):
        samplers.check_steps(key, steps(job))


def read_prompts(job: Hires) -> PromptPair:
    """The prompts of the second pass, None for those of the first; ValueError if unreadable."""
    counted = samplers.editing_steps(sampler(job), steps(job)), job.editing_steps
    positive = negative = None
    # The words of the first pass may be edited at other steps.
    if job.hr_prompt or "[" in job.prompt:
        with validation.as_error(ValueError, "hr_prompt: "):
            positive = job.read(
                prompts.read_prompt, job.hr_prompt or job.prompt, *counted
            )
        check_guidance(job.cfg_scale, positive, "hr_prompt")
    if job.hr_negative_prompt or "[" in job.negative_prompt:
        text = job.hr_negative_prompt or job.negative_prompt
        with validation.as_error(ValueError, "hr_negative_prompt: "):
            negative = job.read(prompts.read_negative_prompt, text, *counted)
    return positive, negative
