import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawing import difference, draw
from imagefleet import errors
from klein import tiny_klein
from worker.engine import load
from worker.engine.flow import checkpoint as checkpoints
from worker.engine.lora.original_names import klein_names
from worker.files import check

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]

#: What the makers call a norm's weight, and diffusers' names of the norms.
_NORMS = {
    "norm_q": "img_attn.norm.query_norm",
    "norm_k": "img_attn.norm.key_norm",
    "norm_added_q": "txt_attn.norm.query_norm",
    "norm_added_k": "txt_attn.norm.key_norm",
}


def in_original_names(weights: Tensors) -> Tensors:
    """A transformer's weights in Black Forest Labs' names."""
    paths = [key.removesuffix(".weight") for key in weights]
    found = {}
    for name, members in klein_names(paths).items():
        if "sformer" not in name:
            rows = [weights[f"{member}.weight"] for member in members]
            found[f"{name}.weight"] = torch.cat(rows)
    for path in paths:
        *start, norm = path.split(".")
        if norm in _NORMS:
            block, number, *_ = start
            name = _NORMS[norm]
            if block.startswith("single"):
                name = name.removeprefix("img_attn.")
            start = "single_blocks" if block.startswith("single") else "double_blocks"
            found[f"{start}.{number}.{name}.scale"] = weights[f"{path}.weight"]
    scale, shift = weights["norm_out.linear.weight"].chunk(2)
    found["final_layer.adaLN_modulation.1.weight"] = torch.cat([shift, scale])
    return found


@pytest.fixture
def single_file(klein, tmp_path) -> Callable[..., Path]:
    """A single file in the makers' names beside a folder with its other parts."""

    def write(name: str = "tiny-klein", change: Any = lambda tensors: tensors) -> Path:
        folder = tmp_path / name
        shutil.copytree(klein(), folder)
        weights = load_file(
            folder / "transformer" / "diffusion_pytorch_model.safetensors"
        )
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
        path = folder.with_name(f"{name}.safetensors")
        save_file(change(in_original_names(weights)), path)
        return path

    return write


def to_float8(tensors: Tensors) -> Tensors:
    """As ComfyUI stores it: a scale of each tensor, and what its own products use besides."""
    stored: Tensors = {"scaled_fp8": torch.zeros(0)}
    for key, weight in tensors.items():
        if not key.endswith("weight") or "norm" in key:
            stored[f"model.diffusion_model.{key}"] = weight
            continue
        scale = weight.abs().max() / 448
        name = f"model.diffusion_model.{key.removesuffix('weight')}"
        stored[f"{name}weight"] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"{name}weight_scale"] = scale
        stored[f"{name}input_scale"] = torch.tensor(1.0)
    return stored


def test_a_single_file_in_the_makers_names_draws_the_same_images(
    make_engine, request_of, single_file
):
    (expected,) = draw(make_engine(), request_of())
    path = single_file()
    check.check_path(path)
    (image,) = draw(make_engine(path), request_of())
    assert difference(image, expected) == 0


def worth(tensors: Tensors) -> Tensors:
    """What such weights are worth, in bfloat16."""
    stored = to_float8(tensors)
    prefix = "model.diffusion_model."
    found = {}
    for key, tensor in tensors.items():
        weight = stored[f"{prefix}{key}"]
        scale = stored.get(f"{prefix}{key}_scale")
        found[key] = tensor if scale is None else (weight.float() * scale).bfloat16()
    assert any(each.dtype == torch.bfloat16 for each in found.values())
    return found


def test_comfyuis_float8_draws_what_its_weights_are_worth(
    make_engine, request_of, single_file
):
    paths = single_file("float8", to_float8), single_file("plain", worth)
    check.check_path(paths[0])
    drawn, expected = (draw(make_engine(path), request_of())[0] for path in paths)
    assert difference(drawn, expected) == 0


def test_the_base_is_known_by_its_name_or_its_index(single_file, klein):
    base = single_file("tiny-klein-base")
    families = {
        path.name: checkpoints.family_of(path).slug
        for path in (base, single_file("distilled"), klein(is_distilled=False))
    }
    assert families[base.name] == families["tiny-klein"] == "klein_base"
    assert families["distilled.safetensors"] == "klein"
    assert check.family(base) == "FLUX.2-klein base"
    assert check.family(klein()) == "FLUX.2-klein"


def test_9b_is_refused_by_name_with_its_licence(single_file, klein, tmp_path):
    def widen(tensors: Tensors) -> Tensors:
        return tensors | {"txt_in.weight": torch.zeros(4, 12288)}

    with pytest.raises(errors.SetupError, match=r"klein-9B.*non-commercial"):
        check.check_path(single_file(change=widen))
    folder = tmp_path / "9b"
    shutil.copytree(klein(), folder)
    wide = tiny_klein.make_transformer(joint_attention_dim=12288, in_channels=16)
    wide.save_pretrained(folder / "transformer")
    with pytest.raises(errors.SetupError, match=r"klein-9B.*Apache-2.0"):
        load.load_engine(load.EngineSettings(folder, "cpu"))


def test_what_a_file_lacks_is_named(single_file, klein, tmp_path):
    path = single_file()
    shutil.rmtree(path.with_suffix("") / "vae")
    folder = shutil.copytree(klein(), tmp_path / "folder")
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(errors.SetupError, match="tokenizer is missing"):
        load.load_engine(load.EngineSettings(folder, "cpu"))
    shutil.rmtree(folder / "text_encoder")
    for model, part in ((path, "vae"), (folder, "text_encoder")):
        with pytest.raises(errors.SetupError, match=f"no {part}/.* with --config"):
            load.load_engine(load.EngineSettings(model, "cpu"))
    engine = load.load_engine(load.EngineSettings(path, "cpu", config=klein()))
    assert (engine.family, engine.default_size) == ("klein", (64, 64))
    engine.close()
    with pytest.raises(errors.SetupError, match="float16 may overflow"):
        load.load_engine(load.EngineSettings(klein(), "cpu", precision="float16"))
