"""The models of a fleet file: their names in jobs, their queues, and the GPUs that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from imagefleet import errors
from imagefleet.pricing import families
from imagefleet.pricing.families import Family
from imagefleet.storage import queue_names
from worker.files import addresses

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a fleet: *queue* is that of its jobs of normal priority."""

    name: str
    family: Family
    queue: str


def name_of(text: str) -> str:
    """The name by which jobs ask for a model of `models:`.

    Raises:
        ValueError: only a worker that has fetched it would know.
    """
    if "," in text or "?" in text or "*" in text:
        raise ValueError(
            "models: name each model by itself, as store:NAME.safetensors, a path in the image or"
            " an https:// address without a token; others belong in IMAGEFLEET_MODEL"
        )
    try:
        address = addresses.read_address(text, None, "")
    except errors.SetupError as error:
        raise ValueError(f"models: {error.message}") from None
    if address is None:
        return PurePosixPath(text).name.removesuffix(_SUFFIX)
    if address.file_name is None and address.blob is None:
        raise ValueError("models: an address there should end in the file's name")
    return address.stem


def check(given: Mapping[str, object], environment: Mapping[str, object]) -> None:
    """Raises ValueError for models that workers would refuse."""
    if "IMAGEFLEET_MODEL" in environment:
        raise ValueError(
            "environment: IMAGEFLEET_MODEL is what `models` says: leave one of them out"
        )
    if len(given) > 1:
        for variable in ("IMAGEFLEET_MODEL_SHA256", "IMAGEFLEET_CONFIG"):
            if variable in environment:
                raise ValueError(
                    f"environment: {variable} is for one model, and `models` has several"
                )
    names = [name_of(text) for text in given]
    for name, family in zip(names, given.values(), strict=True):
        if family not in families.FAMILIES:
            known = ", ".join(families.FAMILIES)
            raise ValueError(f"models: the family of {name} should be one of {known}")
    if len(set(names)) < len(names):
        raise ValueError("models: two of them have one name, by which jobs ask for them")


def models_of(given: Mapping[str, object] | None, queue: object) -> list[Model]:
    """The models of `models:`, that of jobs without a model first; none without `models:`.

    *queue* is the fleet's IMAGEFLEET_QUEUE, if it has one.
    """
    base = queue if isinstance(queue, str) else "jobs"
    return [
        Model(name, families.find(str(family)), queue_names.job_queue(base, name))
        for text, family in (given or {}).items()
        for name in [name_of(text)]
    ]
