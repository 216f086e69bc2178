"""Safetensors files as far as their headers go: the names that tell what a file is, no weights."""

import json
import math

#: Tensors that tell a Stable Diffusion 1.x checkpoint.
SD1 = (
    "model.diffusion_model.input_blocks.0.0.weight",
    "cond_stage_model.transformer.text_model.final_layer_norm.weight",
    "first_stage_model.decoder.conv_in.weight",
)
LAYER = "lora_te_text_model_encoder_layers_0_mlp_fc1"
LORA = (f"{LAYER}.alpha",)
REFINER = (
    "conditioner.embedders.0.model.positional_embedding",
    "model.diffusion_model.input_blocks.0.0.weight",
    "first_stage_model.x",
)


def file_of(*names: str, data: bytes = b"", **metadata: str) -> bytes:
    """A file with tensors of these names, by default a checkpoint's; the first has the data.

    In the keys of the metadata, `__` stands for a dot.
    """
    names = names or SD1
    none = {"dtype": "U8", "shape": [0], "data_offsets": [len(data)] * 2}
    first = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    stated = {key.replace("__", "."): value for key, value in metadata.items()}
    header = json.dumps(
        {"__metadata__": stated, **dict.fromkeys(names, none), names[0]: first}
    )
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def shaped(**shapes: list[int]) -> bytes:
    """A file with tensors of these names and shapes, of zeros."""
    entries = {}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape)
        entries[name] = {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(at)


def lora_of(*names: str) -> bytes:
    """A LoRA of rank 1 for SD 1.x, with tensors of other *names* besides, which are skipped."""
    factors = {
        f"{LAYER}.lora_down.weight": [1, 768],
        f"{LAYER}.lora_up.weight": [3072, 1],
    }
    return shaped(**factors, **{name: [1] for name in names})
