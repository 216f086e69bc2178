"""A job's first pass: the fields of AUTOMATIC1111's txt2img, its samplers and its noise. No torch.

The defaults are those of its API, the samplers' names its own and k-diffusion's.

Up to AUTOMATIC1111 1.8 a sampler's name included its schedule ('DPM++ 2M Karras'); 1.9 added the
field `scheduler`. Both are accepted. A name alone means what it meant before 1.9, so 'DPM++ 2M' has
no Karras schedule; with `scheduler` 'Automatic' it has, as in 1.10.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    model_validator,
)

from imagefleet import errors, validation
from imagefleet.job import clip
from imagefleet.job import prompt as prompts
from imagefleet.job.prompt import Prompt

#: The shortest and the longest side of an image, in pixels.
MIN_SIDE = 64
MAX_SIDE = 2048

#: The largest `cfg_scale`, also times the prompt's own weight: beyond, images come out broken.
MAX_GUIDANCE = 30

#: What a slow node draws in an hour or so: until then a job's images hold a place in a worker.
MAX_IMAGES_PER_JOB = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """AUTOMATIC1111's options of samplers; each sampler has some of them and ignores the others."""

    eta: float | None = None
    """Noise of ancestral and SDE samplers (default 1), of DDIM (0) and of TCD (0.3)."""
    s_churn: float = 0.0
    """This and the next two: Euler, Heun and DPM2 (Karras et al. 2022, algorithm 2)."""
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    s_noise: float = 1.0
    """Scale of the noise of these and of most ancestral and SDE samplers."""
    s_min_uncond: float = 0.0
    """The sigma below which every other step goes without the negative prompt, for all samplers."""
    extra_noise: float = 0.0
    """What is added to the first noise of a pass that begins with an image."""
    is_downcast: bool = False
    """Whether the noise schedule and its sigmas are rounded to half precision."""


DEFAULT_OPTIONS = Options()


#: Schedules of sigmas: their keys and AUTOMATIC1111's titles; Turbo is Forge's.
SCHEDULES: Mapping[str, str] = {
    "uniform": "Uniform",
    "karras": "Karras",
    "exponential": "Exponential",
    "polyexponential": "Polyexponential",
    "sgm_uniform": "SGM Uniform",
    "kl_optimal": "KL Optimal",
    "align_your_steps": "Align Your Steps",
    "simple": "Simple",
    "normal": "Normal",
    "ddim": "DDIM",
    "beta": "Beta",
    "turbo": "Turbo",
}

SCHEDULERS = ("Automatic", *SCHEDULES.values())

#: Samplers whose last timestep takes no step, so that one step would draw nothing but noise.
_BY_TIMESTEPS = frozenset({"ddim", "ddim_cfgpp", "plms"})

#: How the samplers' short names ended in AUTOMATIC1111 before 1.9.
_SHORT = {"karras": "ka", "exponential": "exp"}


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler with its schedule: the engine's key and AUTOMATIC1111's names."""

    key: str
    title: str
    schedule_type: str | None = None
    aliases: tuple[str, ...] = ()
    method: str = ""
    """The sampler's key without its schedule."""
    schedule: str | None = None
    """A key of SCHEDULES; None for a sampler that has its own timesteps."""
    automatic: str | None = None
    """The schedule that AUTOMATIC1111's 'Automatic' is for it."""
    options: tuple[str, ...] = ()
    """The fields of `Options` that it has."""
    calls: int = 1
    """UNet calls of a step."""

    @property
    def name(self) -> str:
        if self.schedule is None or self.key == self.method:
            return self.title
        return f"{self.title} {SCHEDULES[self.schedule]}"


_CHURN = ("s_churn", "s_tmin", "s_tmax", "s_noise")
_ANCESTRAL = ("eta", "s_noise")


