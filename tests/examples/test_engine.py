"""The three examples of the engine as a library, on the demo's checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_prompts_a_table_and_an_endless_source_are_drawn(tmp_path):
    model = ROOT / "demo_model"

    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "engine.py", model, model / "loras"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png"]
    assert "no LoRA none.safetensors" in ended.stdout
    assert ended.stdout.count("(128, 128)") == 3
