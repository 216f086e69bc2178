"""Submit image jobs to a fleet of GPU workers, and collect the images.

    import imagefleet

    with imagefleet.connect("local:./data") as fleet:
        batch = fleet.submit([imagefleet.Job(prompt="a red house")], campaign="spring")
        for result in batch.results():
            result.image().save(f"{result.id}.png")

`imagefleet.aio.connect` is the same for asyncio, and `imagefleet.Engine` draws in this process,
without a queue. The exceptions are in `imagefleet.errors`.
"""

import importlib
from importlib import metadata
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

#: Those of the worker, a package above this one that needs torch.
_ENTRY_POINTS = ("AsyncEngine", "Engine")


def __getattr__(name: str) -> Any:
    """Loaded on first use: pydantic and asyncio would slow down every start of the command."""
    if name in _ENTRY_POINTS:
        (found,) = metadata.entry_points(group="imagefleet", name=name)
        return found.load()
    if name not in __all__:
        raise AttributeError(f"module 'imagefleet' has no attribute {name!r}")
    if name in {"aio", "errors"}:
        return importlib.import_module(f"imagefleet.{name}")
    module = "job.message" if name in {"Job", "Output"} else "client"
    return getattr(importlib.import_module(f"imagefleet.{module}"), name)


def __dir__() -> list[str]:
    """All names, loaded or not, as `help(imagefleet)` looks for them."""
    return sorted({*globals(), *__all__, *_ENTRY_POINTS})
