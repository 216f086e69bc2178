"""The table of samplers and schedules, by the names of AUTOMATIC1111 and k-diffusion. No torch.

Up to AUTOMATIC1111 1.8 a sampler's name included its schedule ('DPM++ 2M Karras'); 1.9 added the
field `scheduler`. Both are accepted, and the field goes before the name. A name alone means what it
meant before 1.9, so 'DPM++ 2M' has no Karras schedule; with `scheduler` 'Automatic' it has, as in
1.10.

A new sampler is a row of `samplers.toml` and a function in `worker.engine.samplers`.
"""

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from imagefleet import validation


@dataclass(frozen=True, slots=True)
class Options:
    """AUTOMATIC1111's options of samplers; each sampler has some of them and ignores the others."""

    #: Noise of ancestral and SDE samplers (default 1), of DDIM (0) and of TCD (0.3).
    eta: float | None = None
    #: This and the next two: Euler, Heun and DPM2 (Karras et al. 2022, algorithm 2).
    s_churn: float = 0.0
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    #: Scale of the noise of these and of most ancestral and SDE samplers.
    s_noise: float = 1.0
    #: The sigma below which every other step goes without the negative prompt, for all samplers.
    s_min_uncond: float = 0.0
    #: Share of noise that is added to the first noise of a pass that begins with an image.
    extra_noise: float = 0.0
    #: True if the noise schedule and its sigmas are rounded to half precision.
    is_downcast: bool = False


DEFAULT_OPTIONS = Options()


_TABLE = tomllib.loads(
    Path(__file__).with_name("samplers.toml").read_text(encoding="utf-8")
)

#: Titles of the schedules of sigmas, by their keys.
SCHEDULES: Mapping[str, str] = _TABLE["schedules"]

SCHEDULERS = ("Automatic", *SCHEDULES.values())


class Sampler(NamedTuple):
    """A sampler with a schedule: its names, and all that jobs and the engine ask of it."""

    #: The sampler's key without its schedule.
    method: str
    title: str
    #: Other names; the first one of a sampler of sigmas is k-diffusion's.
    aliases: tuple[str, ...] = ()
    #: A key of SCHEDULES; None for a sampler that has its own timesteps.
    schedule: str | None = "uniform"
    #: True if its name goes without that of its schedule.
    is_bare: bool = True
    #: The schedule that AUTOMATIC1111's 'Automatic' is for it.
    automatic: str = "uniform"
    #: The fields of `Options` that it has.
    options: tuple[str, ...] = ()
    #: UNet calls of a step.
    calls: int = 1
    #: UNet calls of an image, roughly, if the image decides how many there are; else 0.
    calls_in_all: int = 0
    #: 2 if the last of its timesteps takes no step: one step would draw nothing but noise.
    least_steps: int = 1
    #: True if it asks for one sigma more, and leaves the last but one out.
    skips_next_to_last: bool = False
    #: True if it takes steps of its own between the ends of a schedule.
    is_between_ends: bool = False
    #: The UNet is called at every so many-th timestep alone, on which it was distilled.
    distilled_stride: int = 1
    #: Estimates that its moves weigh: denoised images, noise, or a consistency model's images.
    estimates: Literal["image", "noise", "consistency"] = "image"
    #: The share of `cfg_scale` that guides it.
    guidance_share: float = 1.0
    #: True if it takes the negative prompt at any `cfg_scale`, at 1 as well.
    needs_negative: bool = False
    #: AUTOMATIC1111's setting that gives its eta, where a payload has no `eta`.
    eta_setting: str = "eta_ancestral"
    #: AUTOMATIC1111's word for its eta in infotexts.
    eta_word: str = "Eta"
    #: The eta that infotexts leave out.
    usual_eta: float = 1.0
    #: True if models of pixels take it as well.
    draws_pixels: bool = False
    #: True if models of flows take it, on their own schedule.
    draws_flows: bool = False

    @property
    def key(self) -> str:
        """The engine's name of it, such as "dpmpp_2m_karras"."""
        return self.method if self.is_bare else f"{self.method}_{self.schedule}"

    @property
    def name(self) -> str:
        if self.is_bare or self.schedule is None:
            return self.title
        return f"{self.title} {SCHEDULES[self.schedule]}"

    @property
    def schedule_type(self) -> str | None:
        """AUTOMATIC1111's title of its schedule; None for a sampler of timesteps."""
        if self.schedule is None:
            return None
        is_automatic = self.schedule == self.automatic == "uniform"
        return "Automatic" if is_automatic else SCHEDULES[self.schedule]

    @property
    def is_adaptive(self) -> bool:
        """True if the image decides how many steps are taken."""
        return self.calls_in_all > 0


