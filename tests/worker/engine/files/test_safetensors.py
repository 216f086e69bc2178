import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from worker.engine.files import safetensors


def write(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return path


def entry(
    begin: Any = 0, end: Any = 8, shape: Any = (4,), dtype: Any = "F16"
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(path: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    content = safetensors.read(path)
    places = safetensors.places(content.header, len(content.data))
    return {
        name: place.of(content.data) for name, place in places.items()
    }, content.metadata


def test_tensors_are_as_the_library_wrote_them(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "byte": torch.tensor([7], dtype=torch.uint8),  # what follows is not aligned
        "c": torch.randn(3, 4, 1, 1).half(),
        "a": torch.randn(2, 5),
        "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"ss_network_dim": "4"})
    found, metadata = read(path)
    assert metadata == {"ss_network_dim": "4"}
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "header",
    [
        b"no JSON",
        b"[]",
        b"{" * 2000,
        {"a": {}},
        {"a": 3},
        {"a": entry(shape=3)},
        {"a": entry(shape=(-4,))},
        {"a": entry(shape=(True, 4))},
        {"a": entry(shape=(2,))},
        {"a": entry(begin=-8, end=0)},
        {"a": entry(begin=8, end=0, shape=(-4,))},
        {"a": entry(end=16, shape=(8,))},
        {"a": entry(end=4, shape=(2,))},
        {"a": entry(begin=0.0)},
        {"a": entry(), "__metadata__": {"epoch": 3}},
        {"a": entry(), "__metadata__": ["epoch"]},
        {"a": entry(shape=(10**30,), end=2 * 10**30)},
        {"a": entry(), "__metadata__": {}, "b": entry(end=10, shape=(5,))},
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header):
    with pytest.raises(safetensors.UnusableError, match="not a complete"):
        read(write(tmp_path / "a.safetensors", header))


def test_a_tensor_that_is_not_aligned_is_read(tmp_path):
    """The library sorts tensors by their types' sizes; other writers need not."""
    header = {"a": entry(0, 1, (1,), "F8_E4M3"), "b": entry(1, 9)}
    data = bytes(1) + torch.ones(4).half().numpy().tobytes()
    found, _ = read(write(tmp_path / "a.safetensors", header, data))
    assert found["b"].tolist() == [1.0] * 4


def test_an_unknown_type_is_named(tmp_path):
    path = write(tmp_path / "a.safetensors", {"a": entry(dtype="F6_E2M3")})
    with pytest.raises(safetensors.UnusableError, match="F6_E2M3"):
        read(path)


@settings(max_examples=200)
@given(st.data())
def test_a_file_that_ends_anywhere_or_has_other_bytes_is_read_or_refused(
    tmp_path_factory, data: st.DataObject
):
    whole = bytearray(save({"a": torch.ones(4), "b": torch.ones(2, 3).half()}))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
        whole[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:end])
    try:
        tensors, _ = read(path)
    except safetensors.UnusableError:
        return
    assert end == len(whole), "cut short"
    for tensor in tensors.values():
        tensor.float().sum().item()
