"""LoRAs of any kind, packed and merged into stacks of layers, against one layer after the other."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.worker.engine.lora import test_formats as formats
from worker.engine.lora import file as lora_file
from worker.engine.lora import merge
from worker.engine.lora.merge import StackedChange

Shapes = Mapping[str, tuple[int, ...]]

OUT = 132
IN = 72
GROUP = ("layers", OUT, IN)
PATHS = ["zero", "one", "two", "three", "four"]
GROUPS = {GROUP: PATHS}


def shapes_of(kind: Any, *kernel: int) -> Shapes:
    return {name: part.shape for name, part in formats.parts_of(kind, OUT, IN, *kernel)}


LORA, LOHA, LOKR = map(shapes_of, (formats.plain, formats.loha, formats.lokr))

#: The shapes of each kind's tensors; those with a kernel are of 1x1 convolutions.
KINDS: Mapping[str, Shapes] = {
    "lora": LORA,
    "lora of a 1x1 convolution": shapes_of(formats.locon, 1, 1),
    "lora in Tucker form": shapes_of(formats.locon_in_tucker_form, 1, 1),
    "loha": LOHA,
    "loha in Tucker form": shapes_of(formats.loha_in_tucker_form, 1, 1),
    "lokr": LOKR,
    "lokr of wholes": shapes_of(formats.lokr_of_wholes, 1, 1),
    "lokr of four": shapes_of(formats.lokr_of_four),
    "lokr in Tucker form": shapes_of(formats.lokr_in_tucker_form, 1, 1),
    "full difference": {"diff": (OUT, IN)},
    "dora": {**LORA, "dora_scale": (OUT, 1)},
    "dora of the inputs": {**LORA, "dora_scale": (1, IN)},
    "dora by peft": {**LORA, "magnitude": (OUT,)},
    "turned": {"turn": (IN, IN), "turn_scale": (OUT,)},
    "turned and added to": {"turn": (IN, IN), "turn_scale": (OUT,), "diff": (OUT, IN)},
    "dora of a lokr": {**LOKR, "dora_scale": (OUT, 1)},
}

_generator = torch.Generator()


@pytest.fixture(autouse=True)
def seed() -> None:
    _generator.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=_generator).to(dtype)


def make_lora(
    shapes: Shapes,
    strength: float = 0.7,
    paths: Sequence[str] = PATHS,
    alpha: float | None = 1.5,
    dtype: torch.dtype = torch.float32,
) -> merge.AppliedLora:
    deltas = {}
    for path in paths:
        tensors = {name: draw(*shape, dtype=dtype) for name, shape in shapes.items()}
        deltas[path] = lora_file.make_delta(tensors, alpha)
    return merge.AppliedLora((str(id(deltas)), 0, 0), deltas, strength)


def unpack(
    loras: Sequence[merge.AppliedLora], dtype: torch.dtype = torch.float32
) -> StackedChange:
    packed = merge.pack(loras, GROUPS, dtype=dtype)
    # As a device would have them: no tensor of the file itself, and another copy of the bytes.
    return packed.of(packed.assemble().clone()).stacked[GROUP]


def merged(
    change: StackedChange, original: torch.Tensor, temporary_bytes: int = 2**20
) -> torch.Tensor:
    found = torch.full_like(original, torch.nan)
    change.merge(original, found, temporary_bytes)
    return found


def expected(
    loras: Sequence[merge.AppliedLora], original: torch.Tensor
) -> torch.Tensor:
    """As `Merger` does it."""
    weights = original.float().clone()
    for at, path in enumerate(PATHS):
        for lora in loras:
            if (delta := lora.deltas.get(path)) is not None:
                weights[at] += lora.weight * delta.compute(original[at].float())
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("paths", [PATHS, ["one", "four"]])
def test_each_kind_is_merged_into_all_layers_at_once(kind: str, paths: list[str]):
    lora = make_lora(KINDS[kind], paths=paths)
    original = draw(5, OUT, IN)
    before = original.clone()
    found = merged(unpack([lora]), original)
    torch.testing.assert_close(found, expected([lora], original), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[1], original[1], atol=0.1)
    for at in {PATHS.index(path) for path in PATHS if path not in paths}:
        assert torch.equal(found[at], original[at])
    assert torch.equal(original, before)


@pytest.mark.parametrize(
    "pair", [("lora", "dora"), ("dora", "loha"), ("loha", "lokr"), ("lokr", "dora")]
)
def test_several_loras_of_several_kinds_add_up_on_the_original_weights(
    pair: tuple[str, str],
):
    one, other = (KINDS[kind] for kind in pair)
    loras = [
        make_lora(one, 0.5),
        make_lora(other, -0.8, ["zero", "two", "three"]),
        make_lora(one, 0.5, ["three", "two"]),
        make_lora(LORA, 0.3, ["four"], alpha=7.0),
    ]
    original = draw(5, OUT, IN)
    found = merged(unpack(loras), original)
    torch.testing.assert_close(found, expected(loras, original), rtol=1e-5, atol=1e-5)


def test_layers_of_one_file_may_differ_in_kind_rank_alpha_and_factors():
    parts = [
        make_lora(LORA, paths=["zero"], alpha=9.0),
        make_lora({"down": (5, IN), "up": (OUT, 5)}, paths=["one"]),
        make_lora({"lokr_w1": (2, 4), "lokr_w2": (OUT // 2, IN // 4)}, paths=["two"]),
        make_lora(KINDS["lokr of wholes"], paths=["three"]),
        make_lora(KINDS["dora"], paths=["four"]),
    ]
    original = draw(5, OUT, IN)
    change = unpack(parts)
    found = merged(change, original)
    torch.testing.assert_close(found, expected(parts, original), rtol=1e-5, atol=1e-5)
    assert change.low_rank[0].shape == (5, OUT, 8), (
        "matrix products need aligned operands"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_one_layer_give_the_same_bits_as_one_chunk(kind: str):
    loras = [
        make_lora(KINDS[kind]),
        make_lora(LOHA, 0.2, ["one", "two"]),
        make_lora(LORA, 0.4),
    ]
    original = draw(5, OUT, IN).half()
    change = unpack(loras, torch.float16)
    whole = merged(change, original)
    for temporary_bytes in (0, 2 * 3 * 4 * OUT * IN):
        assert torch.equal(merged(change, original, temporary_bytes), whole)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "dora", "full difference"])
def test_changes_are_summed_in_float32_and_rounded_once(kind: str):
    loras = [
        make_lora(KINDS[kind], dtype=torch.float16),
        make_lora(LOHA, dtype=torch.bfloat16),
    ]
    original = draw(5, OUT, IN).half()
    found = merged(unpack(loras, torch.float16), original)
    exact = expected(loras, original)
    rounding = 2.0**-11 * exact.abs().clamp_min(2**-14)
    assert ((found.float() - exact).abs() <= rounding + 1e-5).all()


@pytest.mark.parametrize("others", [0, 1])
def test_a_small_alpha_loses_no_digits_in_float16(others: int):
    # Beside another LoRA its strength is in its factors.
    loras = [make_lora({"down": (128, IN), "up": (OUT, 128)}, 0.7, alpha=1.0)]
    loras += [make_lora(LORA, 1.0, alpha=3.0)] * others
    for lora in loras:
        for delta in lora.deltas.values():
            for tensor in delta.tensors.values():
                tensor.mul_(2e-3)
    change = unpack(loras, torch.float16)
    up, down = (factor.float() for factor in change.low_rank)
    found = change.strength * up[..., :128] @ down[:, :128]
    exact = expected(loras[:1], torch.zeros(5, OUT, IN))
    assert ((found - exact).norm() / exact.norm()).item() < 1e-3


def test_a_layer_that_slots_cannot_hold_is_packed_only_where_something_else_holds_it():
    lora = make_lora(LORA, paths=["one", "a convolution"])
    assert merge.pack([lora], GROUPS, dtype=torch.float32) is None
    groups = {**GROUPS, merge.Shape(OUT, IN, 1): ["a convolution"]}
    packed = merge.pack([lora], groups, dtype=torch.float32)
    original = draw(5, OUT, IN)
    found = merged(packed.of(packed.assemble()).stacked[GROUP], original)
    torch.testing.assert_close(found, expected([lora], original), rtol=1e-5, atol=1e-5)
    assert merge.pack([], {}, dtype=torch.float32) is not None


def test_without_a_compiler_for_its_programs_a_gpu_merges_by_torchs_operations(
    monkeypatch, caplog
):
    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(merge, "_failed", threading.Event())
    for name in ("builds_programs", "runs_programs"):
        monkeypatch.setattr(merge, name, lambda _: True)
    monkeypatch.setattr(StackedChange, "run_programs", fail)
    lora = make_lora(LOHA)
    packed = merge.pack([lora], GROUPS, dtype=torch.float32)
    packed.build(torch.device("cuda"))
    assert "without fused kernels: no such instruction" in caplog.text
    original = draw(5, OUT, IN)
    found = merged(unpack([lora]), original)
    torch.testing.assert_close(found, expected([lora], original), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_merges_the_same(kind: str, dtype: torch.dtype):
    loras = [
        make_lora(KINDS[kind], dtype=dtype),
        make_lora(LOHA, 0.2, ["one"], dtype=dtype),
    ]
    original = draw(5, OUT, IN).to(dtype)
    packed = merge.pack(loras, GROUPS, dtype=dtype)
    change = packed.of(packed.assemble().cuda()).stacked[GROUP]
    on_cpu = merged(unpack(loras, dtype), original)
    on_gpu = merged(change, original.cuda())
    torch.testing.assert_close(
        on_gpu.cpu().float(), on_cpu.float(), rtol=2**-7, atol=2**-7
    )
