"""The fields of a job's first pass: AUTOMATIC1111's txt2img, with the defaults of its API."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    model_validator,
)

from imagefleet import errors
from imagefleet.job import prompt as prompts
from imagefleet.job import samplers
from imagefleet.job.prompt import Prompt

#: The shortest and the longest side of an image, in pixels.
MIN_SIDE = 64
MAX_SIDE = 2048

#: The largest `cfg_scale`, also times the prompt's own weight: beyond, images come out broken.
MAX_GUIDANCE = 30

#: What a slow node draws in an hour or so: until then a job's images hold a place in a worker.
MAX_IMAGES_PER_JOB = 1000

PromptText = Annotated[str, StringConstraints(max_length=65_536)]


def _is_off_or_side(pixels: int) -> int:
    if pixels > 0 and not MIN_SIDE <= pixels <= MAX_SIDE:
        raise ValueError(f"should be between {MIN_SIDE} and {MAX_SIDE}, or 0 for no resizing")
    return max(pixels, 0)


def _known_sampler(name: str) -> str:
    samplers.find(name)
    return name


def _known_scheduler(name: str | None) -> str | None:
    samplers.check_scheduler(name)
    return name


Side = Annotated[int, Field(ge=MIN_SIDE, le=MAX_SIDE, multiple_of=8)]


class FirstPass(BaseModel):
    """What decides an image before anything is done with it; sizes in pixels."""

    prompt: PromptText
    negative_prompt: PromptText = ""
    sampler_name: Annotated[str, AfterValidator(_known_sampler)] = "Euler a"
    scheduler: Annotated[str | None, AfterValidator(_known_scheduler)] = None
    steps: int = Field(default=20, ge=1, le=150)
    cfg_scale: float = Field(default=7.0, ge=1, le=MAX_GUIDANCE)
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
    randn_source: samplers.NoiseSource = "CPU"
    eta_noise_seed_delta: int = Field(default=0, ge=-(2**32), le=2**32)
    subseed: int = Field(default=-1, ge=-1, le=2**32 - 1)
    subseed_strength: float = Field(default=0.0, ge=0, le=1)
    seed_resize_from_w: Annotated[int, AfterValidator(_is_off_or_side)] = 0
    seed_resize_from_h: Annotated[int, AfterValidator(_is_off_or_side)] = 0
    enable_prompt_comments: bool = True

    @model_validator(mode="after")
    def _draws_images(self) -> Self:
        if self.images > MAX_IMAGES_PER_JOB:
            raise ValueError(
                f"batch_size x n_iter is {self.images}; a job makes {MAX_IMAGES_PER_JOB} images"
                " at most, so send more jobs"
            )
        if self.steps < samplers.least_steps(self.sampler):
            raise ValueError(samplers.too_few_steps(self.sampler))
        if self.randn_source in samplers.PHILOX and self.seed + self.images > 2**32:
            raise ValueError(
                f"seed: the seeds of {self.images} images from {self.seed} on go beyond 32 bits,"
                f" which with randn_source {self.randn_source} are no longer those of this job"
            )
        for field in ("prompt", "negative_prompt"):
            try:
                getattr(self, f"parsed_{field}")
            except errors.JobError as error:
                raise ValueError(f"{field}: {error.message}") from None
        if abs(self.guidance) > MAX_GUIDANCE:
            raise ValueError(
                f"cfg_scale: {self.cfg_scale:g} times the prompt's own weight, which is"
                f" {self.parsed_prompt.weight:g}, is more than {MAX_GUIDANCE}"
            )
        return self

    @functools.cached_property
    def parsed_prompt(self) -> Prompt:
        return prompts.read_prompt(self.prompt, comments=self.enable_prompt_comments)

    @functools.cached_property
    def parsed_negative_prompt(self) -> Prompt:
        return prompts.read_negative_prompt(
            self.negative_prompt, comments=self.enable_prompt_comments
        )

    @property
    def shown_prompts(self) -> tuple[str, str]:
        """The prompt and the negative prompt without comments, as an image's parameters have it."""
        return self._shown(self.prompt), self._shown(self.negative_prompt)

    def _shown(self, text: str) -> str:
        return prompts.without_comments(text) if self.enable_prompt_comments else text

    @property
    def guidance(self) -> float:
        """The guidance scale; the prompt's own weight multiplies it, as in AUTOMATIC1111."""
        return self.cfg_scale * self.parsed_prompt.weight

    @property
    def images(self) -> int:
        return self.batch_size * self.n_iter

    @property
    def sampler(self) -> str:
        return samplers.find(self.sampler_name, self.scheduler).key

    @property
    def sampler_options(self) -> samplers.Options:
        return samplers.Options(
            self.eta,
            self.s_churn,
            self.s_tmin,
            self.s_tmax or math.inf,
            self.s_noise,
            self.s_min_uncond,
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

    def image_noise(self, index: int) -> samplers.Noise:
        return samplers.Noise(
            self.randn_source,
            self.eta_noise_seed_delta,
            self.image_subseed(index) if self.subseed_strength else 0,
            self.subseed_strength,
            self.seed_resize_from,
        )
