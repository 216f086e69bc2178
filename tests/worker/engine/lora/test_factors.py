from typing import Any

import pytest
import torch

from tests.worker.engine.lora import test_formats as formats
from worker.engine.lora import file, kinds

OUT = 24
IN = 16


#: A convolution's change of each kind, and the highest rank that it may have.
LOW_RANK = {
    formats.locon: 3,
    formats.locon_in_tucker_form: 3,
    formats.loha: 9,
    formats.loha_in_tucker_form: 9,
    formats.lokr: 6,
    formats.lokr_of_four: 9,
    formats.lokr_in_tucker_form: 6,
    formats.lokr_of_wholes: 12,
}


def tensors_of(kind: Any) -> dict[str, torch.Tensor]:
    parts = formats.parts_of(kind, OUT, IN, 3, 3)
    return {name: torch.from_numpy(part).float() for name, part in parts}


@pytest.mark.parametrize("kind", LOW_RANK)
def test_factors_multiply_to_the_whole_change(kind):
    rank = LOW_RANK[kind]
    delta = file.make_delta(tensors_of(kind), alpha=1.5)
    factors = kinds.factorise(delta.tensors, rank)
    up, down = factors
    assert up.shape == (OUT, rank)
    assert down.shape == (rank, IN * 9)
    expected = delta.compute(torch.zeros(OUT, IN, 3, 3))
    actual = delta.scale * (up @ down).view(OUT, IN, 3, 3)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert kinds.factorise(delta.tensors, rank - 1) is None


def test_small_factors_do_not_underflow_in_float16():
    tensors = {
        name: tensor * (1e-3 if name.endswith("_b") else 1.0)
        for name, tensor in tensors_of(formats.loha).items()
    }
    factors = kinds.factorise(tensors, 9)
    up, down = (each.half().float() for each in factors)
    expected = file.make_delta(tensors, alpha=None).compute(torch.zeros(OUT, IN, 3, 3))
    error = (up @ down).view_as(expected) - expected
    assert error.norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("extra", ["dora_scale", "magnitude"])
def test_a_rescaled_weight_has_no_factors(extra: str):
    tensors = {**tensors_of(formats.locon), extra: torch.ones(OUT)}
    assert kinds.factorise(tensors, 128) is None
