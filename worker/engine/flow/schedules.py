"""The schedule of a flow: rows of the samplers' table (`engine.sampler`).

A network of flows predicts the velocity v = noise - image at the share sigma of noise, so the image
is x - sigma v, and Euler's step goes the ratio of the sigmas towards it. Sigmas are those of
diffusers' scheduler: even from 1 to 1 / steps, shifted by the image's size and the steps.
"""

import itertools
from dataclasses import replace

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray

from imagefleet.errors import JobError, SetupError
from imagefleet.job import samplers
from imagefleet.job.samplers import Options
from imagefleet.validation import JSONDict
from worker.engine.sampler import LATENTS, Move, Schedule, towards
from worker.engine.samplers import schedule

_SCHEDULER = "FlowMatchEulerDiscreteScheduler"

#: That of single files, which have no configuration: FLUX.2-klein's.
USUAL_CONFIG = {
    "_class_name": _SCHEDULER,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
}


def check_config(config: JSONDict, name: str) -> None:
    """Raises SetupError for the configuration of another scheduler."""
    kind = config.get("_class_name", _SCHEDULER)
    if kind != _SCHEDULER or config.get("stochastic_sampling"):
        raise SetupError(
            f"the scheduler of {name!r} is {str(kind)[:60]}; flows may have {_SCHEDULER} without"
            " noise of its own"
        )


def make_schedule(
    name: str,
    steps: int,
    config: JSONDict,
    mu: float,
    options: Options,
    t_enc: int | None = None,
) -> Schedule:
    """The schedule of a sampler by name, for an image whose schedule is shifted by *mu*.

    *t_enc*: for the end of the schedule alone, on an image's latents; see `schedule.make_schedule`.
    Raises JobError for a sampler that does not work on flows.
    """
    sampler = samplers.SAMPLERS.get(name)
    if sampler is None:
        raise JobError(samplers.unknown(name))
    if not sampler.draws_flows:
        raise JobError(
            f"{sampler.name} does not work on this model, whose noise is a share of the image (flow"
            " matching) on a schedule of its own: use Euler with the scheduler Automatic"
        )
    if options.s_churn or options.extra_noise:
        raise JobError(
            "s_churn and img2img_extra_noise do not work on this model, which takes no noise but"
            " its first: leave them out of the job"
        )
    sigmas = make_sigmas(steps, config, mu)
    if t_enc is not None:
        sigmas = sigmas[steps - t_enc - 1 :]
    moves = []
    for number, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        # In float32, as diffusers' pipeline divides it and its network multiplies it again.
        told = np.float32(1000) * (np.float32(sigma * 1000) / np.float32(1000))
        moves.append(
            Move(
                float(sigma),
                towards(float(following / sigma)),
                finished=number,
                estimate=(1.0, -float(sigma)),
                timestep=float(told),
            )
        )
    first = float(sigmas[0])
    return replace(
        schedule.tabulate(moves or [Move(0.0, LATENTS)], options),
        initial_scale=first,
        image_scale=0.0 if t_enc is None else 1.0 - first,
    )


def make_sigmas(steps: int, config: JSONDict, mu: float) -> NDArray[np.float32]:
    """The sigmas of so many steps and of their end, in float32."""
    if steps == 0:
        return np.zeros(1, np.float32)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    found: NDArray[np.float32] = scheduler.sigmas.numpy()
    return found