def _with_schedules(
    key: str,
    title: str,
    short: str,
    automatic: str = "uniform",
    options: tuple[str, ...] = (),
    *,
    calls: int = 1,
    alone: str = "uniform",
    aliases: tuple[str, ...] = (),
) -> Iterator[Sampler]:
    """A sampler of sigmas with each schedule; *alone* is the one of its bare name."""
    for schedule, label in SCHEDULES.items():
        is_plain = schedule == alone
        names = [f"{title} {label}"]
        if schedule in _SHORT:
            names.append(f"{short}_{_SHORT[schedule]}")
        yield Sampler(
            key if is_plain else f"{key}_{schedule}",
            title,
            "Automatic" if schedule == automatic == "uniform" else label,
            (short, *aliases, *names) if is_plain else tuple(names),
            key,
            schedule,
            automatic,
            options,
            calls,
        )


def _of_timesteps(key: str, title: str, options: tuple[str, ...] = ()) -> Sampler:
    return Sampler(key, title, None, (key,), key, options=options)


_ALL = (
    *_with_schedules(
        *("euler_ancestral", "Euler a", "k_euler_a", "uniform", ("eta",)),
        aliases=("k_euler_ancestral", "euler_a", "euler ancestral"),
    ),
    *_with_schedules("euler", "Euler", "k_euler", options=_CHURN),
    *_with_schedules("dpmpp_2m", "DPM++ 2M", "k_dpmpp_2m", "karras"),
    *_with_schedules(
        "dpmpp_sde", "DPM++ SDE", "k_dpmpp_sde", "karras", _ANCESTRAL, calls=2
    ),
    *_with_schedules(
        "dpmpp_2m_sde", "DPM++ 2M SDE", "k_dpmpp_2m_sde", "exponential", _ANCESTRAL
    ),
    *_with_schedules(
        *(
            "dpmpp_2m_sde_heun",
            "DPM++ 2M SDE Heun",
            "k_dpmpp_2m_sde_heun",
            "exponential",
        ),
        _ANCESTRAL,
    ),
    *_with_schedules(
        "dpmpp_3m_sde", "DPM++ 3M SDE", "k_dpmpp_3m_sde", "exponential", _ANCESTRAL
    ),
    *_with_schedules(
        "dpmpp_2s_ancestral",
        "DPM++ 2S a",
        "k_dpmpp_2s_a",
        "karras",
        _ANCESTRAL,
        calls=2,
    ),
    *_with_schedules("lms", "LMS", "k_lms"),
    *_with_schedules("heun", "Heun", "k_heun", options=_CHURN, calls=2),
    *_with_schedules("dpm_2", "DPM2", "k_dpm_2", "karras", _CHURN, calls=2),
    *_with_schedules(
        "dpm_2_ancestral", "DPM2 a", "k_dpm_2_a", "karras", _ANCESTRAL, calls=2
    ),
    *_with_schedules("dpm_fast", "DPM fast", "k_dpm_fast", options=_ANCESTRAL),
    *_with_schedules("dpm_adaptive", "DPM adaptive", "k_dpm_ad", options=("eta",)),
    *_with_schedules(
        "restart", "Restart", "restart", "karras", calls=2, alone="karras"
    ),
    *_with_schedules("lcm", "LCM", "k_lcm"),
    _of_timesteps("ddim", "DDIM", ("eta",)),
    _of_timesteps("ddim_cfgpp", "DDIM CFG++", ("eta",)),
    _of_timesteps("plms", "PLMS"),
    _of_timesteps("unipc", "UniPC"),
    _of_timesteps("tcd", "TCD", ("eta",)),
)

#: DeepFloyd IF's lists of timesteps.
_LISTS = [
    "fast27",
    "smart27",
    "smart50",
    "smart100",
    "smart185",
    "super27",
    "super40",
    "super100",
]

#: Those of stages of DeepFloyd IF, which draw in pixels, and of latent models' what they also take.
_OF_PIXELS = (
    Sampler("ddpm", "DDPM"),
    Sampler("edm", "EDM"),
    *(Sampler(name, name) for name in _LISTS),
)
_PIXELS_TAKE = ("euler_ancestral", "euler", "dpmpp_2m")

