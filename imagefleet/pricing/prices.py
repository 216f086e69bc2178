"""Prices and speeds of GPU classes (`gpus.toml`), prices of storage, and a fleet's own prices."""

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field

from imagefleet import validation, yaml_file
from imagefleet.errors import SetupError
from imagefleet.storage.protocol import Operations
from imagefleet.validation import JSONDict

Priority = Literal["high", "medium", "low", "batch"]

#: Prices that are older are said to be old.
MAX_AGE_DAYS = 90

#: Bytes of a pixel in the formats of images, and the source.
BYTES_PER_PIXEL = {"png": 1.61, "webp, lossless": 1.29, "jpeg": 0.24}
BYTES_SOURCE = (
    "the mean of four photographs of 512x512, PNG at level 1 and JPEG at quality 90"
)

#: Send, receive and delete; renewals are rare, since jobs are shorter than their leases.
QUEUE_OPERATIONS_PER_MESSAGE = 3

#: The pack itself, and its part of an append of the records of some.
WRITES_PER_PACK = 1.25


class GpuPrices(NamedTuple):
    """$/h of one replica by priority, the source, and the day that it is of, if that is known."""

    dollars_per_hour: Mapping[Priority, float]
    source: str
    as_of: date | None = None


@dataclass(frozen=True, slots=True)
class StoragePrices:
    """Dollars per operation and for a GB's month, the source, and the day that it is of."""

    blob_write: float
    blob_read: float
    queue_operation: float
    gigabyte_month: float
    source: str
    as_of: date | None = None

    def dollars(self, operations: Operations) -> float:
        """The price of operations; capacity is billed by the month."""
        return (
            operations.queue * self.queue_operation
            + operations.blob_writes * self.blob_write
            + operations.blob_reads * self.blob_read
        )


@dataclass(frozen=True, slots=True)
class PriceTable:
    """A fleet's prices; GPU classes by their full names, memory included."""

    gpus: Mapping[str, GpuPrices]
    storage: StoragePrices


class WarmUp(NamedTuple):
    """A fresh node until it draws at full speed, and the source of its figures."""

    first_image_seconds: float
    full_speed_seconds: float
    #: Share of full speed between the two.
    speed: float
    source: str

    def lost(self, starting: float, cold: float) -> float:
        """Share of the paid time that draws nothing.

        *starting*, *cold*: the shares of it before first images and before full speed.
        """
        return starting + (1 - self.speed) * (cold - starting)


_DATA: JSONDict = tomllib.loads(
    Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
)
_GPUS: dict[str, JSONDict] = _DATA["gpus"]

GPU_PRICES_SOURCE: str = _DATA["prices_source"]
SPEEDS_SOURCE: str = _DATA["speeds_source"]

#: By what a node has to compile.
WARM_UPS = {case: WarmUp(**figures) for case, figures in _DATA["warm_up"].items()}

INTERRUPTIONS_SOURCE: str = _DATA["interruptions_source"]

#: Of one node of SaladCloud's.
INTERRUPTIONS_PER_HOUR: float = _DATA["interruptions_per_hour"]

#: SaladCloud's ids, by GPU class.
SALAD_IDS: Mapping[str, str] = {name: gpu["salad_id"] for name, gpu in _GPUS.items()}

#: Images/s of one card (15 steps, 512x512), by GPU class; not known for all of them.
ASSUMED_IMAGES_PER_SECOND: Mapping[str, float] = {
    name: gpu["images_per_second"]
    for name, gpu in _GPUS.items()
    if "images_per_second" in gpu
}

BUILT_IN = PriceTable(
    gpus={
        name: GpuPrices(
            gpu["dollars_per_hour"],
            f"SaladCloud's prices of {gpu['as_of']}"
            if "as_of" in gpu
            else GPU_PRICES_SOURCE,
            gpu.get("as_of", _DATA["as_of"]),
        )
        for name, gpu in _GPUS.items()
    },
    storage=StoragePrices(
        0.055 / 10_000,
        0.0044 / 10_000,
        0.01 / 200_000,
        0.0208,
        "Azure's published examples: hot blob write $0.055 and read $0.0044 per 10,000, a month of"
        " a GB $0.0208 (2024-07), queue operation $0.01 per 200,000 (2019)",
        date(2024, 7, 1),
    ),
)

