"""Where a GPU's time goes: what a few seconds of drawing run on it, in graphs and beside them."""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rows.groups import Figures

#: An event of the profiler, in Chrome's format; its times are in microseconds.
Event = Mapping[str, Any]

_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}

#: Names that are told, and the characters of one.
_MOST, _NAME = 40, 80


def draw(driven: Iterable[object], seconds: float) -> Figures:
    """What the GPU does while it draws on for so many *seconds*, which the profiler slows down."""
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    until = time.monotonic() + seconds
    with profile(activities=[activity]) as profiler:
        for _ in driven:
            if time.monotonic() > until:
                break
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarise(json.loads(path.read_bytes())["traceEvents"])


def summarise(events: Sequence[Event]) -> Figures:
    """The GPU's busy time, and what took longest; graphs of as many kernels are one."""
    launches: dict[int, list[Event]] = defaultdict(list)
    busy = until = 0.0
    ran = [each for each in events if each.get("cat") in _ON_GPU]
    ran.sort(key=lambda each: float(each["ts"]))
    for each in ran:
        busy += max(_end(each) - max(each["ts"], until), 0.0)
        until = max(until, _end(each))
        launches[each["args"]["correlation"]].append(each)
    taken: dict[str, list[float]] = defaultdict(list)
    for kernels in launches.values():
        first = kernels[0]
        name = f"{first['name'][:_NAME]} on stream {first['args'].get('stream')}"
        if len(kernels) > 1:
            name = f"graph of {len(kernels)} kernels"
        taken[name].append(_end(kernels[-1]) - first["ts"])
    longest = sorted(taken.items(), key=lambda item: -sum(item[1]))[:_MOST]
    return {
        "milliseconds": (until - ran[0]["ts"]) / 1000 if ran else 0.0,
        "busy_milliseconds": busy / 1000,
        "longest": {
            name: {"launches": len(each), "milliseconds": sum(each) / 1000}
            for name, each in longest
        },
    }


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
