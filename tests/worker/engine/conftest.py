"""A tiny checkpoint of SD1.5's shape, engines on it, and ways to draw with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import batch_engine
from fleet.bench import tiny_model
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, device, load
from worker.engine.slots import engine as slots

#: Few steps and the smallest size: a picture takes some 30 ms.
_REQUEST = contract.ImageRequest(
    prompt="a photo of a jump rope",
    negative_prompt="blurry",
    loras=(),
    sampler="euler_ancestral",
    steps=4,
    cfg_scale=7.0,
    seed=1,
    width=64,
    height=64,
)

DEMO_MODEL = Path(__file__).parents[3] / "demo_model"

MakeRequest = Callable[..., contract.ImageRequest]
MakeEngine = Callable[..., batch_engine.BatchEngine]
Draw = Callable[..., list[contract.Outcome]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With two threads on a machine whose cores are all busy, each waits for the other: 5x slower.
    torch.set_num_threads(1)
    return tiny_model.build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def lora_paths(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("loras")
    return [
        tiny_model.build_tiny_lora(folder / f"style-{seed}.safetensors", checkpoint, seed=seed)
        for seed in range(3)
    ]


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> batch_engine.BatchEngine:
    """Shared by tests that leave it as they found it."""
    return batch_engine.load_batch_engine(checkpoint, max_batch=4)


@pytest.fixture(scope="session")
def demo_engine() -> batch_engine.BatchEngine:
    """On the model that has learnt to draw; shared by tests that leave it as they found it."""
    torch.set_num_threads(1)
    return batch_engine.load_batch_engine(DEMO_MODEL)


@pytest.fixture(scope="session")
def demo_lora() -> Callable[[str, float, float], contract.Lora]:
    """A LoRA of the demo model, by name and its strengths on the text encoder and the UNet."""

    def use(name: str, text_encoder: float, unet: float) -> contract.Lora:
        path = DEMO_MODEL / "loras" / f"{name}.safetensors"
        return contract.Lora(name, path, text_encoder, unet)

    return use


@pytest.fixture(scope="session")
def slot_engine(checkpoint: Path) -> slots.SlotEngine:
    """Shared by tests that leave it as they found it."""
    return load.load_engine(checkpoint, "cpu", slots=3)


@pytest.fixture
def make_slot_engine(checkpoint: Path) -> Iterator[Callable[..., slots.SlotEngine]]:
    made = []

    def make(precision: device.Precision = "auto", **settings: Any) -> slots.SlotEngine:
        cpu = torch.device("cpu")
        loaded = checkpoints.load_checkpoint(checkpoint, cpu, device.find_dtype(precision, cpu))
        made.append(slots.SlotEngine(loaded, **{"slots": 3, **settings}))
        return made[-1]

    yield make
    for loaded in made:
        loaded.close()


@pytest.fixture
def make_engine(checkpoint: Path) -> Iterator[MakeEngine]:
    made = []

    def make(**settings: Any) -> batch_engine.BatchEngine:
        made.append(batch_engine.load_batch_engine(checkpoint, **{"max_batch": 4, **settings}))
        return made[-1]

    yield make
    for loaded in made:
        loaded.close()


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    def make(**changes: Any) -> contract.ImageRequest:
        return dataclasses.replace(_REQUEST, **changes)

    return make


@pytest.fixture(scope="session")
def draw() -> Draw:
    """Sends requests through an engine as the pipeline does; outcomes in the requests' order."""

    def run(engine: contract.Engine, *requests: contract.ImageRequest) -> list[contract.Outcome]:
        waiting = list(enumerate(requests))
        outcomes: dict[int, contract.Outcome] = {}
        while waiting or engine.busy:
            while waiting and engine.free:
                ticket, request = waiting.pop(0)
                engine.admit(ticket, engine.prepare(request))
            for finished in engine.tick():
                assert finished.ticket not in outcomes
                outcomes[finished.ticket] = finished.outcome
        return [outcomes[ticket] for ticket in range(len(requests))]

    return run


