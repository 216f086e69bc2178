"""LoRAs for SD2 and SDXL, as their trainers write them, draw what diffusers with peft draws."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusers_pipelines import draw_in_diffusers
from drawing import ROUNDING, difference, draw, make_request
from families import lora_kinds
from tiny_model import ADAPTED_SUFFIXES, write_lora_of
from worker.engine import contract
from worker.engine.lora.file import adaptable_layers
from worker.engine.lora.original_names import original_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Specifying.*kwargs is not supported:UserWarning"
    ),
]


def write_lora(path: Path, checkpoint: Any, spelling: str, *, seed: int = 0) -> Path:
    """A random LoRA for all text encoders and the UNet, in kohya's or diffusers' names."""
    unet = adaptable_layers(checkpoint.unet)
    originals = original_names(unet)
    layers = {}
    for name, layer in unet.items():
        if not name.endswith(ADAPTED_SUFFIXES):
            continue
        if spelling == "diffusers":
            layers[f"unet.{name}"] = layer
        else:
            flat = originals[name] if spelling == "original" else name
            layers["lora_unet_" + flat.replace(".", "_")] = layer
    for network, encoder in checkpoint.text_encoders.items():
        number = "2" if network == "text_encoder_2" else "1"
        prefix = (
            f"lora_te{number}_text_model_"
            if len(checkpoint.text_encoders) > 1
            else "lora_te_text_model_"
        )
        for name, layer in adaptable_layers(encoder).items():
            if not name.endswith(ADAPTED_SUFFIXES):
                continue
            short = name.removeprefix("text_model.")
            if spelling == "diffusers":
                layers[f"{network}.text_model.{short}"] = layer
            else:
                layers[prefix + short.replace(".", "_")] = layer
    generator = torch.Generator().manual_seed(seed)
    if spelling != "diffusers":
        write_lora_of(layers, path, 4, 2.0, generator)
        return path
    tensors = {}
    for key, layer in layers.items():
        parts = lora_kinds.MAKERS["lora"](tuple(layer.weight.shape), 4, generator)
        tensors[f"{key}.lora_A.weight"] = parts["lora_down.weight"].contiguous()
        tensors[f"{key}.lora_B.weight"] = parts["lora_up.weight"].contiguous()
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("family", "spelling"),
    [("sd2", "kohya"), ("sdxl", "original"), ("sdxl", "diffusers")],
)
def test_loras_draw_as_in_diffusers_with_peft(
    family: str,
    spelling: str,
    family_engine,
    family_pipeline,
    family_checkpoint,
    tmp_path,
):
    path = write_lora(
        tmp_path / "style.safetensors", family_checkpoint(family), spelling
    )
    engine = family_engine(family)
    pipeline = family_pipeline(family)
    words = {
        "prompt": "a red circle",
        "negative_prompt": "green",
        "seed": 5,
        "steps": 3,
    }
    request = make_request(**words, loras=(contract.Lora("style", path, 0.5, 0.3),))
    image = draw(engine, request)[0]
    pipeline.load_lora_weights(path, adapter_name="style")
    parts = dict.fromkeys(engine.checkpoint.text_encoders, 0.5) | {"unet": 0.3}
    pipeline.set_adapters(["style"], [parts])
    try:
        expected = draw_in_diffusers(pipeline, request)
    finally:
        pipeline.unload_lora_weights()
    assert difference(image, expected) <= ROUNDING
    assert difference(image, draw(engine, make_request(**words))[0]) > 20
    apart = [
        contract.Lora("style", path, *weights) for weights in ((0.5, 0.0), (0.0, 0.3))
    ]
    for each in draw(engine, *(make_request(**words, loras=(one,)) for one in apart)):
        assert difference(image, each) > ROUNDING, "both networks count"
