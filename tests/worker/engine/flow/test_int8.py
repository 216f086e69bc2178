"""Weights in int8: half of the memory, LoRAs exact beside them, nothing merged into them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drawing import ROUNDING, assert_alike, difference, draw, draw_alone
from imagefleet import errors
from worker.engine import contract, load
from worker.engine.networks import int8

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(klein) -> Any:
    made = load.load_engine(
        load.EngineSettings(klein(), "cpu", precision="int8", slots=3)
    )
    yield made
    made.close()


def lora(path: Path, seed: int, **tensors: torch.Tensor) -> contract.Lora:
    generator = torch.Generator().manual_seed(seed)
    key = "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"
    found = tensors or {
        "lora_A.weight": torch.randn(4, 32, generator=generator),
        "lora_B.weight": torch.randn(288, 4, generator=generator) / 4,
    }
    save_file({f"{key}.{name}": each for name, each in found.items()}, path)
    return contract.Lora(path.stem, path, 1.0, 1.0)


def test_images_are_near_those_of_whole_weights(engine, make_engine, request_of):
    request = request_of(steps=4)
    drawn, expected = (
        draw(each, request)[0] for each in (engine, make_engine(slots=3))
    )
    assert 0 < difference(drawn, expected) < 32
    weights = dict(engine.checkpoint.unet.named_parameters())
    kinds = {
        path.removesuffix(".weight")
        for path, weight in weights.items()
        if weight.dtype == torch.int8
    }
    assert len(kinds) == 2 * (8 + 2) + 2
    assert not any(path.endswith(("linear_out", "proj_out")) for path in kinds)
    assert engine.self_check.find_fault() is None


def test_loras_of_their_own_and_of_all_slots_stay_beside_the_weights(
    engine, request_of, tmp_path
):
    one, other = (lora(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2))
    unlike = [request_of(seed=1, loras=(each,)) for each in (one, other)]
    unlike.append(request_of(seed=1))
    together = draw(engine, *unlike)
    assert_alike(together, draw_alone(engine, unlike))
    alike = draw(engine, *[unlike[0]] * 3)
    assert engine.weight_mode == "per_slot_convolutions"
    assert difference(alike[0], together[0]) <= ROUNDING
    assert difference(together[0], together[2]) > ROUNDING
    assert engine.self_check.find_fault() is None


def test_what_would_be_merged_is_refused(engine, request_of, tmp_path):
    whole = lora(tmp_path / "whole.safetensors", 1, diff=torch.ones(288, 32))
    with pytest.raises(errors.JobError, match="holds them in int8"):
        engine.prepare(request_of(loras=(whole,)))


def test_rounding_is_half_of_a_step_of_each_output():
    layer = torch.nn.Linear(64, 8, bias=False)
    exact = layer.weight.detach().clone()
    exact[3] *= 100
    layer.weight.data = exact.clone()
    int8.quantise(torch.nn.ModuleDict({"a": layer}), "a")
    (scales,) = [int8.scales_of([layer])]
    assert scales is not None
    error = (layer.weight.float() * scales - exact).abs()
    assert (error <= 0.51 * scales + exact.abs() * 2**-8).all()


def test_int8_is_for_transformers_alone(checkpoint: Path):
    with pytest.raises(errors.SetupError, match=r"int8 is for FLUX\.2-klein alone"):
        load.load_engine(load.EngineSettings(checkpoint, "cpu", precision="int8"))
