from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from imagefleet import errors
from worker.engine import contract
from worker.engine.lora import file as lora_file

Weights = dict[str, torch.Tensor]


def named(path: Path) -> contract.Lora:
    return contract.Lora(path.stem, path, 1.0, 1.0)


def first(weights: Weights, ending: str) -> str:
    return next(key for key in sorted(weights) if key.endswith(ending))


def tensors_of(file: lora_file.LoraFile) -> dict[tuple[object, ...], torch.Tensor]:
    return {
        (network, path, name): tensor
        for network, by_path in file.deltas.items()
        for path, delta in by_path.items()
        for name, tensor in delta.tensors.items()
    }


@pytest.fixture
def weights(lora_paths: list[Path]) -> Weights:
    return load_file(lora_paths[0])


def test_files_of_one_layout_keep_their_own_numbers_and_alphas(
    cache: lora_file.LoraCache, weights: Weights, tmp_path
):
    other = {key: tensor * 2 for key, tensor in weights.items()}
    save_file(weights, tmp_path / "a.safetensors", metadata={"ss_epoch": "1"})
    save_file(
        other, tmp_path / "b.safetensors", metadata={"ss_epoch": "2", "more": "{}"}
    )
    one = cache.get(named(tmp_path / "a.safetensors"))
    hits = cache._layers._layouts.cache_info().hits
    two = cache.get(named(tmp_path / "b.safetensors"))
    assert cache._layers._layouts.cache_info().hits == hits + 1
    assert tensors_of(one).keys() == tensors_of(two).keys()
    for key, tensor in tensors_of(one).items():
        assert torch.equal(tensors_of(two)[key], tensor * 2)
    for network, by_path in one.deltas.items():
        for path, delta in by_path.items():
            assert two.deltas[network][path].scale == delta.scale * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("ending", ["lora_up.weight", "alpha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_number_that_is_not_finite_is_found_in_a_file_of_a_known_layout(
    cache: lora_file.LoraCache,
    weights: Weights,
    tmp_path,
    dtype: torch.dtype,
    ending: str,
    value: float,
):
    weights = {key: tensor.to(dtype) for key, tensor in weights.items()}
    save_file(weights, tmp_path / "good.safetensors")
    cache.get(named(tmp_path / "good.safetensors"))
    weights[first(weights, ending)].view(-1)[-1] = value
    save_file(weights, tmp_path / "bad.safetensors")
    with pytest.raises(errors.UnusableFileError, match="'bad' is damaged") as refusal:
        cache.get(named(tmp_path / "bad.safetensors"))
    assert first(weights, ending) in refusal.value.message


def test_the_largest_numbers_of_a_type_are_finite(
    cache: lora_file.LoraCache, weights: Weights, tmp_path
):
    for key, tensor in weights.items():
        if not key.endswith("alpha"):
            weights[key] = torch.full_like(
                tensor.half(), torch.finfo(torch.float16).max
            )
    save_file(weights, tmp_path / "a.safetensors")
    cache.get(named(tmp_path / "a.safetensors"))
