from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.pricing import prices
from worker import replica
from worker.settings import WorkerSettings

AZURE = "https://account.blob.core.windows.net"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a program in the place of nvidia-smi; its arguments end up in the returned file."""

    def install(script: str) -> Path:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return tmp_path / "arguments"

    return install


def find(**changes: Any) -> replica.Replica:
    return replica.find_replica(WorkerSettings(model=Path("m"), storage=AZURE, **changes))


@pytest.mark.parametrize(
    ("answer", "gpu", "dollars"),
    [
        ("NVIDIA GeForce RTX 3060 Ti, 8192", "RTX 3060 Ti 8GB", 0.03),
        ("NVIDIA GeForce RTX 3060, 12288", "RTX 3060 12GB", 0.04),
        ("NVIDIA GeForce RTX 3060, 8192", "RTX 3060 8GB", 0.03),
        ("NVIDIA GeForce RTX 4090, 24564", "RTX 4090 24GB", 0.16),
        ("NVIDIA RTX A5000, 23028", "RTX A5000 24GB", 0.09),
        ("NVIDIA H200, 143771", "H200", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 16376", "RTX 4090 Laptop GPU", None),
    ],
)
def test_the_card_that_is_there_has_its_price(
    answer: str, gpu: str, dollars: float | None, driver: Callable[[str], Path]
) -> None:
    driver(f'echo "{answer}"')
    found = find()

    assert (found.gpu, found.dollars_per_hour) == (gpu, dollars)
    assert found.storage_prices == prices.BUILT_IN.storage


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense", "echo '[N/A], [N/A]'", "true"])
def test_a_driver_that_does_not_tell_ends_no_worker(
    script: str, driver: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    driver(script)
    found = find()

    assert (found.gpu, found.dollars_per_hour) == (replica.NO_GPU, None)
    assert "the GPU's name is not known" in caplog.text


def test_a_driver_that_hangs_is_given_up(
    driver: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "DRIVER_SECONDS", 0.1)
    driver("exec sleep 30")

    assert find().gpu == replica.NO_GPU


@pytest.mark.parametrize(
    ("device", "visible", "card"),
    [("auto", None, "0"), ("cuda:1", None, "1"), ("cuda:1", "4,GPU-5", "GPU-5"), ("cuda", "", "0")],
)
def test_the_driver_is_asked_for_the_card_that_the_worker_uses(
    device: str,
    visible: str | None,
    card: str,
    driver: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    arguments = driver("echo 'NVIDIA GeForce RTX 4090, 24564'")
    find(device=device)

    assert f"--id={card}" in arguments.read_text().split()


def test_settings_come_before_the_driver(driver: Callable[[str], Path]) -> None:
    driver("exit 1")

    assert find(gpu="3060ti", priority="high").dollars_per_hour == 0.08
    assert find(gpu="3060ti").gpu == "RTX 3060 Ti 8GB"
    assert find(gpu="mine", price_per_hour=0.5).dollars_per_hour == 0.5
    assert find(price_per_hour=0).dollars_per_hour == 0


def test_a_gpu_without_a_price_is_told_and_ends_no_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert find(gpu="RTX 3060").dollars_per_hour is None
    assert "RTX 3060 8GB, RTX 3060 12GB; or give --price-per-hour" in caplog.text


def test_a_folder_costs_nothing_an_operation(tmp_path: Path) -> None:
    settings = WorkerSettings(model=Path("m"), storage=f"local:{tmp_path}", device="cpu")

    assert replica.find_replica(settings).storage_prices.blob_write == 0


def test_a_wrong_price_file_is_the_operators_to_mend(tmp_path: Path) -> None:
    with pytest.raises(errors.SetupError, match="price file"):
        find(price_file=tmp_path / "none.yaml")
