import pytest
import torch

from worker.engine.lora import file, kinds

OUT, IN = 24, 16


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


#: A convolution's change of each kind, with the highest rank that it may have.
LOW_RANK = {
    "LoCon": (3, {"down": noise(3, IN, 3, 3), "up": noise(OUT, 3, 1, 1)}),
    "Tucker": (
        4,
        {
            "down": noise(2, IN, 1, 1),
            "mid": noise(4, 2, 3, 3),
            "up": noise(OUT, 4, 1, 1),
        },
    ),
    "LoHa": (
        6,
        {
            "hada_w1_a": noise(OUT, 2),
            "hada_w1_b": noise(2, IN * 9),
            "hada_w2_a": noise(OUT, 3),
            "hada_w2_b": noise(3, IN * 9),
        },
    ),
    "LoHa with cores": (
        4,
        {
            "hada_w1_a": noise(2, OUT),
            "hada_w1_b": noise(2, IN),
            "hada_t1": noise(2, 2, 3, 3),
            "hada_w2_a": noise(2, OUT),
            "hada_w2_b": noise(2, IN),
            "hada_t2": noise(2, 2, 3, 3),
        },
    ),
    "LoKr": (
        8,
        {
            "lokr_w1": noise(4, 4),
            "lokr_w2_a": noise(6, 2),
            "lokr_w2_b": noise(2, 4 * 9),
        },
    ),
    "LoKr with a core": (
        6,
        {
            "lokr_w1_a": noise(4, 3),
            "lokr_w1_b": noise(3, 4),
            "lokr_w2_a": noise(2, 6),
            "lokr_w2_b": noise(2, 4),
            "lokr_t2": noise(2, 2, 3, 3),
        },
    ),
    "LoKr with whole halves": (
        12,
        {"lokr_w1": noise(4, 2), "lokr_w2": noise(6, 8, 3, 3)},
    ),
}


@pytest.mark.parametrize("kind", LOW_RANK)
def test_factors_multiply_to_the_whole_change(kind: str) -> None:
    rank, tensors = LOW_RANK[kind]
    delta = file.make_delta(tensors, alpha=1.5)
    factors = kinds.factorise(delta.tensors, rank)
    assert factors is not None
    up, down = factors
    assert up.shape == (OUT, rank)
    assert down.shape == (rank, IN * 9)
    expected = delta.compute(torch.zeros(OUT, IN, 3, 3))
    actual = delta.scale * (up @ down).view(OUT, IN, 3, 3)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert kinds.factorise(delta.tensors, rank - 1) is None


def test_small_factors_do_not_underflow_in_float16() -> None:
    tensors = {
        name: tensor * (1e-3 if name.endswith("_b") else 1.0)
        for name, tensor in LOW_RANK["LoHa"][1].items()
    }
    factors = kinds.factorise(tensors, 6)
    assert factors is not None
    up, down = (each.half().float() for each in factors)
    expected = file.make_delta(tensors, alpha=None).compute(torch.zeros(OUT, IN, 3, 3))
    error = (up @ down).view_as(expected) - expected
    assert error.norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("extra", ["dora_scale", "magnitude"])
def test_a_rescaled_weight_has_no_factors(extra: str) -> None:
    tensors = {**LOW_RANK["LoCon"][1], extra: torch.ones(OUT)}
    assert kinds.factorise(tensors, 128) is None
