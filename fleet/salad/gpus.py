"""SaladCloud's GPU classes: their names, ids and prices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagefleet import errors
from imagefleet.pricing import prices

#: The API writes `RTX 3060 Ti (8 GB)`.
_MEMORY = re.compile(r"\s*\((\d+)\s*GB\)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuClass:
    """One class: its name here, SaladCloud's id, $/h by priority."""

    name: str
    id: str
    dollars_per_hour: Mapping[str, float]


def built_in(table: prices.PriceTable = prices.BUILT_IN) -> list[GpuClass]:
    """The classes known without the API, at the prices of *table*."""
    return [
        GpuClass(name, prices.SALAD_IDS[name], dict(gpu.dollars_per_hour.items()))
        for name, gpu in table.gpus.items()
        if name in prices.SALAD_IDS
    ]


def of_api(items: Iterable[Mapping[str, Any]]) -> list[GpuClass]:
    """The classes in the API's `gpu-classes`; known ones keep the names of our table.

    Raises:
        TransientError: the response has another format.
    """
    names = {uuid: name for name, uuid in prices.SALAD_IDS.items()}
    try:
        return [
            GpuClass(
                names.get(item["id"]) or _MEMORY.sub(r" \1GB", item["name"]),
                item["id"],
                {
                    each["priority"]: float(each["price"])
                    for each in item["prices"]
                    if each["priority"] is not None
                },
            )
            for item in items
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise errors.TransientError(f"SaladCloud's list of GPU classes: {error!r}") from None


def find(names: Iterable[str], known: Sequence[GpuClass]) -> list[GpuClass]:
    """The classes that *names* mean, each once.

    Raises:
        SetupError: a name is unknown or ambiguous.
    """
    by_name = {each.name: each for each in known}
    table = prices.PriceTable(
        {each.name: prices.GpuPrices({}, "SaladCloud") for each in known}, prices.FREE_STORAGE
    )
    found = (prices.find_gpu(name, table) for name in names)
    return [by_name[name] for name in dict.fromkeys(found)]
