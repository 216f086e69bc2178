"""What stays whole on which card, by its free memory and the sizes of the real networks."""

import pytest
import torch
from diffusers import AutoencoderKLFlux2

from imagefleet.pricing import families
from worker.engine import checkpoint
from worker.engine.flow.families import KLEIN
from worker.engine.slots import memory

pytestmark = pytest.mark.slow

GIB = 2**30
GPU = torch.device("cuda", 0)

#: Of 27 of Qwen3-4B's layers and its words, in bfloat16.
TEXT_BYTES = 6_228_181_504


@pytest.mark.parametrize(
    ("gigabytes", "free", "is_int8", "text_leaves"),
    [
        (8, 7.4, True, True),
        (10, 9.5, True, True),
        (12, 11, False, True),
        (16, 15, False, True),
        (24, 23, False, False),
    ],
)
def test_small_cards_hold_weights_in_int8_as_planned_and_the_text_encoder_leaves(
    monkeypatch, gigabytes: int, free: float, is_int8: bool, text_leaves: bool
):
    with torch.device("meta"):
        transformer = KLEIN.network.from_config(KLEIN.unet_config)
        networks = [transformer, AutoencoderKLFlux2()]
    whole = checkpoint.weight_bytes(networks, torch.bfloat16)
    monkeypatch.setattr(memory, "free_bytes", lambda _: free * GIB)
    assert memory.has_no_room_for_weights(GPU, whole) == is_int8
    klein = families.find("klein")
    assert klein.is_held_in_int8(f"RTX 3060 {gigabytes}GB") == is_int8
    left = memory.has_no_room_for_text(GPU, TEXT_BYTES, whole, share=0.5)
    assert left == text_leaves
