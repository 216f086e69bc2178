"""Torch's own caches, from one folder through an archive into another."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._inductor.utils import clear_caches

from kernel_files import KEY
from worker.engine.kernels.compile import Compiled
from worker.files.kernels import archive, cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Only a library's call, so that no C++ compiler is needed."""
    return torch.mm(a, b)


def misses() -> int:
    """Graphs that torch compiles of a function whose tensors it has not seen in this process."""
    torch.compiler.reset()
    clear_caches()
    counters.clear()
    tensors = torch.ones(8, 8), torch.ones(8, 8)
    compiled = Compiled("a product", multiply, tensors, backend="inductor", pool=None)
    assert compiled().eq(8).all()
    assert compiled.is_compiled
    found = counters["inductor"]
    assert found["fxgraph_cache_miss"] + found["fxgraph_cache_hit"] == 1
    return int(found["fxgraph_cache_miss"])


def test_torch_finds_its_kernels_in_another_folder(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "somewhere" / "else"
    monkeypatch.setenv(cache.TORCH_FOLDER, str(there))
    assert misses() == 1
    archive.pack(there, KEY, tmp_path / "kernels.tar.xz")
    there.rename(tmp_path / "gone")

    monkeypatch.setenv(cache.TORCH_FOLDER, str(here))
    archive.unpack(tmp_path / "kernels.tar.xz", here, KEY)
    assert misses() == 0


def test_the_folder_that_torch_takes_when_it_is_imported_is_nobodys_choice(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(cache.TORCH_FOLDER, default_cache_dir())
    monkeypatch.setenv(cache.TRITON_FOLDER, str(tmp_path / "triton"))
    assert cache.use_folder(tmp_path, KEY) == tmp_path / "kernels" / KEY.name
    assert cache_dir() == str(tmp_path / "kernels" / KEY.name)
