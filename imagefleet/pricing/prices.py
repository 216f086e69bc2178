"""What things cost: GPU replicas by class and priority, and the storage an image needs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from imagefleet import errors

Priority = Literal["high", "medium", "low", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)

GPU_PRICES_SOURCE = (
    "SaladCloud's GPU classes of 2025-09-22 (SaladTechnologies/salad-recipes,"
    " benchmark/prices.json, commit 8d0d2fc)"
)

#: Dollars per hour of one replica, its CPU and memory included, in the order of PRIORITIES.
#: Prices move: a fleet's owner passes today's with --price-file or --price-per-hour.
_GPU_PRICES: Mapping[str, tuple[float, float, float, float]] = {
    "RTX 2060 6GB": (0.05, 0.040, 0.030, 0.02),
    "RTX 2070 8GB": (0.06, 0.047, 0.033, 0.02),
    "RTX 2080 8GB": (0.08, 0.070, 0.060, 0.05),
    "RTX 2080 Ti 11GB": (0.10, 0.087, 0.073, 0.06),
    "RTX 3050 8GB": (0.07, 0.057, 0.043, 0.03),
    "RTX 3060 8GB": (0.08, 0.063, 0.047, 0.03),
    "RTX 3060 12GB": (0.08, 0.067, 0.053, 0.04),
    "RTX 3060 Ti 8GB": (0.08, 0.063, 0.047, 0.03),
    "RTX 3070 8GB": (0.10, 0.080, 0.060, 0.04),
    "RTX 3070 Ti 8GB": (0.10, 0.087, 0.073, 0.06),
    "RTX 3080 10GB": (0.18, 0.140, 0.100, 0.06),
    "RTX 3080 Ti 12GB": (0.20, 0.160, 0.120, 0.08),
    "RTX 3090 24GB": (0.25, 0.197, 0.143, 0.09),
    "RTX 3090 Ti 24GB": (0.28, 0.220, 0.160, 0.10),
    "RTX A5000 24GB": (0.25, 0.197, 0.143, 0.09),
    "RTX 4060 Ti 16GB": (0.22, 0.173, 0.127, 0.08),
    "RTX 4070 12GB": (0.22, 0.170, 0.120, 0.07),
    "RTX 4070 Ti 12GB": (0.24, 0.187, 0.133, 0.08),
    "RTX 4070 Ti Super 16GB": (0.26, 0.207, 0.153, 0.10),
    "RTX 4080 16GB": (0.28, 0.223, 0.167, 0.11),
    "RTX 4090 24GB": (0.30, 0.253, 0.207, 0.16),
    "RTX 5060 Ti 16GB": (0.18, 0.143, 0.107, 0.07),
    "RTX 5070 12GB": (0.24, 0.187, 0.133, 0.08),
    "RTX 5070 Ti 16GB": (0.28, 0.220, 0.160, 0.10),
    "RTX 5080 16GB": (0.42, 0.335, 0.250, 0.18),
    "RTX 5090 32GB": (0.45, 0.380, 0.310, 0.25),
}

STORAGE_PRICES_SOURCE = (
    "Azure's published examples: hot blob write $0.055 and read $0.0044 per 10,000 (2024-07),"
    " queue operation $0.01 per 200,000 (2019)"
)

#: Send, receive and delete; a renewal is the exception, for jobs are short beside their lease.
QUEUE_OPERATIONS_PER_JOB = 3


@dataclass(frozen=True, slots=True)
class GpuPrices:
    """Dollars per hour of one replica by priority, and where they come from."""

    dollars_per_hour: Mapping[Priority, float]
    source: str


@dataclass(frozen=True, slots=True)
class StoragePrices:
    """Dollars of one operation, and where they come from."""

    blob_write: float
    blob_read: float
    queue_operation: float
    source: str


@dataclass(frozen=True, slots=True)
class PriceTable:
    """What a fleet pays; GPU classes by their full names, memory included."""

    gpus: Mapping[str, GpuPrices]
    storage: StoragePrices


BUILT_IN = PriceTable(
    gpus={
        gpu: GpuPrices(dict(zip(PRIORITIES, dollars, strict=True)), GPU_PRICES_SOURCE)
        for gpu, dollars in _GPU_PRICES.items()
    },
    storage=StoragePrices(0.055 / 10_000, 0.0044 / 10_000, 0.01 / 200_000, STORAGE_PRICES_SOURCE),
)

#: A folder of one's own machine.
FREE_STORAGE = StoragePrices(0.0, 0.0, 0.0, "a local folder: no operation is billed")


def as_priority(name: str) -> Priority:
    """Raises SetupError for what is no priority."""
    for priority in PRIORITIES:
        if name == priority:
            return priority
    raise errors.SetupError(f"--priority: should be {', '.join(PRIORITIES)}, not {name}")


def matching_gpus(name: str, gpus: Collection[str]) -> list[str]:
    """The classes of *gpus* that `RTX 3060 Ti`, `3060ti` or `rtx 3060 12gb` may stand for."""
    wanted = _key(name)
    return [gpu for gpu in gpus if wanted in {_key(gpu), _key(gpu.rpartition(" ")[0])}]


def gpu_of_driver(name: str, memory_bytes: int, table: PriceTable = BUILT_IN) -> str:
    """The GPU class for what a driver calls the card; its short name where there is no such class.

    Cards of one name come with several memories, so that counts before the name alone.
    """
    short = name.strip().removeprefix("NVIDIA ").removeprefix("GeForce ")
    for candidate in (f"{short} {round(memory_bytes / 2**30)}GB", short):
        if len(found := matching_gpus(candidate, table.gpus)) == 1:
            return found[0]
    return short


def find_gpu(name: str, table: PriceTable = BUILT_IN) -> str:
    """A GPU class's full name for what people write.

    Raises:
        SetupError: the name is unknown, or stands for several classes.
    """
    found = matching_gpus(name, table.gpus)
    if len(found) == 1:
        return found[0]
    if found:
        raise errors.SetupError(f"{name!r} stands for several GPU classes: {', '.join(found)}")
    keys = {_key(gpu): gpu for gpu in table.gpus}
    close = [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=3)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(table.gpus)}"
    raise errors.SetupError(f"{name!r} is no GPU class with a known price; {hint}")


def gpu_dollars_per_hour(gpu: str, priority: Priority, table: PriceTable = BUILT_IN) -> float:
    """Dollars per hour of one replica.

    Raises:
        SetupError: as for find_gpu, or the class has no price at that priority.
    """
    name = find_gpu(gpu, table)
    try:
        return table.gpus[name].dollars_per_hour[priority]
    except KeyError:
        raise errors.SetupError(
            f"no price is known for the {name} at {priority} priority"
        ) from None


def storage_dollars(jobs: int, images: int, table: PriceTable = BUILT_IN) -> float:
    """What the operations on queue and blobs cost; keeping the images is billed by the month."""
    queue_dollars = jobs * QUEUE_OPERATIONS_PER_JOB * table.storage.queue_operation
    return queue_dollars + images * table.storage.blob_write


def _key(name: str) -> str:
    return "".join(name.lower().split()).removeprefix("rtx")
