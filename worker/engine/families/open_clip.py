"""OpenCLIP's text encoders, of SD2 and SDXL: the keys of single files in transformers' names.

They share CLIP's tokenizer, but fill a chunk with the token 0 where CLIP repeats the end.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from worker.engine.families.family import Weights

#: What fills a chunk; in transformers' tokenizers the token "!".
PADDING = 0

_NAMES = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_PRODUCTS = re.compile(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def read(weights: Weights, config: Any) -> dict[str, torch.Tensor]:
    """The weights of the layers that *config* has: SD2 leaves out the last one."""
    found: dict[str, torch.Tensor] = {}
    for key, weight in weights.items():
        if name := _NAMES.get(key):
            found[name] = weight
        elif key == "text_projection":
            found["text_projection.weight"] = weight.T.contiguous()
        elif match := _PRODUCTS.fullmatch(key):
            layer, kind = match.groups()
            for part, each in zip("qkv", weight.chunk(3), strict=True):
                found[f"encoder.layers.{layer}.self_attn.{part}_proj.{kind}"] = each
        elif (match := _LAYER.fullmatch(key)) and match[2] in _PARTS:
            found[f"encoder.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"] = weight
    last = f"encoder.layers.{config.num_hidden_layers}."
    return {key: weight for key, weight in found.items() if not key.startswith(last)}
