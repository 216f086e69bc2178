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

#: Loaded on first use: pydantic and asyncio would slow down every start of the command.
_MODULES = {
    **dict.fromkeys(__all__, "imagefleet.client"),
    **dict.fromkeys(("Job", "Output"), "imagefleet.job.message"),
    "aio": None,
    "errors": None,
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'imagefleet' has no attribute {name!r}")
    module = _MODULES[name]
    if module is None:
        return importlib.import_module(f"imagefleet.{name}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    """All names, loaded or not, as `help(imagefleet)` looks for them."""
    return sorted({*globals(), *__all__})
