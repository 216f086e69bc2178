"""A folder as torch and Triton leave it, small, and the key of a machine."""

import json
from dataclasses import replace
from pathlib import Path

from worker.files.kernels.archive import Key

KEY = Key(
    gpu="NVIDIA H200",
    capability="9.0",
    driver="580",
    cuda="12.8",
    torch="2.11.0",
    triton="3.6.0",
    diffusers="0.42.1",
    python="3.11-x86_64",
    engine="0123abcd",
    unet="4567cdef",
)
OTHER = replace(KEY, torch="2.13.0", driver="595")

GRAPH = "fxgraph/ab/fabc/entry"
CUBIN = "triton/XYZ/kernel.cubin"
LIST = "triton/XYZ/__grp__kernel.json"


def compile_into(folder: Path, graph: bytes = b"a graph") -> Path:
    """Leaves what a compiler leaves."""
    group = {"child_paths": {"kernel.cubin": str(folder / CUBIN)}}
    for name, content in {
        GRAPH: graph,
        "aotautograd/a/aabc/entry": b"a graph of AOTAutograd",
        "ab/cab.py": b"# generated",
        CUBIN: bytes(range(256)) * 4,
        LIST: json.dumps(group).encode(),
        "locks/cab.lock": b"",
        "imagefleet-12.lock": b"",
        "imagefleet-12.compiled": b"",
        "lock": b"",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def compile_graph(folder: Path, key: str, entry: str = "entry") -> Path:
    """Leaves another graph, whose file has a name of its own on every machine; returns that."""
    path = folder / "fxgraph" / key[1:3] / key / entry
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"the graph {key}".encode())
    return path
