"""Each kind of LoRA against its definition in numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from drawing import make_request
from imagefleet import errors
from worker.engine import contract

Array = npt.NDArray[np.float64]
Tensors = dict[str, Array]
CONV = ("lora_unet_conv_in", (32, 4, 3, 3))
LINEAR = (
    "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_ff_net_2",
    (32, 128),
)
RANK = 3
STRENGTH = 0.7


def numbers(*shapes: tuple[int, ...]) -> list[Array]:
    random = np.random.default_rng(sum(map(sum, shapes)))
    return [
        random.standard_normal(shape).astype(np.float32).astype(float)
        for shape in shapes
    ]


def tucker(core: Array, outer: Array, inner: Array) -> Array:
    """Core [rank, rank, h, w], outer [rank, out], inner [rank, in] to [out, in, h, w]."""
    result = np.zeros((outer.shape[1], inner.shape[1], *core.shape[2:]))
    for r in range(len(outer)):
        for s in range(len(inner)):
            result += (
                outer[r][:, None, None, None]
                * inner[s][None, :, None, None]
                * core[r, s]
            )
    return result


def lora(weight: Array) -> tuple[Tensors, Array]:
    outer, inner = weight.shape
    down, up = numbers((RANK, inner), (outer, RANK))
    return {"lora_down.weight": down, "lora_up.weight": up}, up @ down


def locon(weight: Array) -> tuple[Tensors, Array]:
    outer, *rest = weight.shape
    down, up = numbers((RANK, *rest), (outer, RANK, 1, 1))
    delta = np.zeros(weight.shape)
    for r in range(RANK):
        delta += up[:, r, 0, 0][:, None, None, None] * down[r]
    return {"lora_down.weight": down, "lora_up.weight": up}, delta


def locon_in_tucker_form(weight: Array) -> tuple[Tensors, Array]:
    outer, inner, *kernel = weight.shape
    down, mid, up = numbers(
        (RANK, inner, 1, 1), (RANK, RANK, *kernel), (outer, RANK, 1, 1)
    )
    parts = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up}
    return parts, tucker(mid, up[:, :, 0, 0].T, down[:, :, 0, 0])


def loha(weight: Array) -> tuple[Tensors, Array]:
    outer, columns = len(weight), weight[0].size
    shapes = [(outer, RANK), (RANK, columns)] * 2
    w1_a, w1_b, w2_a, w2_b = numbers(*shapes)
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    delta = ((w1_a @ w1_b) * (w2_a @ w2_b)).reshape(weight.shape)
    return dict(zip(names, (w1_a, w1_b, w2_a, w2_b), strict=True)), delta


def loha_in_tucker_form(weight: Array) -> tuple[Tensors, Array]:
    outer, inner, *kernel = weight.shape
    names = ("hada_t1", "hada_w1_a", "hada_w1_b", "hada_t2", "hada_w2_a", "hada_w2_b")
    half = [(RANK, RANK, *kernel), (RANK, outer), (RANK, inner)]
    found = numbers(*half, *half)
    return dict(zip(names, found, strict=True)), tucker(*found[:3]) * tucker(*found[3:])


def kronecker(first: Array, second: Array, weight: Array) -> Array:
    """Block (i, j) of the weight is first[i, j] * second, whatever the kernel."""
    delta = np.zeros(weight.shape)
    high, wide = second.shape[:2]
    for i, j in np.ndindex(*first.shape):
        delta[i * high : (i + 1) * high, j * wide : (j + 1) * wide] = (
            first[i, j] * second
        )
    return delta


def lokr_of_wholes(weight: Array) -> tuple[Tensors, Array]:
    outer, inner, *kernel = weight.shape
    w1, w2 = numbers((4, 2), (outer // 4, inner // 2, *kernel))
    return {"lokr_w1": w1, "lokr_w2": w2}, kronecker(w1, w2, weight)


def lokr(weight: Array) -> tuple[Tensors, Array]:
    outer, inner, *kernel = weight.shape
    columns = inner // 2 * int(np.prod(kernel))
    w1, w2_a, w2_b = numbers((4, 2), (outer // 4, RANK), (RANK, columns))
    w2 = (w2_a @ w2_b).reshape(outer // 4, inner // 2, *kernel)
    return {"lokr_w1": w1, "lokr_w2_a": w2_a, "lokr_w2_b": w2_b}, kronecker(
        w1, w2, weight
    )


def lokr_of_four(weight: Array) -> tuple[Tensors, Array]:
    parts, _ = lokr(weight)
    w1_a, w1_b = numbers((4, RANK), (RANK, 2))
    del parts["lokr_w1"]
    outer, inner, *kernel = weight.shape
    w2 = (parts["lokr_w2_a"] @ parts["lokr_w2_b"]).reshape(
        outer // 4, inner // 2, *kernel
    )
    return {**parts, "lokr_w1_a": w1_a, "lokr_w1_b": w1_b}, kronecker(
        w1_a @ w1_b, w2, weight
    )


def lokr_in_tucker_form(weight: Array) -> tuple[Tensors, Array]:
    outer, inner, *kernel = weight.shape
    w1, t2, w2_a, w2_b = numbers(
        (4, 2), (RANK, RANK, *kernel), (RANK, outer // 4), (RANK, inner // 2)
    )
    parts = {"lokr_w1": w1, "lokr_t2": t2, "lokr_w2_a": w2_a, "lokr_w2_b": w2_b}
    return parts, kronecker(w1, tucker(t2, w2_a, w2_b), weight)


def difference_of_weights(weight: Array) -> tuple[Tensors, Array]:
    (diff,) = numbers(weight.shape)
    return {"diff": diff}, diff


KINDS = [
    (LINEAR, lora),
    (CONV, locon),
    (CONV, locon_in_tucker_form),
    (LINEAR, loha),
    (CONV, loha),
    (CONV, loha_in_tucker_form),
    (LINEAR, lokr),
    (CONV, lokr),
    (LINEAR, lokr_of_four),
    (CONV, lokr_of_four),
    (LINEAR, lokr_of_wholes),
    (CONV, lokr_of_wholes),
    (CONV, lokr_in_tucker_form),
    (LINEAR, difference_of_weights),
]
#: They have no rank to divide the alpha by.
UNRANKED = (lokr_of_wholes, difference_of_weights)


def merged(engine: Any, path: Path, layer: str, parts: Tensors) -> Array:
    """The layer's weight with a LoRA of these tensors; the base's is restored bit-exactly."""
    tensors = {
        f"{layer}.{name}": torch.from_numpy(np.asarray(part, np.float32)).contiguous()
        for name, part in parts.items()
    }
    save_file(tensors, path)
    weight = weight_of(engine, layer)
    before = weight.clone()
    use = contract.Lora(path.stem, path, STRENGTH, STRENGTH)
    engine.activate(engine.prepare(make_request(loras=(use,))).loras)
    after = weight.double().numpy()
    engine.activate({})
    assert torch.equal(weight, before)
    return np.array(after)


def weight_of(engine: Any, layer: str) -> torch.Tensor:
    unet = engine.checkpoint.unet
    module = unet.conv_in if layer == CONV[0] else None
    module = module or unet.down_blocks[0].attentions[0].transformer_blocks[0].ff.net[2]
    weight: torch.Tensor = module.weight.detach()
    return weight


@pytest.mark.parametrize(("layer", "kind"), KINDS)
@pytest.mark.parametrize("alpha", [None, 2.0])
def test_each_kind_changes_the_weight_as_defined(
    engine: Any,
    tmp_path: Path,
    layer: tuple[str, tuple[int, ...]],
    kind: Callable[[Array], tuple[Tensors, Array]],
    alpha: float | None,
) -> None:
    name, shape = layer
    base = weight_of(engine, name).double().numpy().copy()
    assert base.shape == shape
    parts, delta = kind(base)
    if alpha is not None:
        parts = {**parts, "alpha": np.array(alpha)}
        if kind not in UNRANKED:
            delta = delta * alpha / RANK
    found = merged(engine, tmp_path / "x.safetensors", name, parts)
    np.testing.assert_allclose(found, base + STRENGTH * delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "kind"), [(LINEAR, lora), (CONV, locon), (LINEAR, lokr)]
)
@pytest.mark.parametrize("norms_of", ["outputs", "inputs", "peft"])
def test_dora_rescales_the_changed_weight_to_its_norms(
    engine: Any,
    tmp_path: Path,
    layer: tuple[str, tuple[int, ...]],
    kind: Callable[[Array], tuple[Tensors, Array]],
    norms_of: str,
) -> None:
    name, shape = layer
    base = weight_of(engine, name).double().numpy().copy()
    parts, delta = kind(base)
    changed = base + delta
    expected = np.empty(shape)
    axis = 1 if norms_of == "inputs" else 0
    (magnitudes,) = numbers((shape[axis],))
    for at in range(shape[axis]):
        where = (slice(None), at) if axis else (at,)
        norm = np.sqrt((changed[where] ** 2).sum())
        expected[where] = changed[where] / norm * magnitudes[at]
    kernel = [1] * (len(shape) - 2)
    parts |= {
        "outputs": {"dora_scale": magnitudes.reshape(-1, 1, *kernel)},
        "inputs": {"dora_scale": magnitudes.reshape(1, -1, *kernel)},
        # peft's norms of outputs have a leading 1 for convolutions
        "peft": {
            "lora_magnitude_vector.weight": magnitudes.reshape(
                (1, -1, *kernel) if kernel else (-1,)
            )
        },
    }[norms_of]
    found = merged(engine, tmp_path / "x.safetensors", name, parts)
    np.testing.assert_allclose(
        found, base + STRENGTH * (expected - base), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("layer", "kind"), KINDS)
def test_missing_tensors_and_wrong_shapes_are_refused(
    engine: Any,
    tmp_path: Path,
    layer: tuple[str, tuple[int, ...]],
    kind: Callable[[Array], tuple[Tensors, Array]],
) -> None:
    name, shape = layer
    parts, _ = kind(np.empty(shape))
    for part, values in parts.items():
        others = {other: value for other, value in parts.items() if other != part}
        failed_image = [{**others, part: values[:-1]}, {**others, part: values[:0]}]
        for found in [others, *failed_image] if others else failed_image:
            with pytest.raises(
                errors.UnusableFileError, match=r"'x' (does not fit|is damaged).*: for"
            ):
                merged(engine, tmp_path / "x.safetensors", name, found)