_ROWS = TypeAdapter(tuple[Sampler, ...])
_OF_SIGMAS = _ROWS.validate_python(_TABLE["sigmas"])
_OF_TIMESTEPS = tuple(
    each._replace(schedule=None) for each in _ROWS.validate_python(_TABLE["timesteps"])
)

#: Samplers by their bare names; those of sigmas are there with each other schedule as well.
_BARE = (*_OF_SIGMAS, *_OF_TIMESTEPS)


def _with_schedules(bare: Sampler) -> Iterator[Sampler]:
    for schedule, label in SCHEDULES.items():
        names = [f"{bare.title} {label}"]
        if short := _TABLE["short"].get(schedule):
            names.append(f"{bare.aliases[0]}_{short}")
        if schedule == bare.schedule:
            yield bare._replace(aliases=(*bare.aliases, *names))
        else:
            yield bare._replace(
                schedule=schedule,
                aliases=tuple(names),
                is_bare=False,
                draws_flows=False,
            )


#: Samplers of models of latents, by their keys.
SAMPLERS = {
    sampler.key: sampler
    for sampler in (
        *itertools.chain.from_iterable(map(_with_schedules, _OF_SIGMAS)),
        *_OF_TIMESTEPS,
    )
}

#: Samplers of DeepFloyd IF's stages alone, which draw in pixels.
_OF_PIXELS = (
    Sampler("ddpm", "DDPM", schedule=None),
    *(Sampler(name, name, schedule=None) for name in _TABLE["lists"]),
)

#: Samplers by every accepted name, in lower case.
NAMES = {
    name.lower(): sampler
    for sampler in (*SAMPLERS.values(), *_OF_PIXELS)
    for name in (sampler.key, sampler.name, *sampler.aliases)
}

_BY_METHOD = {
    (sampler.method, sampler.schedule): sampler for sampler in SAMPLERS.values()
}

_KEYS_BY_TITLE = {title: key for key, title in SCHEDULES.items()}

_SCHEDULES_BY_NAME = {
    spelling.lower(): title
    for key, title in {"automatic": "Automatic", **SCHEDULES}.items()
    for spelling in (key, title, title.replace(" ", ""))
}


def find(name: str, scheduler: str | None = None) -> Sampler:
    """The sampler of a name; a *scheduler* goes before the name's. ValueError for others."""
    sampler = NAMES.get(name.lower())
    if sampler is None:
        raise ValueError(unknown(name))
    title = check_scheduler(scheduler)
    if title is None or sampler.schedule is None:
        return sampler
    return _BY_METHOD[sampler.method, _KEYS_BY_TITLE.get(title, sampler.automatic)]


def scheduler_in(name: str) -> str | None:
    """The scheduler in a sampler's name, such as "Karras" of "Euler Karras"; None for its own.

    As AUTOMATIC1111's `get_sampler_and_scheduler` takes it off the name where the field is empty.
    """
    sampler = NAMES.get(name.lower())
    if sampler is None or sampler.schedule is None:
        return None
    title = SCHEDULES[sampler.schedule]
    is_named = not sampler.is_bare or name.lower().endswith(f" {title.lower()}")
    is_own = sampler.schedule == sampler.automatic != "uniform"
    return title if is_named and not is_own else None


def unknown(name: str) -> str:
    """The message for a name that no sampler has: a look-alike, and the names of its kind."""
    close = NAMES.get(validation.closest(name.lower(), NAMES) or "")
    of_pixels = close in _OF_PIXELS
    kind = "models of pixels" if of_pixels else "models of latents"
    meant = f"; did you mean {close.name!r}?" if close else ""
    return f"unknown sampler {name[:40]!r}{meant} (of {kind}: {', '.join(titles(of_pixels))})"


def titles(of_pixels: bool) -> list[str]:
    """The names of the samplers that models of pixels or of latents take, without schedules."""
    if not of_pixels:
        return [sampler.title for sampler in _BARE]
    shared = [sampler.title for sampler in _BARE if sampler.draws_pixels]
    return [*shared, *(sampler.title for sampler in _OF_PIXELS)]


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


def check_steps(key: str, steps: int) -> None:
    """Raises ValueError for fewer steps than a sampler takes."""
    sampler = NAMES[key]
    if steps < sampler.least_steps:
        raise ValueError(
            f"steps is {steps}: {sampler.title} takes {sampler.least_steps} at least"
            f" (with {steps} it draws nothing but noise)"
        )


def unet_calls(key: str, steps: int) -> int:
    """The UNet's calls in so many steps: of two a step, the last step, to sigma 0, makes one."""
    sampler = NAMES[key]
    if sampler.is_adaptive:
        return sampler.calls_in_all
    return 2 * steps - 1 if sampler.calls > 1 and steps else steps


def editing_steps(key: str, steps: int) -> int:
    """The steps that prompt editing counts: AUTOMATIC1111 has two for each of two UNet calls."""
    return steps * NAMES[key].calls
