"""The samplers that a job may ask for, by AUTOMATIC1111's names and k-diffusion's. No torch.

Up to AUTOMATIC1111 1.8 a sampler's name said its schedule, too ('DPM++ 2M Karras'); from 1.9 on
there is a field `scheduler`. Both forms are read. A name alone means what it meant before 1.9, so
'DPM++ 2M' has no Karras schedule; with `scheduler` 'Automatic' it has, as since 1.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The schedules of noise levels that a job's `scheduler` may name.
SCHEDULERS = ("Automatic", "Uniform", "Karras")

#: The samplers for which AUTOMATIC1111's 'Automatic' is not 'Uniform'.
_AUTOMATIC_IS_KARRAS = frozenset({"dpmpp_2m"})


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler with its schedule: the engine's key, and what AUTOMATIC1111 writes for both."""

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

#: By the engine's key.
SAMPLERS: Mapping[str, Sampler] = {sampler.key: sampler for sampler in _ALL}

#: By every name that a job may use, in lower case.
NAMES: Mapping[str, Sampler] = {
    name.lower(): sampler
    for sampler in _ALL
    for name in (sampler.key, sampler.name, *sampler.aliases)
}


def find(name: str, scheduler: str | None = None) -> Sampler:
    """The sampler that a job means; a schedule in its name goes before `scheduler`, as in 1.9.

    Raises:
        ValueError: one of the two is not known; lists those that are.
    """
    sampler = NAMES.get(name.lower())
    if sampler is None:
        known = ", ".join(sampler.name for sampler in SAMPLERS.values())
        raise ValueError(f"{name[:40]!r} is no sampler that is known here: {known}")
    schedule = check_scheduler(scheduler)
    if schedule == "Automatic" and sampler.key in _AUTOMATIC_IS_KARRAS:
        schedule = "Karras"
    if schedule == "Karras":
        return SAMPLERS.get(f"{sampler.key}_karras", sampler)
    return sampler


def check_scheduler(name: str | None) -> str | None:
    """The scheduler's title; None for none.

    Raises:
        ValueError: it is not known; lists those that are.
    """
    if not name:
        return None
    if name.capitalize() not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise ValueError(f"{name[:40]!r} is no scheduler that is known here: {known}")
    return name.capitalize()
