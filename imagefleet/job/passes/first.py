"""A job's first pass: the fields of AUTOMATIC1111's txt2img, with the defaults of its API."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    model_validator,
)

from imagefleet import validation
from imagefleet.job import prompt as prompts
from imagefleet.job import samplers
from imagefleet.job.noise import MAX_SEED, Noise, NoiseSource
from imagefleet.job.prompt import Prompt
from imagefleet.job.sizes import MAX_IMAGES_PER_JOB, MAX_SIDE, MIN_SIDE, Size

#: The largest `cfg_scale`, also times the prompt's own weight: beyond, images come out broken.
MAX_GUIDANCE = 30


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


def _side_or_off(pixels: int) -> int:
    if pixels > 0 and not MIN_SIDE <= pixels <= MAX_SIDE:
        raise ValueError(
            f"should be between {MIN_SIDE} and {MAX_SIDE}, or 0 for no resizing"
        )
    return max(pixels, 0)


#: AUTOMATIC1111's `sd_vae_decode_method`: what decodes the images.
VaeDecoder = Literal["Full", "TAESD"]

#: A part of a whole.
Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=1, le=MAX_IMAGES_PER_JOB)]
_Seed = Annotated[int, Field(ge=-1, le=MAX_SEED)]
_Sigma = Annotated[float, Field(ge=0, le=1000)]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]
Side = Annotated[int, Field(ge=MIN_SIDE, le=MAX_SIDE)]
_SideOrOff = Annotated[int, AfterValidator(_side_or_off)]


class FirstPass(BaseModel):
    """Fields of txt2img's first pass, whose image further passes change; sizes in pixels."""

    prompt: PromptText
    negative_prompt: PromptText = ""
    sampler_name: Annotated[
        str, AfterValidator(lambda name: samplers.find(name) and name)
    ] = "Euler a"
    scheduler: Annotated[str | None, AfterValidator(samplers.check_scheduler)] = None
    steps: int = Field(default=20, ge=1, le=150)
    cfg_scale: Guidance = 7.0
    width: Side | None = None
    height: Side | None = None
    seed: _Seed = -1
    batch_size: _Count = 1
    n_iter: _Count = 1
    clip_skip: int = Field(default=1, ge=1, le=12)
    #: The eta of all passes; None: that of each sampler's own setting.
    eta: Share | None = None
    eta_ancestral: Share | None = None
    eta_ddim: Share | None = None
    s_churn: float = Field(default=0.0, ge=0, le=100)
    s_tmin: _Sigma = 0.0
    #: 0: no limit.
    s_tmax: _Sigma = 0.0
    s_noise: float = Field(default=1.0, ge=0, le=10)
    s_min_uncond: _Sigma = 0.0
    img2img_extra_noise: Share = 0.0
    randn_source: NoiseSource = "CPU"
    eta_noise_seed_delta: int = Field(default=0, ge=-(2**32), le=2**32)
    subseed: _Seed = -1
    subseed_strength: Share = 0.0
    seed_resize_from_w: _SideOrOff = 0
    seed_resize_from_h: _SideOrOff = 0
    use_downcasted_alpha_bar: bool = False
    enable_prompt_comments: bool = True
    #: None: the worker's usual one.
    sd_vae_decode_method: VaeDecoder | None = None

    @model_validator(mode="after")
    def _draws_images(self) -> Self:
        if self.images > MAX_IMAGES_PER_JOB:
            raise ValueError(
                f"batch_size x n_iter is {self.images}; a job makes {MAX_IMAGES_PER_JOB} images"
                " at most, so send more jobs"
            )
        samplers.check_steps(self.sampler, self.steps)
        if max(self.seed, self.subseed) + self.images - 1 > MAX_SEED:
            raise ValueError(
                f"seed: the seeds of {self.images} images from"
                f" {max(self.seed, self.subseed)} on go beyond {MAX_SEED}"
            )
        with validation.as_error(ValueError, "prompt: "):
            check_guidance(self.cfg_scale, self.parsed_prompt)
        with validation.as_error(ValueError, "negative_prompt: "):
            _ = self.parsed_negative_prompt
        return self

    @functools.cached_property
    def parsed_prompt(self) -> Prompt:
        return self.read(prompts.read_prompt, self.prompt)

    @functools.cached_property
    def parsed_negative_prompt(self) -> Prompt:
        return self.read(prompts.read_negative_prompt, self.negative_prompt)

    def read(
        self,
        read: Callable[..., Prompt],
        text: str,
        steps: int = 0,
        first_steps: int = 0,
    ) -> Prompt:
        """A prompt in the course of the first pass' steps, or of a second pass' and those."""
        return read(
            text,
            comments=self.enable_prompt_comments,
            steps=steps or self.editing_steps,
            first_steps=first_steps,
        )

    @property
    def editing_steps(self) -> int:
        return samplers.editing_steps(self.sampler, self.steps)

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
        return samplers.find(self.sampler_name, self.scheduler).key

    @property
    def sampler_options(self) -> samplers.Options:
        """The options of the first pass' sampler."""
        return self.options_of(self.sampler)

    def options_of(self, sampler: str) -> samplers.Options:
        """The options of a pass with the *sampler* of that key, whose eta has its own setting."""
        own_eta = getattr(self, samplers.NAMES[sampler].eta_setting)
        return samplers.Options(
            own_eta if self.eta is None else self.eta,
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
        return self.seed if self.subseed_strength else self.seed + index

    def image_subseed(self, index: int) -> int:
        return self.subseed + index

    @property
    def seed_resize_from(self) -> Size | None:
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
