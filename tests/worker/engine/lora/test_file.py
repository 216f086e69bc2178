"""Reading LoRA files, and the errors for files that do not fit."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from imagefleet import errors
from worker.engine import contract
from worker.engine.lora import file as lora_file

Weights = dict[str, torch.Tensor]


def named(path: Path) -> contract.Lora:
    return contract.Lora("some-style", path, 1.0, 1.0)


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {
        key: weight for key, weight in weights.items() if part not in key
    }


def changed(
    ending: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Weights], Weights]:
    def change_one(weights: Weights) -> Weights:
        key = next(key for key in weights if key.endswith(ending))
        return {**weights, key: change(weights[key]).contiguous()}

    return change_one


FOREIGN: dict[str, torch.Tensor] = {
    "transformer.blocks.0.lora_A.weight": torch.zeros(4, 4)
}


def pair(layer: str, inner: int = 4) -> Weights:
    return {
        f"{layer}.lora_down.weight": torch.zeros(4, inner),
        f"{layer}.lora_up.weight": torch.zeros(4, 4),
    }


def under_another_name(weights: Weights) -> Weights:
    flat = "lora_unet_mid_block_attentions_0_proj_in"
    dotted = "unet.mid_block.attentions.0.proj_in"
    return {
        key.replace(flat, dotted): weights[key].clone()
        for key in weights
        if flat in key
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: FOREIGN, "Diffusion's: it has 'transformer.blocks.0.lora_A.weight'"),
        (
            lambda weights: {**weights, **pair("lora_te2_x")},
            "unknown key 'lora_te2_x.lora_down",
        ),
        (lambda weights: {"emb_params": torch.zeros(3)}, "emb_params"),
        (
            lambda weights: {**weights, "unet.conv_in.alpha": torch.tensor(1.0)},
            "unknown kind",
        ),
        (
            lambda weights: {**weights, **under_another_name(weights)},
            "changes unet mid_block.attentions.0.proj_in twice, under two names",
        ),
        (
            lambda _: {"lora_unet_conv_in.hada_w1_a": torch.zeros(4, 4)},
            "it has hada_w1_a [4, 4]",
        ),
        (
            lambda _: {"lora_unet_conv_in.dora_scale": torch.ones(4)},
            "it has dora_scale [4]",
        ),
        (lambda _: {}, "holds no weights"),
        (without("lora_up"), "unknown kind: for 'lora_te_"),
        (without("lora_down"), "unknown kind: for 'lora_te_"),
        (
            changed("lora_down.weight", lambda tensor: tensor[:, :-1]),
            "does not fit this model",
        ),
        (
            changed("lora_up.weight", lambda tensor: tensor[:-1]),
            "does not fit this model",
        ),
        (
            changed("lora_up.weight", lambda tensor: tensor[:, :-1]),
            "is damaged or of an unknown",
        ),
        (
            changed("lora_up.weight", lambda tensor: tensor[:0]),
            "is damaged or of an unknown",
        ),
        (changed("alpha", lambda _: torch.ones(2)), "is damaged or of an unknown"),
        (changed("alpha", lambda alpha: alpha * torch.nan), "is damaged"),
        (changed("lora_up.weight", lambda tensor: tensor / 0), "is damaged"),
        (changed("lora_up.weight", lambda tensor: tensor.to(torch.int8)), "is damaged"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_by_name(
    cache: lora_file.LoraCache,
    lora_paths: list[Path],
    tmp_path,
    change: Callable[[Weights], Weights],
    reason: str,
):
    path = tmp_path / "x.safetensors"
    save_file(change(load_file(lora_paths[0])), path)
    with pytest.raises(errors.UnusableFileError) as refusal:
        cache.get(named(path))
    assert "'some-style'" in refusal.value.message
    assert reason in refusal.value.message
    assert str(tmp_path) not in refusal.value.message, (
        "a message must not show the worker's folders"
    )


def test_a_vanished_file_is_a_transient_error(cache: lora_file.LoraCache, tmp_path):
    """Another worker may have evicted it from the disk since its name was looked up."""
    for path in (tmp_path / "gone.safetensors", tmp_path):
        with pytest.raises(errors.TransientError, match="'some-style' cannot be read"):
            cache.get(named(path))


UNKNOWN = pair("lora_unet_x")
OTHER = "another architecture"
UNET_KEY = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"


@pytest.mark.parametrize(
    ("foreign", "metadata", "model"),
    [
        (pair("lora_te2_text_model_encoder_layers_0_mlp_fc1"), {}, "SDXL"),
        (pair("lora_unet_input_blocks_4_1_proj_in"), {}, "SDXL"),
        (pair("unet.x") | pair("text_encoder_2.x"), {}, "SDXL"),
        (pair("lora_unet_double_blocks_0_img_attn_proj"), {}, OTHER),
        (
            UNKNOWN,
            {"ss_base_model_version": "sd_v2_v"},
            "Stable Diffusion 2.x",
        ),
        (
            UNKNOWN,
            {"ss_base_model_version": "sdxl_base_v1-0"},
            "SDXL",
        ),
        (
            UNKNOWN,
            {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"},
            "SDXL",
        ),
        (pair(UNET_KEY, 1024), {}, "Stable Diffusion 2.x"),
        (pair(UNET_KEY, 768), {}, "Stable Diffusion 1.x"),
    ],
)
def test_a_lora_of_another_model_is_refused_naming_the_model(
    cache: lora_file.LoraCache,
    tmp_path,
    foreign: Weights,
    metadata: dict[str, str],
    model: str,
):
    path = tmp_path / "x.safetensors"
    save_file(foreign, path, metadata)
    made_for = rf"'some-style' does not fit this model \(it is a LoRA for {model}.*\): "
    with pytest.raises(errors.UnusableFileError, match=made_for):
        cache.get(named(path))


def test_a_pickle_is_refused_without_loading_it(cache: lora_file.LoraCache, tmp_path):
    path = tmp_path / "evil.safetensors"
    torch.save({"lora_unet_conv_in.alpha": torch.tensor(1.0)}, path)
    with pytest.raises(
        errors.UnusableFileError, match=r"'some-style' is not a complete \.safetensors"
    ):
        cache.get(named(path))


@pytest.mark.parametrize(
    "suffix", ["x", ".lora_mid.weight", ".diff_b", ".lora_down.weight"]
)
def test_a_tensors_name_of_megabytes_is_not_quoted_whole(
    cache: lora_file.LoraCache, tmp_path, suffix: str
):
    path = tmp_path / "x.safetensors"
    save_file({"lora_unet_" + "n" * 3_000_000 + suffix: torch.zeros(1)}, path)
    with pytest.raises(errors.UnusableFileError, match="some-style") as caught:
        cache.get(named(path))
    assert len(caught.value.message) < 1_000


@pytest.mark.parametrize("shape", [(), (0,), (1,) * 50])
def test_a_tensor_of_an_absurd_shape_is_the_files_fault(
    cache: lora_file.LoraCache, tmp_path, shape: tuple[int, ...]
):
    path = tmp_path / "x.safetensors"
    for part in (
        "lora_down.weight",
        "alpha",
        "hada_w1_b",
        "lokr_w2",
        "diff",
        "dora_scale",
    ):
        save_file({f"{UNET_KEY}.{part}": torch.zeros(shape)}, path)
        with pytest.raises(errors.UnusableFileError, match="some-style"):
            cache.get(named(path))


def test_finite_numbers_whose_sum_is_infinite_are_no_damage(
    cache: lora_file.LoraCache, tmp_path
):
    path = tmp_path / "x.safetensors"
    save_file({"lora_unet_conv_in.diff": torch.full((32, 4, 3, 3), 3e38)}, path)
    assert cache.get(named(path)).deltas["unet"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"text_encoder.alpha_pattern": {"fc1": "much"}}', "damaged metadata"),
        ('{"unet.lora_alpha": 1e999}', "should be a finite number"),
        (f'{{"lora_alpha": {"9" * 400}}}', "damaged metadata"),
        ('{"unet.alpha_pattern": {"(": 3}}', "alpha_pattern.("),
        (r'{"unet.alpha_pattern": {"(\\w+)+!": 3}}', "should match pattern"),
        ('{"unet.alpha_pattern": ["to_k"]}', "damaged metadata"),
        ("[" * 100_000, "damaged metadata"),
        ('{"unet.lora_alpha": "much"}', "damaged metadata"),
        ("[1]", "damaged metadata"),
        ("{", "damaged metadata"),
    ],
)
def test_invalid_peft_metadata_is_refused(
    cache: lora_file.LoraCache,
    lora_paths: list[Path],
    tmp_path,
    config: str,
    reason: str,
):
    path = tmp_path / "x.safetensors"
    save_file(load_file(lora_paths[0]), path, {"lora_adapter_metadata": config})
    with pytest.raises(errors.UnusableFileError) as refusal:
        cache.get(named(path))
    assert reason in refusal.value.message


def test_the_scale_is_alpha_over_rank_wherever_alpha_is_stored(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path
):
    weights = load_file(lora_paths[0])
    path = tmp_path / "x.safetensors"
    scales = []
    for kept, config in (
        (weights, {}),
        (without(".alpha")(weights), {"unet.lora_alpha": 8}),
        (without(".alpha")(weights), {"lora_alpha": 1}),
        (without(".alpha")(weights), {"unet.lora_alpha": 8, "unet.use_rslora": True}),
        (without(".alpha")(weights), {}),
    ):
        save_file(kept, path, {"lora_adapter_metadata": json.dumps(config)})
        os.utime(path, ns=(0, len(scales)))
        (scale,) = {
            change.scale for change in cache.get(named(path)).deltas["unet"].values()
        }
        scales.append(scale)
    assert scales == [0.5, 2.0, 0.25, 4.0, 1.0]


def test_the_header_may_set_alpha_per_layer(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path
):
    path = tmp_path / "x.safetensors"
    patterns = {
        "unet.alpha_pattern": {
            "^mid_block.attentions.0.proj_in": 8,
            "^proj_in": 16,
            "o_k": 16,
            "to_k": 2,
        },
        "text_encoder.alpha_pattern": {"text_model.encoder.layers.0.mlp.fc1": 1},
        "lora_alpha": 4,
    }
    config = {"lora_adapter_metadata": json.dumps(patterns)}
    save_file(without(".alpha")(load_file(lora_paths[0])), path, config)
    changes = cache.get(named(path)).deltas
    odd = {
        name: each.scale for name, each in changes["unet"].items() if each.scale != 1.0
    }
    assert odd.pop("mid_block.attentions.0.proj_in") == 2.0
    assert set(odd.values()) == {0.5}
    assert {name.rsplit(".", 1)[1] for name in odd} == {"to_k"}
    assert changes["text_encoder"]["encoder.layers.0.mlp.fc1"].scale == 0.25
    assert changes["text_encoder"]["encoder.layers.1.mlp.fc1"].scale == 1.0
