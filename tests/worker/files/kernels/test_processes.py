"""Two real processes with torch's compiler: what one compiles, the other takes from the storage."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import polling
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from kernel_files import KEY

pytestmark = pytest.mark.slow

#: Compiles products of matrices as the engine does, with a worker's kernels; says how. It is one
#: worker after the other, each with a cache and a number of graphs: torch takes seconds to import.
WORKER = """
import asyncio, json, os, sys
import torch
from torch._dynamo.utils import counters
from imagefleet.files import safetensors
from imagefleet.storage.open import open_storage
from kernel_files import KEY
from worker.engine.kernels.compile import Compiled, trace_on_thread
from worker.files.kernels import cache
from worker.settings import WorkerSettings

cache.find_key = lambda *_: KEY
cache.SETTLE_SECONDS = 0.0
safetensors.REST_SECONDS = 0.0

def multiply(a, b):
    return torch.mm(a, b)  # a library's call: no C++ compiler is needed

async def work(folder, graphs):
    torch._dynamo.reset()
    counters.clear()
    os.environ.pop(cache.TORCH_FOLDER, None)
    settings = WorkerSettings(model="stand-in", cache=folder)
    async with (
        open_storage(settings) as storage,
        cache.fetching(settings, storage.files) as kernels,
    ):
        for size in range(2, 2 + int(graphs)):
            two, name = (torch.ones(size, size), torch.ones(size, size)), f"a product of {size}"
            product = Compiled(name, multiply, two, backend="inductor", pool=None)
            traced = trace_on_thread(product, torch.device("cpu"), kernels.compiling)
            await asyncio.wrap_future(traced)
            assert product().eq(size).all() and product.is_compiled
        found = counters["inductor"]
        graphs = found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]
        print(json.dumps([*graphs, kernels.origin]), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

for given in zip(sys.argv[1::2], sys.argv[2::2]):
    asyncio.run(work(*given))
"""


@contextmanager
def workers(
    settings: StorageSettings, *given: Path | int
) -> Iterator[Callable[[], list[object]]]:
    """A process of workers, the first of which runs until the second is asked for.

    Yields what asks for the next: how many graphs it compiled and found, and where from.
    """
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
        [sys.executable, "-c", WORKER, *map(str, given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[4],
    )
    asked = itertools.count()

    def ask() -> list[object]:
        assert process.stdin is not None
        assert process.stdout is not None
        if next(asked):
            process.stdin.write("\n")
            process.stdin.flush()
        return list(json.loads(process.stdout.readline()))

    with process:
        yield ask
        assert process.communicate()[0] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("storage_settings", ["local"], indirect=True)
async def test_a_second_worker_compiles_nothing_that_the_first_has_compiled(
    storage: Storage, storage_settings: StorageSettings, tmp_path
):
    async def stored() -> list[str]:
        return [name async for name in storage.files.names(f"kernels/{KEY.name}/")]

    a, b = tmp_path / "a", tmp_path / "b"
    with workers(storage_settings, a, 1) as ask:
        assert ask() == [1, 0, "compiled"]
        await polling.until(stored)
    with workers(storage_settings, b, 2, a, 2) as ask:
        assert ask() == [1, 1, "compiled"], "only what the first had not"
        await polling.until(stored, lambda names: len(names) > 1)
        assert ask() == [0, 2, "store"]
