import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from worker.engine import decoder
from worker.engine.kernels.graph import Graph
from worker.engine.passes.images import ImageCoder

VAE: Any = object()
TINY: Any = object()
SMALL = torch.Size((4, 2, 2))
LARGE = torch.Size((4, 2, 4))


@pytest.fixture
def slices(monkeypatch) -> list[tuple[Any, ...]]:
    """The shapes that are decoded, told apart if by the VAE."""
    seen = []

    def decode(
        vae: Any, latents: torch.Tensor, *, in_stripes: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not in_stripes
        seen.append((*latents.shape, "VAE") if vae is VAE else tuple(latents.shape))
        return torch.zeros(len(latents), 2, 2, 3, dtype=torch.uint8), torch.ones(
            len(latents)
        ).bool()

    monkeypatch.setattr(decoder, "decode", decode)
    return seen


def make_decoder(*compiled: torch.Size) -> decoder.Decoder:
    made = decoder.Decoder(VAE, 8, TINY)
    made.max_images = 2
    for vae, shape in itertools.product((VAE, TINY), compiled):
        latents = torch.zeros(2, *shape)
        run = functools.partial(decoder.decode, vae, latents)
        made._compiled[vae, shape] = (latents, run)  # type: ignore[assignment]
    return made


def test_a_full_slice_does_not_wait_for_one_of_another_size(slices):
    waiting = make_decoder(SMALL, LARGE)
    for ticket, shape in enumerate([SMALL, LARGE, LARGE]):
        waiting.add(ticket, torch.zeros(shape))
    waiting.run(flush=False)
    assert slices == [(2, *LARGE)]
    waiting.run(flush=True)
    assert slices == [(2, *LARGE), (2, *SMALL)]
    assert [each.ticket for each in waiting.collect(wait=True)] == [1, 2, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_part_of_a_slice_waits_longer_where_lanes_take_turns(slices, lanes: int):
    waiting = make_decoder(SMALL)
    waiting.add(0, torch.zeros(SMALL))
    ticks = 0
    while not slices:
        waiting.run(flush=False, lanes=lanes)
        ticks += 1
    assert ticks == 8 * lanes


def test_a_slice_is_of_one_decoder(slices):
    waiting = make_decoder(SMALL)
    by = (None, "Full", "TAESD", "Full", "Full")
    for ticket, each in enumerate(by):
        waiting.add(ticket, torch.zeros(SMALL), each)
    waiting.run(flush=False)
    assert slices == [(2, *SMALL), (2, *SMALL, "VAE")]
    waiting.run(flush=True)
    assert [each.ticket for each in waiting.collect(wait=True)] == [0, 2, 1, 3, 4]


def test_what_fails_once_it_is_compiled_is_decoded_uncompiled_from_then_on(slices):
    made = make_decoder(SMALL)
    assert made.uncompiled(SMALL) == []

    def fail() -> None:
        raise RuntimeError("an illegal instruction")

    graph = Graph("the VAE", "vae", fail, (), None)
    made._compiled[TINY, SMALL] = torch.zeros(2, *SMALL), graph
    for ticket in range(2):
        made.add(ticket, torch.zeros(SMALL))
    made.run(flush=True)
    assert slices == [(1, *SMALL)] * 2
    assert len(made.collect(wait=True)) == 2
    assert made.uncompiled(SMALL) == []


def test_a_vae_with_a_shift_encodes_and_decodes_as_diffusers_does():
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, shift_factor=0.25)
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        mean = vae.encode(images).latent_dist.mean
        latents = (mean - 0.25) * vae.config.scaling_factor
        torch.testing.assert_close(ImageCoder(vae).encode(pixels), latents[0])
        decoded = vae.decode(mean).sample
        torch.testing.assert_close(decoder.to_images(vae, latents), decoded)
