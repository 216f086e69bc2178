from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.engine import decoder

SMALL, LARGE = torch.Size((4, 2, 2)), torch.Size((4, 2, 4))


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that are decoded."""
    seen: list[tuple[int, ...]] = []

    def decode(_vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(latents.shape))
        return torch.zeros(len(latents), 2, 2, 3, dtype=torch.uint8), torch.ones(
            len(latents)
        ).bool()

    monkeypatch.setattr(decoder, "decode", decode)
    return seen


def make_decoder(*compiled: torch.Size) -> decoder.Decoder:
    made = decoder.Decoder(SimpleNamespace(device="cpu"), 8)  # type: ignore[arg-type]
    made.max_images = 2
    for shape in compiled:
        latents = torch.zeros(2, *shape)
        made._compiled[shape] = (latents, lambda latents=latents: decoder.decode(None, latents))  # type: ignore[assignment]
    return made


def test_a_full_slice_does_not_wait_for_one_of_another_size(slices: Any) -> None:
    waiting = make_decoder(SMALL, LARGE)
    for ticket, shape in enumerate([SMALL, LARGE, LARGE]):
        waiting.add(ticket, torch.zeros(shape))
    waiting.run(flush=False)
    assert slices == [(2, *LARGE)]
    waiting.run(flush=True)
    assert slices == [(2, *LARGE), (2, *SMALL)]
    assert [each.ticket for each in waiting.collect(wait=True)] == [1, 2, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_part_of_a_slice_waits_longer_where_lanes_take_turns(slices: Any, lanes: int) -> None:
    waiting = make_decoder(SMALL)
    waiting.add(0, torch.zeros(SMALL))
    ticks = 0
    while not slices:
        waiting.run(flush=False, lanes=lanes)
        ticks += 1
    assert ticks == 8 * lanes
