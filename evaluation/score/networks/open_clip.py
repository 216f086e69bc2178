"""A CLIP model as open_clip saves it, read as transformers' model of the same maths."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPModel

from imagefleet import errors, validation
from imagefleet.job import clip
from worker.engine.families.table import OPEN_CLIP_PADDING

WEIGHTS = "open_clip_model.safetensors"
_CONFIG = "open_clip_config.json"

#: Of the images' encoder, without `visual.`; its layers have the names of the texts' encoder.
_VISION = {
    "class_embedding": "embeddings.class_embedding",
    "conv1.weight": "embeddings.patch_embedding.weight",
    **{f"ln_pre.{kind}": f"pre_layrnorm.{kind}" for kind in ("weight", "bias")},
    **{f"ln_post.{kind}": f"post_layernorm.{kind}" for kind in ("weight", "bias")},
}

_START, _END = clip.VOCABULARY_SIZE - 2, clip.VOCABULARY_SIZE - 1

_Size = Annotated[int, Field(ge=1, le=16_384)]


class _Stated(BaseModel):
    """Anything else that a file states would be another network."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class _Vision(_Stated):
    image_size: _Size = 224
    patch_size: _Size = 16
    layers: _Size = 12
    width: _Size = 768
    head_width: _Size = 64
    mlp_ratio: float = 4.0


class _Text(_Stated):
    context_length: _Size = 77
    vocab_size: Literal[49_408] = 49_408
    width: _Size = 512
    heads: _Size = 8
    layers: _Size = 12
    mlp_ratio: float = 4.0


class _Model(_Stated):
    embed_dim: _Size
    vision_cfg: _Vision
    text_cfg: _Text
    quick_gelu: bool = False


class Preprocessing(_Stated):
    """What is done to an image; out of 1."""

    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    interpolation: Literal["bicubic"] = "bicubic"
    resize_mode: Literal["shortest"] = "shortest"


class _File(_Stated):
    model_cfg: _Model
    preprocess_cfg: Preprocessing = Preprocessing()


def load(folder: Path) -> tuple[Any, Preprocessing]:
    """The model with its weights, and what it takes; raises SetupError if it is no CLIP."""
    try:
        stated = _File.model_validate(
            json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        )
    except ValidationError as error:
        raise errors.SetupError(
            f"{folder / _CONFIG}: {validation.sentence(error)}; of open_clip's models, those with"
            " CLIP's two transformers can be read"
        ) from None
    model: Any = CLIPModel(_configuration(stated.model_cfg))
    model.load_state_dict(_converted(load_file(folder / WEIGHTS), model.config))
    return model, stated.preprocess_cfg


def _configuration(stated: _Model) -> CLIPConfig:
    vision, text = stated.vision_cfg, stated.text_cfg
    activation = {"hidden_act": "quick_gelu" if stated.quick_gelu else "gelu"}
    return CLIPConfig(
        projection_dim=stated.embed_dim,
        vision_config={
            "hidden_size": vision.width,
            "intermediate_size": int(vision.width * vision.mlp_ratio),
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.width // vision.head_width,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            **activation,
        },
        text_config={
            "hidden_size": text.width,
            "intermediate_size": int(text.width * text.mlp_ratio),
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context_length,
            "bos_token_id": _START,
            "eos_token_id": _END,  # its state is that of the text
            "pad_token_id": OPEN_CLIP_PADDING,
            **activation,
        },
    )


def _converted(
    weights: dict[str, torch.Tensor], configuration: Any
) -> dict[str, torch.Tensor]:
    """The weights in transformers' names; unknown ones are left for it to refuse."""
    visual = {
        key.removeprefix("visual."): weight
        for key, weight in weights.items()
        if key.startswith("visual.")
    }
    found = {
        "logit_scale": weights["logit_scale"],
        "visual_projection.weight": visual["proj"].T,
        **{f"vision_model.{name}": visual[key] for key, name in _VISION.items()},
    }
    for name, weight in _in_transformers_names(
        visual, configuration.vision_config
    ).items():
        found[name.replace("text_model.", "vision_model.")] = weight
    return found | _in_transformers_names(weights, configuration.text_config)


def _in_transformers_names(
    weights: dict[str, torch.Tensor], configuration: Any
) -> dict[str, torch.Tensor]:
    of = SimpleNamespace(config=configuration)
    found: dict[str, torch.Tensor] = convert_open_clip_checkpoint(
        of, weights, prefix=""
    )
    return found
