"""A real worker that draws few-step jobs in bundles, 300 ms from its storage; needs a GPU."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "engine.py"

#: Without LoRA and with another one in each job: the engine alone, and the worker.
ROWS = (
    "four_steps_engine",
    "four_steps",
    "four_steps_lora_engine",
    "four_steps_lora",
)


def measure(bundle: int, *given: str) -> dict[str, Any]:
    """The figures of `benchmarks/results/bundles.json` that need a GPU; *given* to `engine.py`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        told = ["--rows", ",".join(ROWS), "--bundle", str(bundle), "--out", str(out)]
        subprocess.run([sys.executable, str(SCRIPT), *told, *given], check=True)
        rows = json.loads(out.read_text())["rows"]
    engine, plain, _, loras = (rows[name]["images_per_second"] for name in ROWS)
    return {
        "over_engine_4_steps": round(plain / engine, 4),
        "idle_fraction_4_steps": round(rows["four_steps"]["idle_fraction"], 4),
        "lora_over_no_lora_4_steps": round(loras / plain, 4),
        "gpu_rows": rows,
    }