#: A local folder.
FREE_STORAGE = StoragePrices(
    0.0, 0.0, 0.0, 0.0, "a local folder: no operation is billed"
)


def matching_gpus(name: str, gpus: Collection[str]) -> list[str]:
    """The classes of *gpus* that `RTX 3060 Ti`, `3060ti` or `rtx 3060 12gb` may mean."""
    wanted = _key(name)
    return [gpu for gpu in gpus if wanted in {_key(gpu), _key(gpu.rpartition(" ")[0])}]


def gpu_of_driver(name: str, memory_bytes: int, table: PriceTable = BUILT_IN) -> str:
    """A card's GPU class by its driver's name, with its memory first; else its short name."""
    short = name.strip().removeprefix("NVIDIA ").removeprefix("GeForce ")
    for candidate in (f"{short} {round(memory_bytes / 2**30)}GB", short):
        if len(found := matching_gpus(candidate, table.gpus)) == 1:
            return found[0]
    return short


def find_gpu(name: str, known: Collection[str] = tuple(BUILT_IN.gpus)) -> str:
    """A GPU class's full name for what people write; raises SetupError if it is not clear."""
    found = matching_gpus(name, known)
    if len(found) == 1:
        return found[0]
    if found:
        raise SetupError(f"{name!r} may mean several GPU classes: {', '.join(found)}")
    return validation.choose("GPU class", name, {gpu: gpu for gpu in known})


def gpu_dollars_per_hour(
    gpu: str, priority: Priority, table: PriceTable = BUILT_IN
) -> float:
    """$/h of one replica; raises SetupError as `find_gpu` does, or if there is no such price."""
    name = find_gpu(gpu, table.gpus)
    try:
        return table.gpus[name].dollars_per_hour[priority]
    except KeyError:
        raise SetupError(
            f"there is no price of the {name} at {priority} priority"
        ) from None


def operations(jobs: int, images: int, packs: int = 0) -> Operations:
    """The operations of single jobs and their *images*, and of the *packs* of bundles."""
    return Operations(
        queue=(jobs + packs) * QUEUE_OPERATIONS_PER_MESSAGE,
        blob_writes=images + math.ceil(packs * WRITES_PER_PACK),
    )


def _key(name: str) -> str:
    return "".join(name.lower().split()).removeprefix("rtx")


_Dollars = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]


#: The fields of `StoragePrices`, by the keys of a price file, most per 10,000 operations.
_STORAGE_KEYS = {
    "blob_writes_per_10000": "blob_write",
    "blob_reads_per_10000": "blob_read",
    "queue_operations_per_10000": "queue_operation",
    "gigabyte_month": "gigabyte_month",
}


class _File(BaseModel, extra="forbid", strict=True):
    source: str = Field(min_length=1)
    as_of: date | None = None
    gpus: dict[str, dict[Priority, _Dollars]] = {}
    storage: dict[str, _Dollars] = {}


def read_table(path: Path | None) -> PriceTable:
    """The built-in table, overridden by the file's entries; raises SetupError if it is not valid.

    YAML or JSON: `source`, `as_of` (the day of the prices), `gpus` ($/h by class and priority) and
    `storage` ($/10,000 operations, and for a GB's month).
    """
    if path is None:
        return BUILT_IN
    content = yaml_file.read(path, "the price file") or {}
    with validation.as_error(SetupError, f"the price file {path}: "):
        file = _File.model_validate(content)
    gpus = dict(BUILT_IN.gpus)
    for written, dollars in file.gpus.items():
        gpu = find_gpu(written) if matching_gpus(written, BUILT_IN.gpus) else written
        gpus[gpu] = GpuPrices(dollars, file.source, file.as_of)
    storage = BUILT_IN.storage
    if file.storage:
        own = {
            validation.choose(f"price of storage in {path}", key, _STORAGE_KEYS): price
            / (10_000 if key.endswith("_per_10000") else 1)
            for key, price in file.storage.items()
        }
        storage = replace(storage, **own, source=file.source, as_of=file.as_of)
    return PriceTable(gpus, storage)
