"""The three examples of the engine as a library, on the demo's checkpoint."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_prompts_a_table_and_an_endless_source_are_drawn(tmp_path, monkeypatch, capsys):
    # With two threads on a machine whose cores are all busy, each waits for the other: 5x slower.
    torch.set_num_threads(1)
    model = ROOT / "demo_model"
    script = ROOT / "examples" / "engine.py"
    monkeypatch.setattr(sys, "argv", [script, str(model), str(model / "loras")])
    monkeypatch.chdir(tmp_path)

    runpy.run_path(str(script), run_name="__main__")

    shown = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png"]
    assert "no LoRA none.safetensors" in shown
    assert shown.count("(128, 128)") == 3
