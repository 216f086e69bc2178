"""Each kind of LoRA against its definition in numpy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from changed_weights import STRENGTH, Array, Change, Kind, base, merged, prefixed, write
from drawing import make_request
from imagefleet import errors

CONV = "conv_in"
LINEAR = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"
RANK = 3


def numbers(*shapes: tuple[int, ...]) -> list[Array]:
    random = np.random.default_rng(sum(map(sum, shapes)))
    return [
        random.standard_normal(shape).astype(np.float32).astype(float)
        for shape in shapes
    ]


def tucker(core: Array, outer: Array, inner: Array) -> Array:
    """Core [rank, rank, h, w], outer [rank, out], inner [rank, in] to [out, in, h, w]."""
    return np.einsum("rshw,ro,si->oihw", core, outer, inner)


def plain(weight: Array) -> Change:
    outer, inner = weight.shape
    down, up = numbers((RANK, inner), (outer, RANK))
    return {"lora_down.weight": down, "lora_up.weight": up}, up @ down


def locon(weight: Array) -> Change:
    outer, *rest = weight.shape
    down, up = numbers((RANK, *rest), (outer, RANK, 1, 1))
    delta = np.einsum("or,rihw->oihw", up[:, :, 0, 0], down)
    return {"lora_down.weight": down, "lora_up.weight": up}, delta


def locon_in_tucker_form(weight: Array) -> Change:
    outer, inner, *kernel = weight.shape
    down, mid, up = numbers(
        (RANK, inner, 1, 1), (RANK, RANK, *kernel), (outer, RANK, 1, 1)
    )
    parts = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up}
    return parts, tucker(mid, up[:, :, 0, 0].T, down[:, :, 0, 0])


def loha(weight: Array) -> Change:
    shapes = [(len(weight), RANK), (RANK, weight[0].size)] * 2
    w1_a, w1_b, w2_a, w2_b = numbers(*shapes)
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    delta = ((w1_a @ w1_b) * (w2_a @ w2_b)).reshape(weight.shape)
    return dict(zip(names, (w1_a, w1_b, w2_a, w2_b), strict=True)), delta


def loha_in_tucker_form(weight: Array) -> Change:
    outer, inner, *kernel = weight.shape
    names = ("hada_t1", "hada_w1_a", "hada_w1_b", "hada_t2", "hada_w2_a", "hada_w2_b")
    half = [(RANK, RANK, *kernel), (RANK, outer), (RANK, inner)]
    found = numbers(*half, *half)
    return dict(zip(names, found, strict=True)), tucker(*found[:3]) * tucker(*found[3:])


def kronecker(first: Array, second: Array) -> Array:
    """Block (i, j) of the weight is first[i, j] * second, whatever the kernel."""
    return np.kron(first.reshape(*first.shape, *[1] * (second.ndim - 2)), second)


def lokr_of_wholes(weight: Array) -> Change:
    outer, inner, *kernel = weight.shape
    w1, w2 = numbers((4, 2), (outer // 4, inner // 2, *kernel))
    return {"lokr_w1": w1, "lokr_w2": w2}, kronecker(w1, w2)


def lokr(weight: Array) -> Change:
    outer, inner, *kernel = weight.shape
    columns = inner // 2 * int(np.prod(kernel))
    w1, w2_a, w2_b = numbers((4, 2), (outer // 4, RANK), (RANK, columns))
    w2 = (w2_a @ w2_b).reshape(outer // 4, inner // 2, *kernel)
    return {"lokr_w1": w1, "lokr_w2_a": w2_a, "lokr_w2_b": w2_b}, kronecker(w1, w2)


def lokr_of_four(weight: Array) -> Change:
    parts, _ = lokr(weight)
    w1_a, w1_b = numbers((4, RANK), (RANK, 2))
    del parts["lokr_w1"]
    outer, inner, *kernel = weight.shape
    w2 = (parts["lokr_w2_a"] @ parts["lokr_w2_b"]).reshape(
        outer // 4, inner // 2, *kernel
    )
    return {**parts, "lokr_w1_a": w1_a, "lokr_w1_b": w1_b}, kronecker(w1_a @ w1_b, w2)


def lokr_in_tucker_form(weight: Array) -> Change:
    outer, inner, *kernel = weight.shape
    w1, t2, w2_a, w2_b = numbers(
        (4, 2), (RANK, RANK, *kernel), (RANK, outer // 4), (RANK, inner // 2)
    )
    parts = {"lokr_w1": w1, "lokr_t2": t2, "lokr_w2_a": w2_a, "lokr_w2_b": w2_b}
    return parts, kronecker(w1, tucker(t2, w2_a, w2_b))


def difference_of_weights(weight: Array) -> Change:
    (diff,) = numbers(weight.shape)
    return {"diff": diff}, diff


KINDS = [
    (LINEAR, plain),
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


def parts_of(kind: Any, *shape: int) -> Iterator[tuple[str, Array]]:
    """The tensors of a change of so large a layer, by their roles."""
    parts, _ = kind(np.zeros(shape))
    for name, part in parts.items():
        yield name.removeprefix("lora_").removesuffix(".weight"), part


@pytest.mark.parametrize(("layer", "kind"), KINDS)
@pytest.mark.parametrize("alpha", [None, 2.0])
def test_each_kind_changes_the_weight_as_defined(
    engine,
    tmp_path,
    layer: str,
    kind: Kind,
    alpha: float | None,
):
    weight = base(engine, layer)
    parts, delta = kind(weight)
    if alpha is not None:
        parts = {**parts, "alpha": np.array(alpha)}
        if kind not in UNRANKED:
            delta = delta * alpha / RANK
    lora = write(tmp_path / "x.safetensors", prefixed(layer, parts))
    (found,) = merged(engine, lora, layer)
    np.testing.assert_allclose(found, weight + STRENGTH * delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "kind"), [(LINEAR, plain), (CONV, locon), (LINEAR, lokr)]
)
@pytest.mark.parametrize("axis", [0, 1], ids=["outputs", "inputs"])
def test_dora_rescales_the_changed_weight_to_its_norms(
    engine,
    tmp_path,
    layer: str,
    kind: Kind,
    axis: int,
):
    weight = base(engine, layer)
    parts, delta = kind(weight)
    changed = weight + delta
    others = tuple(at for at in range(changed.ndim) if at != axis)
    (magnitudes,) = numbers((changed.shape[axis],))
    scale = np.expand_dims(magnitudes, others)
    expected = scale * changed / np.sqrt((changed**2).sum(others, keepdims=True))
    parts = {**parts, "dora_scale": scale}
    lora = write(tmp_path / "x.safetensors", prefixed(layer, parts))
    (found,) = merged(engine, lora, layer)
    np.testing.assert_allclose(
        found, weight + STRENGTH * (expected - weight), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("layer", "kind"), KINDS)
def test_missing_tensors_and_wrong_shapes_are_refused(
    engine,
    tmp_path,
    layer: str,
    kind: Kind,
):
    parts, _ = kind(base(engine, layer))
    for part, values in parts.items():
        others = {other: value for other, value in parts.items() if other != part}
        failed_image = [{**others, part: values[:-1]}, {**others, part: values[:0]}]
        for found in [others, *failed_image] if others else failed_image:
            lora = write(tmp_path / "x.safetensors", prefixed(layer, found))
            with pytest.raises(
                errors.UnusableFileError, match=r"'x' (does not fit|is damaged).*: for"
            ):
                engine.prepare(make_request(loras=(lora,)))
