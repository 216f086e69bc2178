"""SaladCloud's GPU classes: the names that people write, the UUIDs that the API wants, prices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagefleet import errors
from imagefleet.pricing import prices

#: From the same source as the prices. A class keeps its UUID for good, its price does not: `apply`
#: asks the API for both.
_IDS: Mapping[str, str] = {
    "RTX 2060 6GB": "3eae6ce4-aa14-4c7d-b502-131730c9af48",
    "RTX 2070 8GB": "2aec4fc1-2270-4e40-b8cc-6e69fae61d4f",
    "RTX 2080 8GB": "ffc51032-64d2-4df3-855a-f3a649895c0f",
    "RTX 2080 Ti 11GB": "6d3221b4-1fd0-4cc4-98cd-2c1895a18c2e",
    "RTX 3050 8GB": "99305b63-f7cf-4b8d-ae33-2d6b6ff0b085",
    "RTX 3060 8GB": "69071b6c-3d2c-4181-b3ce-de03aec04b9f",
    "RTX 3060 12GB": "f51baccc-dc95-40fb-a5d1-6d0ee0db31d2",
    "RTX 3060 Ti 8GB": "cb6c1931-89b6-4f76-976f-54047320ccc6",
    "RTX 3070 8GB": "951131f6-5acf-489c-b303-0906be8b26ef",
    "RTX 3070 Ti 8GB": "d9fb0bd6-05c9-4cb9-b98e-9f7d1b5ba0e7",
    "RTX 3080 10GB": "43a49c0c-f860-40e9-a509-702d0dba0902",
    "RTX 3080 Ti 12GB": "65247de0-746f-45c6-8537-650ba613966a",
    "RTX 3090 24GB": "a5db5c50-cbcb-4596-ae80-6a0c8090d80f",
    "RTX 3090 Ti 24GB": "9998fe42-04a5-4807-b3a5-849943f16c38",
    "RTX A5000 24GB": "6d4e9e99-d27e-4751-8d7d-393f7d8ea949",
    "RTX 4060 Ti 16GB": "2b73eef8-be49-4667-8fc0-5c0cb127cfe0",
    "RTX 4070 12GB": "0798d5aa-2d17-42ee-81b8-ea92e3bc088e",
    "RTX 4070 Ti 12GB": "de00c90b-904b-4d9e-8fc9-1d9a08eb0932",
    "RTX 4070 Ti Super 16GB": "f1380143-51cd-4bad-80cb-1f86ee6b49fe",
    "RTX 4080 16GB": "0d062939-7c01-4aae-a2b1-30e315124e51",
    "RTX 4090 24GB": "ed563892-aacd-40f5-80b7-90c9be6c759b",
    "RTX 5060 Ti 16GB": "5d6b104d-c029-4357-b179-8b662d0a76b2",
    "RTX 5070 12GB": "61e8ceee-4479-40c5-9a05-1711f45f931c",
    "RTX 5070 Ti 16GB": "1b8747be-e789-475b-a339-3c1028010d84",
    "RTX 5080 16GB": "8065b30b-4a27-434c-8610-222e8df8fad7",
    "RTX 5090 32GB": "851399fb-7329-4195-a042-d6514b28cf33",
}

#: The API writes `RTX 3060 Ti (8 GB)`.
_MEMORY = re.compile(r"\s*\((\d+)\s*GB\)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuClass:
    """One class: its name as the project writes it, the API's UUID, $/h by priority."""

    name: str
    id: str
    dollars_per_hour: Mapping[str, float]


def built_in(table: prices.PriceTable = prices.BUILT_IN) -> list[GpuClass]:
    """The classes that are known without asking the API, at the prices of *table*."""
    return [
        GpuClass(name, _IDS[name], dict(gpu.dollars_per_hour.items()))
        for name, gpu in table.gpus.items()
        if name in _IDS
    ]


def of_api(items: Iterable[Mapping[str, Any]]) -> list[GpuClass]:
    """The classes of the API's `gpu-classes`; those of our table keep the name that it gives them.

    Raises:
        TransientError: the answer is not of the API's shape.
    """
    names = {uuid: name for name, uuid in _IDS.items()}
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
    """The classes that *names* stand for, each once.

    Raises:
        SetupError: a name is unknown, with what it may have meant, or stands for several.
    """
    by_name = {each.name: each for each in known}
    table = prices.PriceTable(
        {each.name: prices.GpuPrices({}, "SaladCloud") for each in known}, prices.FREE_STORAGE
    )
    found = (prices.find_gpu(name, table) for name in names)
    return [by_name[name] for name in dict.fromkeys(found)]
