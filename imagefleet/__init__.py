"""Submit image jobs to a fleet of GPU workers, and collect the images.

    import imagefleet

    with imagefleet.connect("local:./data") as fleet:
        batch = fleet.submit([imagefleet.Job(prompt="a red house")], campaign="spring")
        for result in batch.results():
            result.image().save(f"{result.id}.png")

`imagefleet.aio.connect` is the same for asyncio. The exceptions are in `imagefleet.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imagefleet import aio, errors
    from imagefleet.client import Batch, Fleet, JobHandle, Result, Results, connect
    from imagefleet.job.message import Job, Output

__all__ = [
    "Batch",
    "Fleet",
    "Job",
    "JobHandle",
    "Output",
    "Result",
    "Results",
    "aio",
    "connect",
    "errors",
]

_CLIENT = "imagefleet.client"
_MESSAGE = "imagefleet.job.message"

#: Loaded on first use: pydantic and asyncio would slow down every start of the command.
_MODULES = {
    "Batch": _CLIENT,
    "Fleet": _CLIENT,
    "Job": _MESSAGE,
    "JobHandle": _CLIENT,
    "Output": _MESSAGE,
    "Result": _CLIENT,
    "Results": _CLIENT,
    "connect": _CLIENT,
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in {"aio", "errors"}:
        return importlib.import_module(f"imagefleet.{name}")
    raise AttributeError(f"module 'imagefleet' has no attribute {name!r}")