SAMPLERS: Mapping[str, Sampler] = {sampler.key: sampler for sampler in _ALL}

#: UNet calls of DPM adaptive, as far as they can be told: 66 to 84 on the demo's model.
ADAPTIVE_CALLS = 75

#: Samplers by every accepted name, in lower case.
NAMES: Mapping[str, Sampler] = {
    name.lower(): sampler
    for sampler in (*_ALL, *_OF_PIXELS)
    for name in (sampler.key, sampler.name, *sampler.aliases)
}

_SCHEDULES_BY_NAME = {
    spelling.lower(): title
    for key, title in ({"automatic": "Automatic"} | dict(SCHEDULES)).items()
    for spelling in (key, title, title.replace(" ", ""))
}


def find(name: str, scheduler: str | None = None) -> Sampler:
    """The sampler by name, whose schedule goes before `scheduler`; raises ValueError for others."""
    sampler = NAMES.get(name.lower())
    if sampler is None:
        raise ValueError(unknown(name))
    schedule = check_scheduler(scheduler)
    if schedule is None or sampler.schedule is None or sampler.key != sampler.method:
        return sampler
    keys = {title: key for key, title in SCHEDULES.items()}
    asked = keys.get(schedule, sampler.automatic)
    return next(
        each
        for each in _ALL
        if each.method == sampler.method and each.schedule == asked
    )


def unknown(name: str) -> str:
    """What to say of a name that is no sampler's: a look-alike, and the names of its own kind."""
    close = NAMES.get(validation.closest(name.lower(), NAMES) or "")
    of_pixels = close in _OF_PIXELS
    kind = "models of pixels" if of_pixels else "models of latents"
    meant = f"; did you mean {close.name!r}?" if close else ""
    return f"unknown sampler {name[:40]!r}{meant} (of {kind}: {', '.join(titles(of_pixels))})"


def titles(of_pixels: bool) -> list[str]:
    """The names of the samplers that a kind of model takes, without schedules."""
    if of_pixels:
        return [
            *(SAMPLERS[key].title for key in _PIXELS_TAKE),
            *(each.name for each in _OF_PIXELS),
        ]
    return list(dict.fromkeys(sampler.title for sampler in _ALL))


def check_scheduler(name: str | None) -> str | None:
    """The scheduler's title, or None; raises ValueError for an unknown one."""
    if not name:
        return None
    if (title := _SCHEDULES_BY_NAME.get(name.lower())) is None:
        hint = validation.suggestion(name, SCHEDULERS)
        raise ValueError(
            f"unknown scheduler {name[:40]!r}{hint}; known: {', '.join(SCHEDULERS)}"
        )
    return title


def too_few_steps(key: str) -> str:
    return f"steps is 1: {SAMPLERS[key].title} takes 2 at least (with 1 it draws nothing but noise)"


def least_steps(key: str) -> int:
    return 2 if key in _BY_TIMESTEPS else 1


def unet_calls(key: str, steps: int) -> int:
    """The UNet's calls in so many steps: of two a step, the last step, to sigma 0, makes one."""
    sampler = SAMPLERS.get(key)
    if sampler and sampler.method == "dpm_adaptive":
        return ADAPTIVE_CALLS
    return 2 * steps - 1 if sampler and sampler.calls > 1 and steps else steps


def editing_steps(key: str, steps: int) -> int:
    """The steps that prompt editing counts: AUTOMATIC1111 has two for each of two UNet calls."""
    return steps * SAMPLERS[key].calls if key in SAMPLERS else steps


NoiseSource = Literal["CPU", "GPU", "NV"]
"""AUTOMATIC1111's `randn_source`: torch's generator on the CPU, its generator on an NVIDIA GPU, or
the same computed on the CPU. Here the last two are the same: no noise depends on the machine."""

