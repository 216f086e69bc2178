"""The family of a checkpoint, by what its files contain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from worker.engine.families.family import Family
from worker.engine.families.sd1 import SD1
from worker.engine.families.sd2 import SD2
from worker.engine.families.sdxl import SDXL
from worker.engine.families.x4_upscaler import X4_UPSCALER

#: Families of single files, told by their text encoders; the x4 upscaler has SD2's.
FAMILIES = (SD1, SD2, SDXL)

#: A tensor of a single file whose UNet knows levels of noise on an image.
_LEVELS = "model.diffusion_model.label_emb.weight"


def of_file(keys: Iterable[str]) -> Family | None:
    """The family of a single file: the one whose text encoders' keys it has."""
    names = list(keys)
    for family in FAMILIES:
        prefixes = [encoder.prefix for encoder in family.text_encoders]
        if all(any(name.startswith(prefix) for name in names) for prefix in prefixes):
            return X4_UPSCALER if family is SD2 and _LEVELS in names else family
    return None


def of_folder(unet: Mapping[str, Any], text_encoder: Mapping[str, Any]) -> Family:
    """The family of a folder in diffusers' format, by these parts' configurations.

    SD2 is told from SD1 by its text encoder: OpenCLIP has another activation than CLIP.
    """
    if unet.get("num_class_embeds") is not None:
        return X4_UPSCALER
    if unet.get("addition_embed_type") is not None:
        return SDXL
    return SD2 if text_encoder.get("hidden_act") == "gelu" else SD1


def pipeline_of(model: Path) -> str:
    """The class of a folder's pipeline by its model_index.json; '' for a file or without one."""
    try:
        index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(index.get("_class_name", "")) if isinstance(index, dict) else ""
