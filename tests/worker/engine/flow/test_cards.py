"""What stays whole on which card, by its free memory and the sizes of the real networks."""

import pytest
import torch
from diffusers import AutoencoderKLFlux2
from torch.nn import Module

from imagefleet.pricing import families
from worker.engine import checkpoint
from worker.engine.flow.families import KLEIN
from worker.engine.slots import memory

pytestmark = pytest.mark.slow

GIB = 2**30
GPU = torch.device("cuda", 0)

#: Of 27 of Qwen3-4B's layers and its words, in bfloat16.
TEXT_BYTES = 6_228_181_504


@pytest.fixture(scope="module")
def networks() -> list[Module]:
    with torch.device("meta"):
        transformer = KLEIN.network.from_config(KLEIN.unet_config)
        return [transformer, AutoencoderKLFlux2()]


def leave(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(gib * GIB))


@pytest.mark.parametrize(
    ("gigabytes", "free", "is_int8"),
    [(8, 7.4, True), (10, 9.5, True), (12, 11.0, False), (16, 15, False)],
)
def test_weights_that_leave_no_room_for_a_tick_are_held_in_int8_and_plan_knows_it(
    monkeypatch, networks: list[Module], gigabytes: int, free: float, is_int8: bool
):
    whole_bytes = checkpoint.weight_bytes(networks, torch.bfloat16)
    assert 7.2 * GIB < whole_bytes < 7.5 * GIB
    leave(monkeypatch, free)
    assert memory.has_no_room_for_weights(GPU, whole_bytes) == is_int8
    assert not memory.has_no_room_for_weights(torch.device("cpu"), whole_bytes)
    klein = families.find("klein")
    assert klein.is_held_in_int8(f"RTX 3060 {gigabytes}GB") == is_int8


@pytest.mark.parametrize(("free", "leaves"), [(23, False), (15, True), (11, True)])
def test_the_text_encoder_stays_on_24_gb_and_leaves_16_and_12_after_each_batch(
    monkeypatch, networks: list[Module], free: float, leaves: bool
):
    whole_bytes = checkpoint.weight_bytes(networks, torch.bfloat16)
    leave(monkeypatch, free - whole_bytes / GIB)
    assert memory.has_no_room_for_text(GPU, TEXT_BYTES, share=0.5) == leaves
