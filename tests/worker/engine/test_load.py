from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from imagefleet import errors
from worker.engine import device, load


def test_without_torch_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    for name in ("worker.engine.slots.engine", "worker.engine.checkpoint"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delattr("worker.engine.slots.engine")
    monkeypatch.delattr("worker.engine.checkpoint")
    with pytest.raises(errors.SetupError, match=r"pip install imagefleet\[worker\]"):
        load.load_engine(checkpoint)


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:99"])
def test_an_unknown_device_is_a_setup_error(checkpoint: Path, name: str) -> None:
    with pytest.raises(errors.SetupError, match=name):
        load.load_engine(checkpoint, name)


def test_a_gpu_always_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of torch's functions reject `cuda` without a number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert device.find_device("auto") == torch.device("cuda", 0)
    assert device.find_device("cuda") == torch.device("cuda", 0)
    assert device.find_device("cuda:1") == torch.device("cuda", 1)


def test_auto_precision_is_float32_on_a_cpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine: Any = load.load_engine(checkpoint)
    assert engine._checkpoint.unet.dtype == torch.float32
