"""What `imagefleet worker --gpus` does before any worker starts."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fleet.worker import command
from in_process import Imagefleet
from worker.gpus import choice
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--gpus", "all"], "no (NVIDIA )?GPU"),
        (["--gpus", "0,1"], "no (NVIDIA )?GPU"),
        (["--gpus", "all", "--device", "cpu"], "a number for each process"),
        (["--gpus", "0,,1"], "--gpus / IMAGEFLEET_GPUS"),
        (["--gpus", "0,1", "--device", "cpu", "--model", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_starts(
    imagefleet: Imagefleet, flags: list[str], sentence: str
):
    done = imagefleet(
        "worker", "--model", str(ROOT / "demo_model"), *flags, CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.search(sentence, line)
    assert "starting" not in line


@pytest.mark.parametrize(
    ("gpu", "variable", "value"),
    [
        (Gpu("2", "GPU-x"), "CUDA_VISIBLE_DEVICES", "GPU-x"),
        (Gpu("0"), "OMP_NUM_THREADS", "4"),
    ],
)
def test_a_single_gpu_is_this_processs_own_and_needs_no_parent(
    monkeypatch, gpu: Gpu, variable: str, value: str
):
    def run(settings: MachineSettings) -> Any:
        raise StopIteration(os.environ[variable], settings.device)

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(choice, "choose", lambda _: [gpu])
    monkeypatch.setattr(command, "_run", run)
    with pytest.raises(StopIteration) as ran:
        command.command.__wrapped__(  # type: ignore[attr-defined]
            MachineSettings(
                model=str(ROOT / "demo_model"), gpus="all", log_format="json"
            )
        )
    assert ran.value.args == (value, "auto")
