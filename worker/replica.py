"""The machine that a worker runs on, and its price."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pynvml

from imagefleet.errors import SetupError
from imagefleet.pricing import prices
from imagefleet.telemetry.logs import log
from worker import tasks
from worker.settings import WorkerSettings

#: The driver of a hung card may not answer at all; loading the model will then fail.
DRIVER_SECONDS = 10.0

#: The GPU class where the driver reports no card.
NO_GPU = "none"

#: NVML's errors where there is no driver at all.
NO_DRIVER = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Replica:
    """One replica's GPU class and prices; *dollars_per_hour* is None where no price is known."""

    gpu: str
    dollars_per_hour: float | None
    storage_prices: prices.StoragePrices


#: The replica of tests and measurements without a price.
UNKNOWN = Replica("unknown", None, prices.FREE_STORAGE)


def find_replica(settings: WorkerSettings) -> Replica:
    """The GPU and prices by the settings, else by driver and price table; blocks on the driver.

    A group of several GPU classes gets whichever is free, so the actual card counts. An unknown
    price is logged and does not stop the worker; a wrong price file is a SetupError.
    """
    table = prices.read_table(settings.price_file)
    gpu = _gpu(settings, table)
    dollars_per_hour = settings.price_per_hour
    if dollars_per_hour is None and gpu != NO_GPU:
        try:
            dollars_per_hour = prices.gpu_dollars_per_hour(
                gpu, settings.priority, table
            )
        except SetupError as error:
            log.warning(
                f"no image has a cost: {error}; or set --price-per-hour",
                action="price_unknown",
            )
    storage = table.storage if settings.is_billed else prices.FREE_STORAGE
    return Replica(gpu, dollars_per_hour, storage)


def _gpu(settings: WorkerSettings, table: prices.PriceTable) -> str:
    """The GPU class by the settings, else by the driver."""
    if settings.gpu is not None:
        found = prices.matching_gpus(settings.gpu, table.gpus)
        return found[0] if len(found) == 1 else settings.gpu
    if settings.device == "cpu":
        return NO_GPU

    def name_and_bytes() -> tuple[str, int]:
        handle = card_handle(settings.device)
        return pynvml.nvmlDeviceGetName(handle), int(
            pynvml.nvmlDeviceGetMemoryInfo(handle).total
        )

    answer = ask_driver(name_and_bytes)
    if isinstance(answer, NO_DRIVER):
        return NO_GPU
    if isinstance(answer, Exception):
        log.warning(f"the GPU's name is not known: {answer}", action="gpu_unknown")
        return NO_GPU
    return prices.gpu_of_driver(*answer, table)


def ask_driver(question: Callable[[], Answer]) -> Answer | Exception:
    """Calls *question*, which uses NVML; returns its result, or the error it raised."""

    def ask() -> Answer:
        pynvml.nvmlInit()
        return question()

    try:  # a driver that hangs must keep the worker neither from starting nor exiting
        return tasks.in_daemon_thread(ask, "ask the driver").result(DRIVER_SECONDS)
    except TimeoutError:
        return TimeoutError(f"the driver does not answer within {DRIVER_SECONDS:g} s")
    except Exception as error:  # noqa: BLE001 - no answer of the driver ends a worker
        return error


def card_handle(device: str) -> object:
    """NVML's handle of the card that `device` means, by its place among CUDA_VISIBLE_DEVICES.

    For `ask_driver`.
    """
    number = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    there = number < len(visible) and visible[number]
    card = visible[number].strip() if there else str(number)
    if card.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(card))
    return pynvml.nvmlDeviceGetHandleByUUID(card)