@pytest.fixture(scope="session")
def single_file(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny checkpoint as one file in the layout of SD1.5's original release."""
    path = tmp_path_factory.mktemp("single") / "tiny.safetensors"
    weights = {
        **_renamed(checkpoint / "unet", "model.diffusion_model.", _unet_names()),
        **_renamed(checkpoint / "vae", "first_stage_model.", _vae_names()),
        **_renamed(checkpoint / "text_encoder", "cond_stage_model.transformer.text_model.", {}),
    }
    save_file(weights, path)
    return path


def _renamed(folder: Path, prefix: str, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """A network's weights, the start of each name replaced by the first of *names* that fits."""
    (file,) = folder.glob("*.safetensors")
    renamed = {}
    for key, weight in load_file(file).items():
        bare = key.removeprefix("text_model.")
        start = next((name for name in names if bare.startswith(name)), "")
        renamed[prefix + names.get(start, "") + bare.removeprefix(start)] = weight
    return renamed


_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def _unet_names() -> dict[str, str]:
    """Diffusers' names to the original ones, for four blocks of one layer each."""
    places = {"mid_block.resnets.0": "middle_block.0", "mid_block.resnets.1": "middle_block.2"}
    names = {
        "time_embedding.linear_1.": "time_embed.0.",
        "time_embedding.linear_2.": "time_embed.2.",
        "conv_in.": "input_blocks.0.0.",
        "conv_norm_out.": "out.0.",
        "conv_out.": "out.2.",
        "mid_block.attentions.0.": "middle_block.1.",
    }
    for block in range(4):
        down, up = 1 + 2 * block, 2 * block
        places[f"down_blocks.{block}.resnets.0"] = f"input_blocks.{down}.0"
        names[f"down_blocks.{block}.attentions.0."] = f"input_blocks.{down}.1."
        names[f"down_blocks.{block}.downsamplers.0.conv."] = f"input_blocks.{down + 1}.0.op."
        for layer in range(2):
            places[f"up_blocks.{block}.resnets.{layer}"] = f"output_blocks.{up + layer}.0"
            names[f"up_blocks.{block}.attentions.{layer}."] = f"output_blocks.{up + layer}.1."
        # The first up block has no attention, so its upsampler comes right after the resnet.
        names[f"up_blocks.{block}.upsamplers.0."] = (
            f"output_blocks.{up + 1}.{1 if block == 0 else 2}."
        )
    for place, original in places.items():
        for part, original_part in _RESNET.items():
            names[f"{place}.{part}."] = f"{original}.{original_part}."
    return names


def _vae_names() -> dict[str, str]:
    names = {
        "encoder.conv_norm_out.": "encoder.norm_out.",
        "decoder.conv_norm_out.": "decoder.norm_out.",
    }
    attention = {
        "group_norm": "norm",
        "to_q": "q",
        "to_k": "k",
        "to_v": "v",
        "to_out.0": "proj_out",
    }
    places = {}
    for half in ("encoder", "decoder"):
        for part, original in attention.items():
            names[f"{half}.mid_block.attentions.0.{part}."] = f"{half}.mid.attn_1.{original}."
        for layer in range(2):
            places[f"{half}.mid_block.resnets.{layer}."] = f"{half}.mid.block_{layer + 1}."
    for block in range(4):
        places[f"encoder.down_blocks.{block}.resnets.0."] = f"encoder.down.{block}.block.0."
        names[f"encoder.down_blocks.{block}.downsamplers.0."] = f"encoder.down.{block}.downsample."
        for layer in range(2):
            places[f"decoder.up_blocks.{block}.resnets.{layer}."] = (
                f"decoder.up.{3 - block}.block.{layer}."
            )
        names[f"decoder.up_blocks.{block}.upsamplers.0."] = f"decoder.up.{3 - block}.upsample."
    for place, original in places.items():
        names[f"{place}conv_shortcut."] = f"{original}nin_shortcut."
        names[place] = original
    return names


@pytest.fixture(scope="session")
def difference() -> Callable[[object, object], int]:
    """The largest difference of two images in any channel of any pixel, of 255."""

    def largest(one: object, other: object) -> int:
        assert isinstance(one, np.ndarray), one
        assert isinstance(other, np.ndarray), other
        assert one.shape == other.shape
        return int(np.abs(one.astype(int) - other.astype(int)).max())

    return largest


_PEFT_SIDES = {"down": "A", "up": "B"}


@pytest.fixture(scope="session")
def respell() -> Callable[[Path, Path, str], tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """A kohya LoRA of one alpha, for the model in a folder, in another spelling; and its header."""

    def respelt(
        path: Path, model: Path, spelling: str
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        layers = _kohya_names(model)
        alphas, renamed = set(), {}
        for key, weight in load_file(path).items():
            flat, part = key.split(".", 1)
            if part == "alpha":
                alphas.add(weight.item())
                continue
            network, name = layers[flat]
            side = "down" if "down" in part else "up"
            if spelling == "peft":
                new = f"base_model.model.{network}.{name}.lora_{_PEFT_SIDES[side]}.weight"
            elif spelling == "diffusers":
                new = f"{network}.{name}.lora.{side}.weight"
            elif name.endswith(("to_q", "to_k", "to_v", "to_out.0")):
                parent, leaf = name.removesuffix(".0").rsplit(".", 1)
                new = f"{network}.{parent}.processor.{leaf}_lora.{side}.weight"
            elif network == "text_encoder":
                new = f"{network}.{name}.lora_linear_layer.{side}.weight"
            else:
                new = f"{network}.{name}.lora.{side}.weight"
            renamed[new] = weight
        (alpha,) = alphas
        config = {"unet.lora_alpha": alpha, "text_encoder.lora_alpha": alpha}
        return renamed, {"format": "pt", "lora_adapter_metadata": json.dumps(config)}

    return respelt


def _kohya_names(model: Path) -> dict[str, tuple[str, str]]:
    names = {}
    for network, prefix, level in (
        ("unet", "lora_unet_", ""),
        ("text_encoder", "lora_te_text_model_", "text_model."),
    ):
        (weights,) = (model / network).glob("*.safetensors")
        with safe_open(weights, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                path = key.removesuffix(".weight").removeprefix("text_model.")
                names[prefix + path.replace(".", "_")] = (network, level + path)
    return names
