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

_LAUNCHES = {"cuda_runtime", "cuda_driver"}

#: Kernels that are told, and the characters of a name.
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
    """The GPU's busy time, by graphs (those of as many kernels are one) and by other kernels."""
    launches = {
        each["args"]["correlation"]: each["name"]
        for each in events
        if each.get("cat") in _LAUNCHES and "correlation" in each.get("args", {})
    }
    graphs: dict[int, list[Event]] = defaultdict(list)
    others: dict[tuple[str, int], list[float]] = defaultdict(list)
    ran = sorted(
        (each for each in events if each.get("cat") in _ON_GPU),
        key=lambda each: float(each["ts"]),
    )
    for each in ran:
        correlation = each["args"].get("correlation")
        if launches.get(correlation) == "cudaGraphLaunch":
            graphs[correlation].append(each)
        else:
            name = each["name"][:_NAME], each["args"].get("stream", 0)
            others[name].append(each["dur"])
    taken: dict[int, list[float]] = defaultdict(list)
    for kernels in graphs.values():
        taken[len(kernels)].append(_end(kernels[-1]) - kernels[0]["ts"])
    most = sorted(others.items(), key=lambda item: -sum(item[1]))[:_MOST]
    return {
        "milliseconds": (max(map(_end, ran)) - ran[0]["ts"]) / 1000 if ran else 0.0,
        "busy_milliseconds": _busy(ran) / 1000,
        "other_milliseconds": sum(map(sum, others.values())) / 1000,
        "graphs": [
            {"kernels": count, "launches": len(each), "milliseconds": sum(each) / 1000}
            for count, each in sorted(taken.items())
        ],
        "others": [
            {
                "kernel": name,
                "stream": stream,
                "launches": len(each),
                "milliseconds": sum(each) / 1000,
            }
            for (name, stream), each in most
        ],
    }


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _busy(ran: Iterable[Event]) -> float:
    """The microseconds in which at least one of the kernels ran, in the order of their start."""
    busy = until = 0.0
    for each in ran:
        busy += max(_end(each) - max(each["ts"], until), 0.0)
        until = max(until, _end(each))
    return busy
