"""A CLIP folder of open_clip has the features that open_clip 3.3.0 computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from evaluation.score.networks import load
from imagefleet import errors

pytestmark = pytest.mark.slow

MODEL = {
    "embed_dim": 12,
    "vision_cfg": {
        "image_size": 28,
        "layers": 2,
        "width": 16,
        "head_width": 8,
        "patch_size": 14,
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 49408,
        "width": 24,
        "heads": 3,
        "layers": 2,
    },
}
PREPROCESSING = {"mean": [0.5] * 3, "std": [0.25] * 3}
TEXTS = ["a red star", "two blue cars in the city"]

Write = Callable[..., Path]


def layers(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """The weights of two layers, and their shapes."""
    shapes = {
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
        "attn.out_proj.weight": (width, width),
        "attn.out_proj.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
        **{
            f"ln_{each}.{kind}": (width,)
            for each in (1, 2)
            for kind in ("weight", "bias")
        },
    }
    return {
        f"{prefix}transformer.resblocks.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in shapes.items()
    }


SHAPES: dict[str, tuple[int, ...]] = {
    "logit_scale": (),
    "positional_embedding": (16, 24),
    "text_projection": (24, 12),
    "token_embedding.weight": (49408, 24),
    **{f"ln_final.{kind}": (24,) for kind in ("weight", "bias")},
    "visual.class_embedding": (16,),
    "visual.conv1.weight": (16, 3, 14, 14),
    "visual.positional_embedding": (5, 16),
    "visual.proj": (16, 12),
    **{
        f"visual.ln_{at}.{kind}": (16,)
        for at in ("pre", "post")
        for kind in ("weight", "bias")
    },
    **layers("", 24),
    **layers("visual.", 16),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a folder whose weights are a formula, with *changes* of the model's configuration."""

    def folder(lost: str = "", **changes: Any) -> Path:
        weights = {}
        for at, (key, shape) in enumerate(sorted(SHAPES.items())):
            numbers = np.arange(int(np.prod(shape)), dtype=np.float64)
            waves = np.sin(numbers * (0.7 + at * 0.013) + at) * 0.3
            weights[key] = torch.from_numpy(waves.astype(np.float32)).reshape(shape)
        weights.pop(lost, None)
        save_file(weights, tmp_path / "open_clip_model.safetensors")
        stated = {"model_cfg": {**MODEL, **changes}, "preprocess_cfg": PREPROCESSING}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(stated))
        return tmp_path

    return folder


def picture() -> Image.Image:
    y, x = np.mgrid[:56, :56]
    channels = [x * 4 % 256, y * 4 % 256, (x + y) % 256]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


@pytest.mark.parametrize(
    ("quick_gelu", "image", "texts"),
    [
        (False, [0.236315, 0.132787, -0.135397], [0.456063, 0.41022]),
        (True, [0.236498, 0.132744, -0.135613], [0.455647, 0.409919]),
    ],
)
def test_features_are_those_of_open_clip(
    quick_gelu: bool, image: list[float], texts: list[float], write: Write
) -> None:
    found = load.load_text_extractor(write(quick_gelu=quick_gelu))
    assert (found.facts.kind, found.facts.dimensions) == ("CLIP", 12)
    assert found.facts.preparation.size == 28
    np.testing.assert_allclose(found.features([picture()])[0, :3], image, atol=2e-6)
    np.testing.assert_allclose(found.text_features(TEXTS)[:, 0], texts, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_cfg": {"timm_model_name": "vit_so400m"}}, "timm_model_name"),
        ({"text_cfg": {"vocab_size": 32000}}, "vocab_size"),
        ({"lost": "visual.ln_pre.bias"}, "ln_pre.bias"),
        ({"lost": "transformer.resblocks.1.ln_1.bias"}, "cannot be read"),
    ],
)
def test_another_network_is_refused_by_name(
    changes: dict[str, Any], reason: str, write: Write
) -> None:
    with pytest.raises(errors.SetupError, match=reason):
        load.load_text_extractor(write(**changes))


def test_a_damaged_file_is_refused(write: Write) -> None:
    folder = write()
    (folder / "open_clip_model.safetensors").write_bytes(b"")
    with pytest.raises(errors.SetupError, match="cannot be read"):
        load.load_text_extractor(folder)
