"""What a worker runs on, and what an hour of it costs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.pricing import price_file, prices
from imagefleet.storage.open import LOCAL_SCHEME
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: The driver of a card that hangs may not answer at all; then the model's loading will tell.
DRIVER_SECONDS = 10.0

#: Where the driver shows no card.
NO_GPU = "none"


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica's GPU class and prices; *dollars_per_hour* is None where no price is known."""

    gpu: str
    dollars_per_hour: float | None
    storage_prices: prices.StoragePrices


#: A replica that nobody has asked about.
UNKNOWN = Replica("unknown", None, prices.FREE_STORAGE)


def find_replica(settings: WorkerSettings) -> Replica:
    """Asks the settings, else the driver and the price table; blocks while the driver answers.

    A group of several GPU classes gets whichever is free, so the card that is there counts. An
    unknown price is logged, and no reason not to work.

    Raises:
        SetupError: the price file is wrong.
    """
    table = price_file.read_table(settings.price_file)
    gpu = _gpu(settings, table)
    dollars_per_hour = settings.price_per_hour
    if dollars_per_hour is None and gpu != NO_GPU:
        try:
            dollars_per_hour = prices.gpu_dollars_per_hour(gpu, settings.priority, table)
        except errors.SetupError as error:
            log.warning(
                "what an image costs is not measured: %s; or give --price-per-hour",
                error,
                extra={"action": "price_unknown"},
            )
    is_local = settings.storage.strip().startswith(LOCAL_SCHEME)
    return Replica(gpu, dollars_per_hour, prices.FREE_STORAGE if is_local else table.storage)


def _gpu(settings: WorkerSettings, table: prices.PriceTable) -> str:
    """The GPU class, as the settings name it or as the driver's card is one."""
    if settings.gpu is not None:
        found = prices.matching_gpus(settings.gpu, table.gpus)
        return found[0] if len(found) == 1 else settings.gpu
    program = shutil.which("nvidia-smi")
    if settings.device == "cpu" or program is None:
        return NO_GPU
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(  # noqa: S603 - the driver's own program, nothing from a job
            [*command, f"--id={_card(settings.device)}"],
            capture_output=True,
            text=True,
            timeout=DRIVER_SECONDS,
            check=True,
        ).stdout
        name, mebibytes = answer.splitlines()[0].rsplit(",", 1)
        return prices.gpu_of_driver(name, int(mebibytes) * 2**20, table)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        log.warning("the GPU's name is not known: %s", error, extra={"action": "gpu_unknown"})
        return NO_GPU


def _card(device: str) -> str:
    """The card that `cuda:N` means among those that this process may see."""
    number = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[number].strip() if number < len(visible) and visible[number] else str(number)
