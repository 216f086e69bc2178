"""What compiled kernels that travel are worth: seconds of the warm-up in a new process.

The rows: an empty folder, the same folder again, and an archive of it (as `imagefleet
files make kernels` writes) unpacked under another path. A move that fails shows as misses of
torch's caches.

    python benchmarks/start_up/kernel_cache.py [--model PATH] [--device cuda]

By default the demo checkpoint on the CPU, which needs a C++ compiler and some three minutes.

What matters, read in torch 2.13 and tried with it on a CPU:

- TORCHINDUCTOR_CACHE_DIR holds all but Triton's files: the graphs of AOTAutograd (`aotautograd/`)
  and of Inductor (`fxgraph/`), generated code, results of autotuning (`*.best_config`), and a CPU's
  .so files. Their keys have no absolute paths; both caches of graphs are on by default.
- TRITON_CACHE_DIR holds cubins. They are in the graphs as well, from which torch writes them where
  their folder is missing or empty. Triton's own lists of files (`__grp__*.json`) have absolute
  paths: unpacked elsewhere as they are, Triton compiles again.
- torch.compiler.save_cache_artifacts() has the graphs and the results of autotuning, but no .so
  files and none of Triton's launchers: on a CPU, a small function took 14.6 s with it, 2.9 s with
  the folder, and 20 s without either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from worker.files.kernels import archive
from worker.files.kernels.archive import Key

DEMO = Path(__file__).parents[2] / "demo_model"


def warm_up(model: Path, name: str) -> dict[str, Any]:
    """In this process: loads an engine, compiles it, and counts what torch's caches had."""
    from torch._dynamo.utils import counters

    from worker.engine import checkpoint
    from worker.engine import device as devices
    from worker.engine.slots.engine import SlotEngine

    device = devices.find_device(name)
    dtype = devices.find_dtype("auto", device)
    loaded = checkpoint.load_checkpoint(model, device, dtype, None, None)
    devices.set_up(device, fp16_accumulate=False)
    # Two modes of the UNet take a CPU minutes more and show nothing else.
    modes = ("per_slot", "shared") if device.type == "cuda" else ("shared",)
    slots = None if device.type == "cuda" else 2
    engine = SlotEngine(loaded, slots, backend="inductor", compiled_modes=modes)
    began_at = time.perf_counter()
    engine.warm_up(*engine.default_size)
    return {
        "seconds": round(time.perf_counter() - began_at, 1),
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "hits": counters["inductor"]["fxgraph_cache_hit"],
    }


def measured(model: Path, device: str, folder: Path) -> dict[str, Any]:
    """`warm_up` in a new process with its kernels in *folder*."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join([str(DEMO.parent), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, __file__, "--model", model, "--device", device, "--once"],
        env={**os.environ, **variables},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(warm_up(options.model, options.device)))
        return
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="imagefleet-kernels-") as name:
        first, moved, packed = (Path(name, each) for each in ("first", "moved", "kernels.tar.xz"))
        rows["empty folder"] = measured(options.model, options.device, first)
        rows["same folder"] = measured(options.model, options.device, first)
        key = Key(**dict.fromkeys(Key.__slots__, "this machine"))
        began_at = time.perf_counter()
        files = archive.pack(first, key, packed)
        packed_at = time.perf_counter()
        archive.unpack(packed, moved, key)
        rows["archive"] = {
            "bytes": packed.stat().st_size,
            "unpacked_bytes": archive.check(packed)[1],
            "files": files,
            "pack_seconds": round(packed_at - began_at, 1),
            "unpack_seconds": round(time.perf_counter() - packed_at, 1),
        }
        first.rename(first.with_name("gone"))  # nothing may refer to it
        rows["unpacked elsewhere"] = measured(options.model, options.device, moved)
    for row, figures in rows.items():
        print(f"{row:20}", "  ".join(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
