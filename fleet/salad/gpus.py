"""SaladCloud's GPU classes: their names, ids and prices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from imagefleet.errors import SetupError
from imagefleet.pricing import prices
from imagefleet.validation import JSONObject

#: The API writes `RTX 3060 Ti (8 GB)`.
_MEMORY = re.compile(r"\s*\((\d+)\s*GB\)$", re.IGNORECASE)


@dataclass(frozen=True)
class GpuClass:
    """One class: its name here, SaladCloud's id, $/h by priority."""

    name: str
    id: str
    dollars_per_hour: Mapping[str, float]


@dataclass(frozen=True)
class PriceRange:
    """$/h, from the cheapest to the most expensive of the GPU classes."""

    least: float
    most: float

    def times(self, replicas: int) -> PriceRange:
        return PriceRange(self.least * replicas, self.most * replicas)

    def __str__(self) -> str:
        return f"{self._dollars(hours=1)}/h"

    @property
    def per_day(self) -> str:
        return f"{self._dollars(hours=24)}/day"

    def _dollars(self, hours: float) -> str:
        if self.least == self.most:
            return f"${self.most * hours:,.2f}"
        return f"${self.least * hours:,.2f} to ${self.most * hours:,.2f}"


def built_in() -> list[GpuClass]:
    """The classes known without the API, at the prices of the built-in table."""
    return [
        GpuClass(name, prices.SALAD_IDS[name], dict(gpu.dollars_per_hour.items()))
        for name, gpu in prices.BUILT_IN.gpus.items()
    ]


def of_api(items: Iterable[JSONObject]) -> list[GpuClass]:
    """The classes in the API's `gpu-classes`; known ones keep the names of our table."""
    names = {uuid: name for name, uuid in prices.SALAD_IDS.items()}
    return [
        GpuClass(
            names.get(item["id"]) or _MEMORY.sub(r" \1GB", item["name"]),
            item["id"],
            {
                each["priority"]: float(each["price"])
                for each in item["prices"]
                if each["priority"]
            },
        )
        for item in items
    ]


def find(names: Iterable[str], known: Sequence[GpuClass]) -> list[GpuClass]:
    """The classes that *names* mean, each once; raises SetupError for unknown or ambiguous ones."""
    by_name = {each.name: each for each in known}
    found = (prices.find_gpu(name, by_name) for name in names)
    return [by_name[name] for name in dict.fromkeys(found)]


def replica_price(classes: Sequence[GpuClass], priority: str) -> PriceRange:
    """The price range of one replica; raises SetupError if a class has no such priority."""
    for gpu_class in classes:
        if priority not in gpu_class.dollars_per_hour:
            raise SetupError(
                f"no price is known for the {gpu_class.name} at {priority} priority"
            )
    dollars = [each.dollars_per_hour[priority] for each in classes]
    return PriceRange(min(dollars), max(dollars))