#: Seeds of the Philox generator, which has keys of 64 bits, do not wrap at 32 bits as torch's do.
PHILOX: frozenset[NoiseSource] = frozenset({"GPU", "NV"})


@dataclass(frozen=True, slots=True)
class Noise:
    """How an image's noise follows from its seed."""

    source: NoiseSource = "CPU"
    seed_delta: int = 0
    """`eta_noise_seed_delta`: added to the seed for all noise but the first."""
    subseed: int = 0
    subseed_strength: float = 0.0
    """How far the first noise is turned towards that of the subseed."""
    resize_from: tuple[int, int] | None = None
    """(width, height) in pixels of the image whose first noise is put into the middle of it."""


DEFAULT_NOISE = Noise()


def check_guidance(cfg_scale: float, prompt: Prompt, name: str = "the prompt") -> None:
    """Raises ValueError if a weight that is the prompt's own multiplies the scale too far."""
    weight = max(prompt.weights, key=abs)
    if abs(cfg_scale * weight) > MAX_GUIDANCE:
        raise ValueError(
            f"cfg_scale: {cfg_scale:g} times the weight of {name}, which is {weight:g}, is more"
            f" than {MAX_GUIDANCE}"
        )


def _without_nul(prompt: str) -> str:
    if "\0" in prompt:
        raise ValueError(
            "holds the character U+0000, which no image's text can hold: remove it"
        )
    return prompt


PromptText = Annotated[
    str, StringConstraints(max_length=65_536), AfterValidator(_without_nul)
]


def _is_off_or_side(pixels: int) -> int:
    if pixels > 0 and not MIN_SIDE <= pixels <= MAX_SIDE:
        raise ValueError(
            f"should be between {MIN_SIDE} and {MAX_SIDE}, or 0 for no resizing"
        )
    return max(pixels, 0)


VaeDecoder = Literal["Full", "TAESD"]
"""AUTOMATIC1111's `sd_vae_decode_method`: what decodes the images."""

#: Without guidance it is 1, which diffusers spells 0.
_Scale = Annotated[float, AfterValidator(lambda scale: scale or 1.0)]
Guidance = Annotated[_Scale, Field(ge=1, le=MAX_GUIDANCE)]
Side = Annotated[int, Field(ge=MIN_SIDE, le=MAX_SIDE)]
#: Pixels on a side of one of the latents' cells, AUTOMATIC1111's `opt_f`: images have whole ones.
CELL = 8


def whole_cells(width: int, height: int) -> tuple[int, int]:
    """The size of the image that is drawn for a job of this size, as AUTOMATIC1111 rounds it."""
    return width // CELL * CELL, height // CELL * CELL


