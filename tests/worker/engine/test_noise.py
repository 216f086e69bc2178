import dataclasses

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from drawing import difference, draw, make_request
from imagefleet.job import samplers
from imagefleet.job.noise import Noise
from worker.engine.sampler import NoiseStream
from worker.engine.samplers.philox import Philox

NV = Noise("NV")

SHAPE = (4, 8, 8)


def stream(
    seed: int, settings: Noise, *, shape: tuple[int, int, int] = SHAPE, draws: int = 3
) -> NoiseStream:
    return NoiseStream(seed, shape, settings, factor=8, draws=draws)


def drawn(noise: NoiseStream, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    out = torch.empty(shape)
    noise.fill(out)
    return out


def test_nv_noise_is_that_of_torch_on_an_nvidia_gpu():
    """The first numbers of seed 0, as torch prints them on a GPU."""
    known = [
        [-0.92466259, -0.42534415, -2.6438457, 0.14518388],
        [-0.12086647, -0.57972564, -0.62285122, -0.32838709],
        [-1.07454231, -0.36314407, -1.67105067, 2.26550497],
    ]
    found = Philox(0).randn((3, 2, 2)).reshape(3, 4)
    torch.testing.assert_close(found, torch.tensor(known), rtol=0, atol=5e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", [0, 1234567, 2**32 - 1])
def test_nv_noise_is_that_of_this_gpu(seed: int):
    generator = torch.Generator("cuda").manual_seed(seed)
    ours = Philox(seed)
    for _ in range(3):
        theirs = torch.randn((4, 64, 64), generator=generator, device="cuda").cpu()
        difference = (ours.randn((4, 64, 64)) - theirs).abs()
        # The GPU rounds to float32 on the way, which matters most near 0.
        assert difference.mean() < 1e-6
        assert difference.max() < 1e-3


def test_the_gpus_noise_is_the_same_as_nv():
    ours = stream(3, Noise("GPU"))
    theirs = stream(3, NV)
    assert torch.equal(ours.first(), theirs.first())
    assert torch.equal(drawn(ours), drawn(theirs))


def test_each_draw_comes_from_new_counters_and_none_is_left_out():
    """Noise that is drawn ahead is that which would be drawn next."""
    generator = Philox(9)
    wanted = [generator.randn(SHAPE) for _ in range(13)]
    for draws in (0, 2, 10, 12):
        noise = stream(9, NV, draws=draws)
        found = [noise.first(), *(drawn(noise) for _ in range(12))]
        for ours, expected in zip(found, wanted, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("source", ["CPU", "NV"])
def test_the_seeds_delta_changes_all_noise_but_the_first(source):
    plain = stream(10, Noise(source))
    moved = stream(10, Noise(source, seed_delta=31337))
    assert torch.equal(plain.first(), moved.first())
    assert torch.equal(drawn(moved), stream(10 + 31337, Noise(source)).first())
    assert not torch.equal(drawn(plain), drawn(moved))


@pytest.mark.parametrize("source", ["CPU", "NV"])
def test_a_negative_delta_beyond_zero_draws(source):
    noise = stream(1, Noise(source, seed_delta=-5))
    noise.first()
    assert drawn(noise).isfinite().all()


def slerp(strength: float, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Shoemake's formula for each column of each channel."""
    angle = F.cosine_similarity(low, high, dim=1).unsqueeze(1).double().acos()
    one, other = ((share * angle).sin() for share in (1 - strength, strength))
    return ((one * low + other * high) / angle.sin()).float()


@pytest.mark.parametrize("strength", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("source", ["CPU", "NV"])
def test_a_variation_lies_between_both_seeds_noise(source, strength: float):
    low, high = (stream(seed, Noise(source)).first() for seed in (1, 2))
    varied = stream(1, Noise(source, subseed=2, subseed_strength=strength))
    torch.testing.assert_close(
        varied.first(), slerp(strength, low, high), rtol=0, atol=2e-6
    )
    plain = stream(1, Noise(source))
    plain.first()
    assert torch.equal(drawn(varied), drawn(plain))


def test_a_variation_of_a_seed_by_itself_changes_nothing():
    low = stream(1, Noise()).first()
    same = stream(1, Noise(subseed=1, subseed_strength=0.4)).first()
    torch.testing.assert_close(same, low)


@pytest.mark.parametrize("source", ["CPU", "NV"])
def test_a_smaller_images_noise_is_put_into_the_middle(source):
    small = stream(4, Noise(source), shape=(4, 4, 6)).first()
    plain = stream(4, Noise(source)).first()
    settings = Noise(source, resize_from=(48, 32))
    found = stream(4, settings).first()
    assert torch.equal(found[:, 2:6, 1:7], small)
    found[:, 2:6, 1:7] = plain[:, 2:6, 1:7]
    assert torch.equal(found, plain)


def test_a_larger_images_noise_is_cut_off():
    large = stream(4, Noise(), shape=(4, 11, 8)).first()
    noise = stream(4, Noise(resize_from=(64, 88))).first()
    # 11 rows into 8: AUTOMATIC1111 rounds the excess up, and its last rows stay as they are.
    assert torch.equal(noise[:, :7], large[:, 2:9])
    assert torch.equal(noise[:, 7:], stream(4, Noise()).first()[:, 7:])


OTHERS = [
    {"noise": Noise("NV")},
    {"noise": Noise("CPU", seed_delta=7)},
    {"noise": Noise("NV", seed_delta=7)},
    {"noise": Noise("CPU", subseed=4, subseed_strength=0.3)},
    {"noise": Noise("CPU", resize_from=(128, 64))},
    {"sampler_options": samplers.Options(eta=0.5)},
    {"sampler_options": samplers.Options(s_min_uncond=15.0)},
    {"sampler": "euler", "sampler_options": samplers.Options(s_churn=3.0)},
    {"sampler": "ddim", "steps": 3, "sampler_options": samplers.Options(eta=1.0)},
    {"sampler": "dpmpp_2m_sde", "steps": 11},
]


@pytest.mark.slow
def test_every_option_changes_the_image_and_none_depends_on_its_company(
    slot_engine, engine
):
    plain = make_request(seed=3, steps=2)
    requests = [plain, *(dataclasses.replace(plain, **changes) for changes in OTHERS)]
    together = draw(slot_engine, *requests)
    assert len({image.tobytes() for image in together}) == len(requests)
    for request, image in zip(requests, together, strict=True):
        (alone,) = draw(engine, request)
        assert difference(alone, image) <= 2, request


def test_a_seed_of_64_bits_is_another_image_but_on_the_cpu():
    """Philox has keys of 64 bits; mt19937 takes the seed modulo 2**32."""
    large = 8834915829939807712
    for source, is_same in (("NV", False), ("GPU", False), ("CPU", True)):
        noises = (stream(each, Noise(source)) for each in (large, large % 2**32))
        one, other = (noise.first() for noise in noises)
        assert torch.equal(one, other) == is_same
