"""The samplers of a job, by AUTOMATIC1111's and k-diffusion's names, and its noise. No torch.

Up to AUTOMATIC1111 1.8 a sampler's name included its schedule ('DPM++ 2M Karras'); 1.9 added the
field `scheduler`. Both are accepted. A name alone means what it meant before 1.9, so 'DPM++ 2M' has
no Karras schedule; with `scheduler` 'Automatic' it has, as in 1.9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SCHEDULERS = ("Automatic", "Uniform", "Karras")

#: Samplers for which AUTOMATIC1111's 'Automatic' is Karras, not Uniform.
_AUTOMATIC_IS_KARRAS = frozenset({"dpmpp_2m"})


#: Samplers whose last timestep takes no step, so that one step would draw nothing but noise.
_BY_TIMESTEPS = frozenset({"ddim", "plms"})


@dataclass(frozen=True, slots=True)
class Options:
    """AUTOMATIC1111's options of samplers; each sampler has some of them and ignores the others."""

    eta: float | None = None
    """Noise of Euler a (default 1) and of DDIM (default 0)."""
    s_churn: float = 0.0
    """This and the next three: stochastic Euler (Karras et al. 2022, algorithm 2)."""
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    s_noise: float = 1.0
    s_min_uncond: float = 0.0
    """The sigma below which every other step goes without the negative prompt, for all samplers."""


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler with its schedule: the engine's key and AUTOMATIC1111's names."""

    key: str
    title: str
    schedule_type: str | None
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.title} Karras" if self.schedule_type == "Karras" else self.title


_ALL = (
    Sampler(
        "euler_ancestral",
        "Euler a",
        "Automatic",
        ("k_euler_a", "k_euler_ancestral", "euler_a", "euler ancestral"),
    ),
    Sampler("euler_ancestral_karras", "Euler a", "Karras", ("k_euler_a_ka",)),
    Sampler("euler", "Euler", "Automatic", ("k_euler",)),
    Sampler("euler_karras", "Euler", "Karras", ("k_euler_ka",)),
    Sampler("dpmpp_2m", "DPM++ 2M", "Uniform", ("k_dpmpp_2m",)),
    Sampler("dpmpp_2m_karras", "DPM++ 2M", "Karras", ("k_dpmpp_2m_ka",)),
    Sampler("ddim", "DDIM", None),
    Sampler("plms", "PLMS", None),
)

#: DeepFloyd IF's lists of timesteps.
_LISTS = ["fast27", "smart27", "smart50", "smart100", "smart185", "super27", "super40", "super100"]

#: Those of stages of DeepFloyd IF, which draw in pixels.
_OF_PIXELS = (
    Sampler("ddpm", "DDPM", None),
    Sampler("edm", "EDM", None),
    *(Sampler(name, name, None) for name in _LISTS),
)

SAMPLERS: Mapping[str, Sampler] = {sampler.key: sampler for sampler in _ALL}

#: Samplers by every accepted name, in lower case.
NAMES: Mapping[str, Sampler] = {
    name.lower(): sampler
    for sampler in (*_ALL, *_OF_PIXELS)
    for name in (sampler.key, sampler.name, *sampler.aliases)
}


def find(name: str, scheduler: str | None = None) -> Sampler:
    """The sampler by name, whose schedule comes before `scheduler`, as in 1.9; or ValueError."""
    sampler = NAMES.get(name.lower())
    if sampler is None:
        known = ", ".join(sampler.name for sampler in (*_ALL, *_OF_PIXELS))
        raise ValueError(f"unknown sampler {name[:40]!r}; known: {known}")
    schedule = check_scheduler(scheduler)
    if schedule == "Automatic" and sampler.key in _AUTOMATIC_IS_KARRAS:
        schedule = "Karras"
    if schedule == "Karras":
        return SAMPLERS.get(f"{sampler.key}_karras", sampler)
    return sampler


def check_scheduler(name: str | None) -> str | None:
    """The scheduler's title, or None; raises ValueError for an unknown one."""
    if not name:
        return None
    if name.capitalize() not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise ValueError(f"unknown scheduler {name[:40]!r}; known: {known}")
    return name.capitalize()


def too_few_steps(key: str) -> str:
    return f"steps is 1: {SAMPLERS[key].title} takes 2 at least (with 1 it draws nothing but noise)"


def least_steps(key: str) -> int:
    """The fewest steps that draw an image."""
    return 2 if key in _BY_TIMESTEPS else 1


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
