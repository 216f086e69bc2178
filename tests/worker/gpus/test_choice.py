import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pynvml
import pytest

from imagefleet import errors
from worker import replica
from worker.gpus import choice
from worker.settings import MachineSettings


@dataclass
class Driver:
    """A fake NVML: *cards* in the driver's order, or an error."""

    cards: int = 3
    error: Exception | None = None

    def init(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture
def driver(monkeypatch) -> Driver:
    fake = Driver()
    for name, answer in {
        "nvmlInit": fake.init,
        "nvmlDeviceGetCount": lambda: fake.cards,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUUID": lambda of: f"GPU-{of}aaa",
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def chosen(gpus: str, **changes: Any) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each chosen GPU."""
    settings = MachineSettings(model="m", gpus=gpus, **changes)
    return {each.name: each.visible for each in choice.choose(settings)}


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        # By UUID: CUDA may number them otherwise than nvidia-smi.
        (None, "all", {"0": "GPU-0aaa", "1": "GPU-1aaa", "2": "GPU-2aaa"}),
        (None, "2", {"2": "GPU-2aaa"}),
        (None, "2, 0", {"2": "GPU-2aaa", "0": "GPU-0aaa"}),
        ("2,0", "all", {"0": "2", "1": "0"}),
        ("2,0", "1", {"1": "0"}),
        ("GPU-2aaa,MIG-1", "all", {"0": "GPU-2aaa", "1": "MIG-1"}),
    ],
)
def test_numbers_are_those_of_the_visible_gpus(
    driver: Driver,
    monkeypatch,
    visible: str | None,
    gpus: str,
    expected: dict[str, str],
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert chosen(gpus) == expected


@pytest.mark.parametrize(
    ("gpus", "changes", "visible", "sentence"),
    [
        ("3", {}, None, "there is no GPU 3; there are 0, 1, 2"),
        ("0,5,7", {}, None, "there is no GPU 5, 7; there are 0, 1, 2"),
        (
            "2",
            {},
            "1,2",
            "there is no GPU 2 among CUDA_VISIBLE_DEVICES=1,2; there are 0, 1",
        ),
        ("all", {}, "", "CUDA_VISIBLE_DEVICES= leaves no GPU"),
        ("0,0", {}, None, "named twice"),
        ("all", {}, "1,1", "CUDA_VISIBLE_DEVICES=1,1 names a GPU twice"),
        ("0,1", {"device": "cuda:1"}, None, "leave out --device"),
        ("all", {"device": "cpu"}, None, "a number for each process"),
    ],
)
def test_a_wrong_choice_is_one_sentence(
    driver: Driver,
    monkeypatch,
    gpus: str,
    changes: dict[str, str],
    visible: str | None,
    sentence: str,
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(errors.SetupError, match=r"^--gpus") as raised:
        chosen(gpus, **changes)
    assert sentence in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("cards", "error", "sentence"),
    [
        (0, None, "no NVIDIA GPU"),
        (1, pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), "no NVIDIA GPU"),
        (1, pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "no NVIDIA GPU"),
        (
            1,
            pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
            "cannot be listed",
        ),
    ],
)
def test_a_machine_without_gpus_is_one_sentence(
    driver: Driver, cards: int, error: Exception | None, sentence: str
):
    driver.cards = cards
    driver.error = error
    with pytest.raises(errors.SetupError, match=sentence):
        chosen("all")


def test_a_driver_that_hangs_is_one_sentence(driver: Driver, monkeypatch):
    monkeypatch.setattr(replica, "DRIVER_SECONDS", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", answers.wait)
    with pytest.raises(errors.SetupError, match="does not answer within"):
        chosen("all")
    answers.set()


@pytest.mark.parametrize("gpus", ["", ",", "0,,1", "0 1"])
def test_what_is_no_list_is_refused(gpus: str):
    with pytest.raises(ValueError, match="gpus"):
        MachineSettings(model="m", gpus=gpus)


def test_the_parent_needs_neither_torch_nor_numpy():
    program = (
        "import sys; from worker.gpus import choice, parent\n"
        "sys.exit(' '.join({'torch', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"\n")
