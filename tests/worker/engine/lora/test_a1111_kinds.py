"""What AUTOMATIC1111's Lora extension takes beside LyCORIS' products, against its formulas (1.10).

They are computed here apart, in numpy's float64: network_ia3, network_glora, network_oft,
network_norm and network_full, and `NetworkModule.calc_scale`.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from changed_weights import (
    STRENGTH,
    Array,
    Change,
    Kind,
    Tensors,
    base,
    drawn,
    merged,
    prefixed,
    write,
)
from drawing import difference, draw, make_request
from imagefleet import errors
from imagefleet.job import differences
from worker.engine import contract
from worker.engine.lora import file as lora_file

BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
LINEAR = f"{BLOCK}.attn1.to_k"
CONV = "down_blocks.0.resnets.0.conv1"


def ia3_of_outputs(weight: Array) -> Change:
    scales = drawn(len(weight))
    return {"weight": scales, "on_input": np.array(False)}, weight * scales[:, None]


def ia3_of_inputs(weight: Array) -> Change:
    scales = drawn(weight.shape[1])
    return {"weight": scales, "on_input": np.array(True)}, weight * scales


def glora_parts(*weights: Array) -> Tensors:
    names = ("a1", "a2", "b1", "b2")
    parts = {f"{name}.weight": each for name, each in zip(names, weights, strict=True)}
    return {**parts, "alpha": 2.0}


def glora(weight: Array) -> Change:
    outer, inner = weight.shape
    a1 = drawn(3, inner)
    a2 = drawn(inner, 3)
    b1 = drawn(3, inner)
    b2 = drawn(outer, 3)
    return glora_parts(a1, a2, b1, b2), b2 @ b1 + (weight @ a2) @ a1


def todays_glora(weight: Array) -> Change:
    """LyCORIS 3's `GLoRAModule`, which A1111 fails to read; its rank divides alpha."""
    outer, inner = weight.shape
    a1 = drawn(inner, 3)
    a2 = drawn(3, inner)
    b1 = drawn(outer, 3)
    b2 = drawn(3, inner)
    return glora_parts(a1, a2, b1, b2), 2 / 3 * (b1 @ b2 + weight @ a1 @ a2)


def todays_glora_of_a_convolution(weight: Array) -> Change:
    """The part of the layer's own weight has its kernel, that of B a kernel of its own."""
    outer, inner, *kernel = weight.shape
    a1 = drawn(inner, 3, 1, 1)
    a2 = drawn(3, inner, 1, 1)
    b1 = drawn(outer, 3, 1, 1)
    b2 = drawn(3, inner, *kernel)
    added = np.einsum("or,ri...->oi...", b1[..., 0, 0], b2)
    inputs = a1[..., 0, 0] @ a2[..., 0, 0]
    changed = np.einsum("oi...,ij->oj...", weight, inputs)
    return glora_parts(a1, a2, b1, b2), 2 / 3 * (added + changed)


def turned(weight: Array, turns: Array) -> Array:
    """Each block of outputs by the transpose of its matrix."""
    size = turns.shape[1]
    result = np.empty_like(weight)
    for block, matrix in enumerate(turns):
        rows = slice(block * size, (block + 1) * size)
        result[rows] = np.tensordot(matrix.T, weight[rows], 1)
    return result


def cayley(blocks: Array, limit: float = 0.0) -> Array:
    skew = blocks - blocks.transpose(0, 2, 1)
    norm = np.sqrt((skew**2).sum())
    if limit:
        skew = skew * ((min(norm, limit) + 1e-8) / (norm + 1e-8))
    eye = np.eye(blocks.shape[1])
    return np.array([(eye + each) @ np.linalg.inv(eye - each) for each in skew])


