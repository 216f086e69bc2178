import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from imagefleet import errors
from imagefleet.pricing import prices
from worker import replica
from worker.settings import WorkerSettings

AZURE = "https://account.blob.core.windows.net"


class Driver:
    """A fake NVML: one card by any index or UUID, an error, or no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name: str = "NVIDIA GeForce RTX 4090"
        self.mebibytes = 24564
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.cards: list[str] = []
        for name in ("nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"):
            monkeypatch.setattr(pynvml, name, getattr(self, name))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", self.handle)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", self.handle)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        self.answers.wait()
        if self.error is not None:
            raise self.error

    def handle(self, card: int | str) -> object:
        self.cards.append(str(card))
        return self

    def nvmlDeviceGetName(self, handle: object) -> str:  # noqa: N802 - NVML's name
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.mebibytes * 2**20)


@pytest.fixture
def driver(monkeypatch) -> Driver:
    return Driver(monkeypatch)


def find(**changes: Any) -> replica.Replica:
    return replica.find_replica(
        WorkerSettings(model=Path("m"), storage=AZURE, **changes)
    )


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
def test_the_actual_card_has_its_price(
    answer: str, gpu: str, dollars: float | None, driver: Driver
):
    name, mebibytes = answer.split(", ")
    driver.name = name
    driver.mebibytes = int(mebibytes)
    found = find()

    assert (found.gpu, found.dollars_per_hour) == (gpu, dollars)
    assert found.storage_prices == prices.BUILT_IN.storage


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION),
        pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND),
        pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN),
        ValueError("nonsense"),
    ],
)
def test_a_driver_that_fails_does_not_stop_a_worker(
    error: Exception, driver: Driver, caplog
):
    driver.error = error
    found = find()

    assert (found.gpu, found.dollars_per_hour) == (replica.NO_GPU, None)
    assert "the GPU's name is not known" in caplog.text


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_without_a_driver_there_is_no_gpu_and_no_warning(
    code: int, driver: Driver, caplog
):
    driver.error = pynvml.NVMLError(code)

    assert find().gpu == replica.NO_GPU
    assert not caplog.records


def test_a_driver_that_hangs_is_given_up(driver: Driver, monkeypatch):
    monkeypatch.setattr(replica, "DRIVER_SECONDS", 0.1)
    driver.answers.clear()
    driver.error = TimeoutError()  # for the thread, once it is released
    try:
        assert find().gpu == replica.NO_GPU
    finally:
        driver.answers.set()


@pytest.mark.parametrize(
    ("device", "visible", "card"),
    [
        ("auto", None, "0"),
        ("cuda:1", None, "1"),
        ("cuda:1", "4,GPU-5", "GPU-5"),
        ("cuda", "", "0"),
    ],
)
def test_the_driver_is_asked_for_the_card_that_the_worker_uses(
    device: str,
    visible: str | None,
    card: str,
    driver: Driver,
    monkeypatch,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    find(device=device)

    assert driver.cards == [card]


def test_settings_come_before_the_driver(driver: Driver):
    driver.error = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    assert find(gpu="3060ti", priority="high").dollars_per_hour == 0.08
    assert find(gpu="3060ti").gpu == "RTX 3060 Ti 8GB"
    assert find(gpu="mine", price_per_hour=0.5).dollars_per_hour == 0.5
    assert find(price_per_hour=0).dollars_per_hour == 0


def test_a_gpu_without_a_price_is_logged_and_does_not_stop_a_worker(
    caplog,
):
    assert find(gpu="RTX 3060").dollars_per_hour is None
    assert "RTX 3060 8GB, RTX 3060 12GB; or set --price-per-hour" in caplog.text


def test_operations_on_a_folder_cost_nothing(tmp_path):
    settings = WorkerSettings(
        model=Path("m"), storage=f"local:{tmp_path}", device="cpu"
    )

    assert replica.find_replica(settings).storage_prices.blob_write == 0


def test_a_wrong_price_file_is_a_setup_error(tmp_path):
    with pytest.raises(errors.SetupError, match="price file"):
        find(price_file=tmp_path / "none.yaml")
