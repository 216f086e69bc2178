"""Two real processes with torch's compiler: what one compiles, the other takes from the storage."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import polling
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from kernel_files import KEY

pytestmark = pytest.mark.slow

#: Compiles a product of matrices as the engine does, with a worker's kernels; says how.
WORKER = """
import asyncio, json, sys
import torch
from torch._dynamo.utils import counters
from imagefleet.storage.open import open_storage
from kernel_files import KEY
from worker.engine.kernels.compile import Compiled, trace_on_thread
from worker.files.kernels import cache
from worker.settings import WorkerSettings

cache.find_key = lambda *_: KEY
cache.SETTLE_SECONDS = 0.0

def multiply(a, b):
    return torch.mm(a, b)  # a library's call: no C++ compiler is needed

async def main():
    settings = WorkerSettings(model="stand-in", cache=sys.argv[1])
    async with (
        open_storage(settings) as storage,
        cache.fetching(settings, storage.files) as kernels,
    ):
        for size in range(2, 2 + int(sys.argv[2])):
            two, name = (torch.ones(size, size), torch.ones(size, size)), f"a product of {size}"
            product = Compiled(name, multiply, two, backend="inductor", pool=None)
            traced = trace_on_thread(product, torch.device("cpu"), kernels.compiling)
            await asyncio.wrap_future(traced)
            assert product().eq(size).all() and product.is_compiled
        found = counters["inductor"]
        graphs = found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]
        print(json.dumps([*graphs, kernels.origin]), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextmanager
def worker(
    settings: StorageSettings, cache: Path, graphs: int
) -> Iterator[tuple[int, int, str]]:
    """Graphs that a worker compiled and found, and where from; it runs during the block."""
    support = Path(__file__).parents[2] / "engine" / "support"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(support))),
        "IMAGEFLEET_STORAGE": settings.storage,
        "IMAGEFLEET_QUEUE": settings.queue,
        "IMAGEFLEET_CONTAINER": settings.container,
        "IMAGEFLEET_FILES_CONTAINER": settings.files_container,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, cache, str(graphs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[4],
    )
    with process:
        assert process.stdout is not None
        yield tuple(json.loads(process.stdout.readline()))
        assert process.communicate()[0] == ""
    assert process.returncode == 0


async def test_a_second_worker_compiles_nothing_that_the_first_has_compiled(
    storage: Storage, storage_settings: StorageSettings, tmp_path
):
    async def stored() -> list[str]:
        return [name async for name in storage.files.names(f"kernels/{KEY.name}/")]

    with worker(storage_settings, tmp_path / "a", 1) as first:
        assert first == (1, 0, "compiled")
        await polling.until(stored)
    with worker(storage_settings, tmp_path / "b", 2) as second:
        assert second == (1, 1, "compiled"), "only what the first had not"
        await polling.until(stored, lambda names: len(names) > 1)
    with worker(storage_settings, tmp_path / "a", 2) as again:
        assert again == (0, 2, "store")