def oft(weight: Array) -> Change:
    blocks = drawn(4, len(weight) // 4, len(weight) // 4) / 20
    return {"oft_blocks": blocks}, turned(weight, cayley(blocks)) - weight


def oft_with_a_limit(weight: Array) -> Change:
    blocks = drawn(2, len(weight) // 2, len(weight) // 2)
    alpha = 1e-2
    limit = float(np.float32(alpha)) * len(weight)
    parts = {"oft_blocks": blocks, "alpha": np.array(alpha)}
    return parts, turned(weight, cayley(blocks, limit)) - weight


def oft_diag_rescaled(weight: Array) -> Change:
    turns = drawn(4, len(weight) // 4, len(weight) // 4)
    rescale = drawn(len(weight))
    parts = {"oft_diag": turns, "rescale": rescale}
    rows = rescale.reshape(-1, *[1] * (weight.ndim - 1))
    return parts, rows * turned(weight, turns) - weight


def scaled(weight: Array) -> Change:
    """A scale of its own goes before alpha over rank; an alpha may be a whole number."""
    down = drawn(3, weight.shape[1])
    up = drawn(len(weight), 3)
    parts = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(2)}
    return {**parts, "scale": np.array(0.25)}, 0.25 * (up @ down)


def with_whole_alpha(weight: Array) -> Change:
    parts, change = scaled(weight)
    return {
        name: parts[name] for name in parts if name != "scale"
    }, change / 0.25 * 2 / 3


def vector(weight: Array) -> Change:
    return {"w_norm": (found := drawn(*weight.shape))}, found


KINDS = [
    (LINEAR, ia3_of_outputs),
    (LINEAR, ia3_of_inputs),
    (LINEAR, glora),
    (LINEAR, todays_glora),
    (CONV, todays_glora_of_a_convolution),
    (LINEAR, scaled),
    (LINEAR, with_whole_alpha),
    (LINEAR, oft),
    (CONV, oft_with_a_limit),
    (CONV, oft_diag_rescaled),
    ("down_blocks.0.resnets.0.norm1", vector),
    (f"{BLOCK}.norm2", vector),
]


@pytest.mark.parametrize(("path", "kind"), KINDS)
def test_each_kind_changes_the_weight_by_its_formula(
    engine,
    tmp_path,
    path: str,
    kind: Kind,
):
    weight = base(engine, path)
    parts, change = kind(weight)
    lora = write(tmp_path / "x.safetensors", prefixed(path, parts))
    (found,) = merged(engine, lora, path)
    np.testing.assert_allclose(found, weight + STRENGTH * change, rtol=1e-5, atol=1e-5)
    assert np.abs(change).max() > 1e-2, "or the test shows nothing"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (CONV, ("diff", "diff_b")),
        ("down_blocks.0.resnets.0.norm2", ("w_norm", "b_norm")),
    ],
)
def test_a_bias_changes_with_its_weight_and_without_its_scale(
    engine, tmp_path, path: str, names: tuple[str, str]
):
    weight = base(engine, path)
    bias = base(engine, f"{path}.bias")
    parts = dict(zip(names, (drawn(*weight.shape), drawn(*bias.shape)), strict=True))
    lora = write(
        tmp_path / "x.safetensors", prefixed(path, {**parts, "scale": np.array(0.5)})
    )
    found = merged(engine, lora, path, f"{path}.bias")
    changed = (
        weight + STRENGTH * 0.5 * parts[names[0]],
        bias + STRENGTH * parts[names[1]],
    )
    for one, other in zip(found, changed, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_scales_of_the_other_side_of_a_layer_are_refused(engine, tmp_path):
    path = f"{BLOCK}.ff.net.2"
    outer, inner = base(engine, path).shape
    for number, is_input in ((outer, True), (inner, False)):
        parts = {"weight": drawn(number), "on_input": np.array(is_input)}
        lora = write(tmp_path / f"{number}.safetensors", prefixed(path, parts))
        with pytest.raises(
            errors.UnusableFileError, match="does not fit this model: it scales"
        ):
            engine.prepare(make_request(loras=(lora,)))


def test_kohyas_oft_has_a_prefix_of_its_own(engine, tmp_path):
    weight = base(engine, LINEAR)
    parts, change = oft(weight)
    lora = write(tmp_path / "x.safetensors", prefixed(LINEAR, parts, "oft_unet_"))
    (found,) = merged(engine, lora, LINEAR)
    np.testing.assert_allclose(found, weight + STRENGTH * change, rtol=1e-5, atol=1e-5)


def test_a_lora_of_a_plain_model_changes_the_same_inputs_of_one_for_inpainting(
    engine, tmp_path
):
    """AUTOMATIC1111 pads the change of the first layer with zeros."""
    unet = torch.nn.Module()
    unet.conv_in = torch.nn.Conv2d(9, 32, 3)
    layers = lora_file.Layers(unet, {})
    parts = {
        "lora_down.weight": drawn(2, 4, 3, 3),
        "lora_up.weight": drawn(32, 2, 1, 1),
    }
    file = write(tmp_path / "x.safetensors", prefixed("conv_in", parts))
    delta = lora_file.LoraCache(layers, 10**9).get(file).deltas["unet"]["conv_in"]
    found = delta.compute(unet.conv_in.weight.detach())
    own = lora_file.LoraCache(engine._preparer._loras.cache._layers, 10**9).get(file)
    plain = own.deltas["unet"]["conv_in"].compute(torch.zeros(32, 4, 3, 3))
    torch.testing.assert_close(found[:, :4], plain)
    assert not found[:, 4:].any()


def test_what_the_model_has_no_layer_for_is_skipped_and_counted(
    engine, tmp_path, caplog
):
    weight = base(engine, LINEAR)
    parts, change = scaled(weight)
    elsewhere = prefixed("nothing.here", parts) | {"lora_te2_text_projection": drawn(3)}
    used = prefixed(LINEAR, {**parts, "scalar": np.array(1.0), "diff_b": drawn(32)})
    lora = write(tmp_path / "x.safetensors", used | elsewhere)
    with caplog.at_level("WARNING"):
        (found,) = merged(engine, lora, LINEAR)
        merged(engine, lora, LINEAR)
    np.testing.assert_allclose(found, weight + STRENGTH * change, rtol=1e-5, atol=1e-5)
    (warning,) = [
        each for each in caplog.records if "drawn without" in each.getMessage()
    ]
    assert "drawn without 7 of its tensors" in warning.getMessage()


@pytest.mark.parametrize(
    ("kind", "prefix", "beside", "told"),
    [
        (scaled, "lora_unet_", True, set()),
        (glora, "lora_unet_", False, set()),
        (glora, "lora_unet_", True, {"mixed_loras"}),
        (ia3_of_inputs, "lora_unet_", True, {"mixed_loras"}),
        (scaled, f"unet.{LINEAR.removesuffix('to_k')}", False, {"dotted_lora"}),
    ],
)
def test_loras_that_automatic1111_draws_otherwise_or_not_at_all_are_told(
    engine,
    tmp_path,
    monkeypatch,
    kind: Kind,
    prefix: str,
    beside: bool,
    told: set[str],
):
    found = set[str]()
    monkeypatch.setattr(differences, "warn", found.add)
    weight = base(engine, LINEAR)
    path = "to_k" if "." in prefix else LINEAR
    loras = [
        write(tmp_path / "one.safetensors", prefixed(path, kind(weight)[0], prefix))
    ]
    if beside:
        loras.append(
            write(tmp_path / "two.safetensors", prefixed(LINEAR, scaled(weight)[0]))
        )
    engine.prepare(make_request(loras=tuple(loras)))
    assert found == told


def test_embeddings_in_a_loras_file_are_words_of_its_jobs(slot_engine, tmp_path):
    """An embedding of the fleet goes before it, and one for another model is skipped."""
    parts, _ = scaled(base(slot_engine, LINEAR))

    def embedding(path: Path, vectors: Array) -> contract.Embedding:
        save_file({"emb_params": torch.from_numpy(vectors).float()}, path)
        return contract.Embedding(
            path.stem, path, hashlib.sha256(path.read_bytes()).hexdigest()
        )

    vectors = drawn(2, 32)
    others = drawn(4, 32)
    alone = write(tmp_path / "alone.safetensors", prefixed(LINEAR, parts))
    bundled = {
        "bundle_emb.mist.string_to_param.*": vectors,
        "bundle_emb.b.clip_g": drawn(2, 9),
    }
    both = write(tmp_path / "both.safetensors", {**prefixed(LINEAR, parts), **bundled})
    own, other = (
        embedding(tmp_path / name / "mist.safetensors", each)
        for name, each in (("own", vectors), ("other", others))
        if (tmp_path / name).mkdir() is None
    )
    changes = [
        {"loras": (both,)},
        {"loras": (alone,), "embeddings": (own,)},
        {"loras": (both,), "embeddings": (other,)},
        {"loras": (alone,), "embeddings": (other,)},
    ]
    requests = [make_request(prompt="a mist", steps=2, **each) for each in changes]
    images = draw(slot_engine, *requests)
    assert difference(images[0], images[1]) <= 1
    assert difference(images[2], images[3]) <= 1
    assert difference(images[0], images[2]) > 2

    def second_pass(**changes: Any) -> contract.HiresPass:
        return contract.HiresPass(64, 64, 0.7, 2, "Latent", prompt="a mist", **changes)

    hires = [
        {"hires": second_pass(loras=(both,))},
        {"hires": second_pass(loras=(alone,)), "embeddings": (own,)},
        {"hires": second_pass(loras=(alone,)), "loras": (both,)},
        {"hires": second_pass(loras=(alone,)), "loras": (alone,)},
    ]
    requests = [
        make_request(prompt="a sea", steps=2, width=32, height=32, **each)
        for each in hires
    ]
    images = draw(slot_engine, *requests)
    assert difference(images[0], images[1]) <= 1, "only the second pass names its file"
    assert difference(images[2], images[3]) <= 1, "only the first pass names its file"
    assert difference(images[0], images[3]) > 2
