"""SDXL's ticks compile to one graph a mode; a larger rank drops that of convolutions alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from drawing import assert_alike, draw, draw_alone, make_request
from families import lora_kinds
from packages import TracedPackages
from worker.engine import checkpoint as checkpoints
from worker.engine import contract
from worker.engine.contract import Settings
from worker.engine.families.latents import of_latents
from worker.engine.slots import engine as slot_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_model(family_folder, tmp_path_factory) -> Path:
    """A tiny SDXL with fewer blocks, each of which takes seconds to trace."""
    folder = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(family_folder("sdxl"), folder)
    config = UNet2DConditionModel.load_config(folder / "unet")
    for part in ("unet", "vae"):
        shutil.rmtree(folder / part)
    blocks = {
        "block_out_channels": (32, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": (2, 2),
        "layers_per_block": 1,
    }
    unet = UNet2DConditionModel.from_config({**config, **blocks})
    unet.save_pretrained(folder / "unet")
    vae = AutoencoderKL(
        block_out_channels=(16,),
        layers_per_block=0,
        norm_num_groups=8,
        scaling_factor=0.13025,
    )
    vae.save_pretrained(folder / "vae")
    return folder


def test_a_larger_rank_drops_the_graph_of_convolutions_alone(
    small_model: Path, tmp_path
):
    def load(**settings: Any) -> slot_engine.SlotEngine:
        loaded = checkpoints.load_checkpoint(
            small_model, torch.device("cpu"), torch.float32
        )
        return slot_engine.SlotEngine(of_latents(loaded, Settings(slots=2, **settings)))

    engine = load(packages=TracedPackages(), compiled_modes=("shared",))
    plain = load()
    requests = []
    for rank in (4, 8, 40):
        (name,) = lora_kinds.build(
            tmp_path, small_model, 1, torch.device("cpu"), rank=rank, kind="locon"
        )
        lora = contract.Lora(name, tmp_path / f"{name}.safetensors", 0.2, 0.2)
        requests.append(
            make_request(loras=(lora,), steps=2, seed=rank, width=8, height=8)
        )
    small = requests[:2]
    large = [requests[2], make_request(steps=2, width=8, height=8)]
    draw(engine, *small)
    engine.warm_up()
    (step,) = engine._runner._compiled.values()
    modes = ("shared", "per_slot_convolutions")
    assert set(step.compiled) == set(modes)
    kept = {modes[0]: step.compiled[modes[0]]}
    for pair in (small, large, large):
        assert_alike(draw(engine, *pair), draw_alone(plain, pair))
        assert (modes[1] in step.compiled) == (pair is small)
    assert step.compiled == kept
