"""Noise of SDE samplers against k-diffusion's, whose Brownian motion is torchsde's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import references
from imagefleet.job.noise import Noise
from sampling import alphas_cumprod, stand_in
from worker.engine.sampler import NoiseStream
from worker.engine.samplers.brownian import BrownianTree
from worker.engine.samplers.philox import Philox
from worker.engine.samplers.schedule import make_schedule

#: torchsde rounds its ends, and then warns of points beyond them, which it takes as the ends.
pytestmark = pytest.mark.filterwarnings("ignore:Should have t:UserWarning")

SHAPE = (4, 8, 8)
SDE = ("dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde")


def cpu(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def theirs(k_diffusion) -> Callable[[float, float, int], Any]:
    def make(low: float, high: float, seed: int) -> Any:
        like = torch.zeros(1, *SHAPE)
        ends = (torch.tensor(low), torch.tensor(high))
        return k_diffusion.sampling.BrownianTreeNoiseSampler(like, *ends, seed=[seed])

    return make


@pytest.mark.parametrize(
    ("schedule", "steps", "seed"),
    [
        ("karras", 2, 0),
        ("exponential", 15, 2**32 - 1),
        ("uniform", 15, 0),
        ("sgm_uniform", 2, 2**32 - 1),
    ],
)
@pytest.mark.parametrize("method", SDE)
def test_the_noise_of_an_image_is_k_diffusions_to_the_bit(
    k_diffusion, theirs, method: str, schedule: str, steps: int, seed: int
):
    """At the sigmas of k-diffusion, in its order, from the image's own seed."""
    asked = []

    def remember(sigma: Any, following: Any) -> torch.Tensor:
        asked.append((sigma, following))
        return torch.zeros(1, *SHAPE)

    reference = references.Reference(k_diffusion, stand_in, alphas_cumprod())
    noise = [torch.zeros(1, *SHAPE)]
    reference.draw_by(
        method, reference.model, schedule, steps, noise, noise_sampler=remember
    )
    name = method if schedule == "uniform" else f"{method}_{schedule}"
    made = make_schedule(name, steps, alphas_cumprod(), "epsilon")
    stream = NoiseStream(
        seed, SHAPE, Noise("CPU"), factor=8, draws=len(asked), brownian=made.brownian
    )
    assert torch.equal(stream.first(), cpu(seed))
    sampler = theirs(*made.brownian.span, seed)
    assert len(asked) == sum(made.noisy)
    for sigma, following in asked:
        out = torch.empty(SHAPE)
        stream.fill(out)
        assert torch.equal(out, sampler(sigma, following)[0])


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**40 + 3])
def test_the_seed_of_every_place_is_numpys(seed: int):
    seeds = []

    def remember(drawn: int) -> torch.Tensor:
        seeds.append(drawn)
        return cpu(drawn)

    def theirs(*spawn_key: int) -> int:
        sequence = np.random.SeedSequence(seed, spawn_key=spawn_key, pool_size=24)
        return int(sequence.generate_state(1)[0])

    end = 2.0**15  # so deep, near the right end, that places have more than 32 bits
    BrownianTree(seed, (0.0, end), remember).noise([(end - 1.5e-6, 0.0)])
    places = [(2**depth - 1, depth) for depth in range(len(seeds) - 1)]
    assert len(places) > 33
    assert seeds == [theirs(), *(theirs(*place) for place in places)]


def test_the_noise_has_variance_1_and_follows_the_source():
    tree = BrownianTree(5, (0.03, 14.6), lambda seed: Philox(seed).randn((4, 64, 64)))
    (noise,) = tree.noise([(2.0, 1.5)])
    assert float(noise.std()) == pytest.approx(1, abs=0.02)
    settings = Noise("NV", seed_delta=31337)
    made = make_schedule("dpmpp_2m_sde", 5, alphas_cumprod(), "epsilon").brownian
    drawn = []
    for each in (settings, Noise("NV"), Noise("CPU")):
        stream = NoiseStream(5, SHAPE, each, factor=8, draws=4, brownian=made)
        stream.first()
        drawn.append(torch.empty(SHAPE))
        stream.fill(drawn[-1])
    assert torch.equal(drawn[0], drawn[1]), (
        "the delta is not of this noise, there either"
    )
    assert not torch.equal(drawn[1], drawn[2])