class FirstPass(BaseModel):
    """What decides an image before anything is done with it; sizes in pixels."""

    prompt: PromptText
    negative_prompt: PromptText = ""
    sampler_name: Annotated[str, AfterValidator(lambda name: find(name) and name)] = (
        "Euler a"
    )
    scheduler: Annotated[str | None, AfterValidator(check_scheduler)] = None
    steps: int = Field(default=20, ge=1, le=150)
    cfg_scale: Guidance = 7.0
    width: Side | None = None
    height: Side | None = None
    seed: int = Field(default=-1, ge=-1, le=2**32 - 1)
    batch_size: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    n_iter: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    clip_skip: int = Field(default=1, ge=1, le=12)
    eta: float | None = Field(default=None, ge=0, le=1)
    s_churn: float = Field(default=0.0, ge=0, le=100)
    s_tmin: float = Field(default=0.0, ge=0, le=1000)
    s_tmax: float = Field(default=0.0, ge=0, le=1000)
    """0: no limit."""
    s_noise: float = Field(default=1.0, ge=0, le=10)
    s_min_uncond: float = Field(default=0.0, ge=0, le=1000)
    img2img_extra_noise: float = Field(default=0.0, ge=0, le=1)
    randn_source: NoiseSource = "CPU"
    eta_noise_seed_delta: int = Field(default=0, ge=-(2**32), le=2**32)
    subseed: int = Field(default=-1, ge=-1, le=2**32 - 1)
    subseed_strength: float = Field(default=0.0, ge=0, le=1)
    seed_resize_from_w: Annotated[int, AfterValidator(_is_off_or_side)] = 0
    seed_resize_from_h: Annotated[int, AfterValidator(_is_off_or_side)] = 0
    use_downcasted_alpha_bar: bool = False
    enable_prompt_comments: bool = True
    sd_vae_decode_method: VaeDecoder | None = None
    """None: the worker's usual one."""

    @model_validator(mode="after")
    def _draws_images(self) -> Self:
        if self.images > MAX_IMAGES_PER_JOB:
            raise ValueError(
                f"batch_size x n_iter is {self.images}; a job makes {MAX_IMAGES_PER_JOB} images"
                " at most, so send more jobs"
            )
        if self.steps < least_steps(self.sampler):
            raise ValueError(too_few_steps(self.sampler))
        if self.randn_source in PHILOX and self.seed + self.images > 2**32:
            raise ValueError(
                f"seed: the seeds of {self.images} images from {self.seed} on go beyond 32 bits,"
                f" which with randn_source {self.randn_source} are no longer those of this job"
            )
        for field in ("prompt", "negative_prompt"):
            try:
                clip.check_length(getattr(self, f"parsed_{field}"))
            except errors.JobError as error:
                raise ValueError(f"{field}: {error.message}") from None
        check_guidance(self.cfg_scale, self.parsed_prompt)
        return self

    @functools.cached_property
    def parsed_prompt(self) -> Prompt:
        return self.read(prompts.read_prompt, self.prompt)

    @functools.cached_property
    def parsed_negative_prompt(self) -> Prompt:
        return self.read(prompts.read_negative_prompt, self.negative_prompt)

    def read(self, read: Callable[..., Prompt], text: str, *steps: int) -> Prompt:
        """A prompt in the course of the first pass' steps, or of a second pass' and those."""
        counted = dict(
            zip(("steps", "first_steps"), steps or [self.editing_steps], strict=False)
        )
        return read(text, comments=self.enable_prompt_comments, **counted)

    @property
    def editing_steps(self) -> int:
        return editing_steps(self.sampler, self.steps)

    @property
    def shown_prompts(self) -> tuple[str, str]:
        """The prompt and the negative prompt without comments, as an image's parameters have it."""
        return self._shown(self.prompt), self._shown(self.negative_prompt)

    def _shown(self, text: str) -> str:
        return prompts.without_comments(text) if self.enable_prompt_comments else text

    @property
    def images(self) -> int:
        return self.batch_size * self.n_iter

    @property
    def sampler(self) -> str:
        return find(self.sampler_name, self.scheduler).key

    @property
    def sampler_options(self) -> Options:
        return Options(
            self.eta,
            self.s_churn,
            self.s_tmin,
            self.s_tmax or math.inf,
            self.s_noise,
            self.s_min_uncond,
            self.img2img_extra_noise,
            self.use_downcasted_alpha_bar,
        )

    def image_seed(self, index: int) -> int:
        """Each image of a job increments the seed, or the subseed, as in AUTOMATIC1111."""
        return self.seed if self.subseed_strength else (self.seed + index) % 2**32

    def image_subseed(self, index: int) -> int:
        return self.subseed + index

    @property
    def seed_resize_from(self) -> tuple[int, int] | None:
        """(width, height) of the image that the seed is from, if both are given."""
        size = self.seed_resize_from_w, self.seed_resize_from_h
        return size if min(size) > 0 else None

    def image_noise(self, index: int) -> Noise:
        return Noise(
            self.randn_source,
            self.eta_noise_seed_delta,
            self.image_subseed(index) if self.subseed_strength else 0,
            self.subseed_strength,
            self.seed_resize_from,
        )
