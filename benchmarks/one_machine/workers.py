"""`imagefleet worker` on some GPUs of this machine: its process, its log and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

#: From SIGTERM to the end: what has begun is drawn, the rest handed back.
DRAIN_SECONDS = 60.0

#: Between two readings of the metrics, each some ten milliseconds of the parent's time.
SAMPLE_SECONDS = 0.5

#: A rate that exceeds the one before it by this factor shows that the workers still warm up. A
#: round of all slots makes less of a difference.
FASTER = 1.25

#: Actions of the log that tell how far the workers are.
_SHOWN = frozenset(
    (
        "start_workers",
        "worker_started",
        "slots_chosen",
        "compile_awaited",
        "ready",
        "first_image",
    )
)

#: Metrics that are read as they are.
_TOLD = frozenset(
    (
        "imagefleet_first_image_seconds",
        "imagefleet_full_speed_seconds",
        "imagefleet_unet_rows_total",
    )
)

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Sample:
    """Counts of workers, engines, stages and processors at one moment, by GPU."""

    at: float
    images: dict[str, int] = field(default_factory=dict)
    compiling: set[str] = field(default_factory=set)
    busy_seconds: dict[str, float] = field(default_factory=dict)
    idle_seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    busy_slots: dict[str, int] = field(default_factory=dict)
    stage_seconds: Counter[str] = field(default_factory=Counter)
    stage_counts: Counter[str] = field(default_factory=Counter)
    graphs_compiled: int = 0
    #: The figures of `_TOLD`, of the only worker.
    told: dict[str, float] = field(default_factory=dict)
    worker_cpu_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0

    def read(self, families: Sequence[Metric], machine: Machine) -> None:
        """Takes the figures of a page of metrics; a single worker has no label `device`."""
        for family in families:
            for found in family.samples:
                gpu = found.labels.get("device", machine.gpus[0])
                self._take(gpu, found.name, found.labels, found.value)
                if found.name in _TOLD:
                    self.told[found.name] = found.value
        newest = (machine.process_ids(gpu)[-1] for gpu in machine.gpus)
        self.worker_cpu_seconds = sum(map(_cpu_seconds, {machine.process.pid, *newest}))
        self.machine_cpu_seconds = _machine_cpu_seconds()

    def _take(
        self, gpu: str, name: str, labels: Mapping[str, str], value: float
    ) -> None:
        match name:
            case "imagefleet_images_total":
                self.images[gpu] = int(value)
            case "imagefleet_engine_compiling" if value:
                self.compiling.add(gpu)
            case "imagefleet_gpu_busy_seconds_total":
                self.busy_seconds[gpu] = value
            case "imagefleet_gpu_idle_seconds_total":
                self.idle_seconds[gpu][labels["reason"]] = value
            case "imagefleet_slots" if labels["state"] == "busy":
                self.busy_slots[gpu] = int(value)
            case "imagefleet_stage_seconds_sum":
                self.stage_seconds[labels["stage"]] += value  # type: ignore[assignment]
            case "imagefleet_stage_seconds_count":
                self.stage_counts[labels["stage"]] += int(value)
            case "imagefleet_engine_graphs_total" if labels["origin"] == "compiled":
                self.graphs_compiled += int(value)


class Machine:
    """A worker process, or a parent and its workers."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        gpus: Sequence[str],
        say: Callable[[str], object],
    ) -> None:
        """*say*: called with the lines of the log that tell how far the workers are."""
        self.gpus = gpus
        self._say = say
        self._last_error = ""
        self.process = process
        self.began_at = time.monotonic()
        self._ports: dict[str, int] = {}
        self._started: dict[str, list[int]] = defaultdict(list)
        self._reading = asyncio.create_task(self._read())

    def process_ids(self, gpu: str) -> list[int]:
        """Processes of that GPU's workers, the newest last; a single GPU has no parent."""
        return self._started[gpu] or [self.process.pid]

    async def end(self) -> int:
        """Drains the workers; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DRAIN_SECONDS):
            await self._reading
            return await self.process.wait()

    async def sample(self, client: aiohttp.ClientSession) -> Sample:
        """Reads the metrics; there are no figures before a worker serves them.

        Raises:
            SystemExit: the process has ended.
        """
        families: list[Metric] = []
        for port in self._ports.values():
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    families += text_string_to_metric_families(await answer.text())
        if self._reading.done():
            why = f": {self._last_error}" if self._last_error else ""
            sys.exit(f"the worker ended with exit code {self.process.returncode}{why}")
        found = Sample(time.monotonic())
        found.read(families, self)
        return found

    async def until_warm(
        self, client: aiohttp.ClientSession, warm_seconds: float
    ) -> None:
        """Waits until all workers draw, none compiles, and they draw no faster than before."""
        while True:
            sample = await self.sample(client)
            images = sample.images
            draws = images.keys() == set(self.gpus) and min(images.values()) > 0
            if draws and not sample.compiling:
                break
            await asyncio.sleep(SAMPLE_SECONDS)
        before, rate, was = sum(images.values()), 0.0, 0.0
        while rate == 0 or rate > FASTER * was:
            await asyncio.sleep(warm_seconds)
            now = sum((await self.sample(client)).images.values())
            before, was, rate = now, rate, (now - before) / warm_seconds

    async def _read(self) -> None:
        stream = self.process.stderr
        while stream is not None and (line := await stream.readline()):
            try:
                said: dict[str, Any] = json.loads(line)
            except ValueError:
                said = {
                    "message": line.decode(errors="replace").rstrip(),
                    "severity": "WARNING",
                }
            action = said.get("action")
            if action == "worker_started":
                self._started[said["gpu"]].append(said["process_id"])
            elif action in {
                "start_workers",
                "start",
            }:  # the machine's, and each worker's
                self._ports[said.get("device", "")] = said["port"]
            if said.get("severity") in {"ERROR", "CRITICAL"}:
                self._last_error = str(said["message"])
            if said.get("severity") != "INFO" or action in _SHOWN:
                gpu = f"GPU {said['device']}: " if "device" in said else ""
                seconds = time.monotonic() - self.began_at
                self._say(f"  [{seconds:5.1f} s] {gpu}{said['message']}")
        await self.process.wait()


@contextlib.asynccontextmanager
async def running(
    gpus: Sequence[str],
    flags: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], object],
) -> AsyncIterator[Machine]:
    """Runs `imagefleet worker` with *flags* in an *environment* of variables."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fleet.entry",
        "worker",
        *flags,
        "--log-format",
        "json",
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        limit=2**20,
    )
    machine = Machine(process, gpus, say)
    try:
        yield machine
    finally:
        if process.returncode is None:
            process.kill()  # its workers end with it
            await process.wait()


def _cpu_seconds(process_id: int) -> float:
    """Processor time of a process with all its threads; 0 once it has ended."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return 0.0
    user, system = status.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_SECOND


def _machine_cpu_seconds() -> float:
    """Processor time of all processes: user, nice, system, and interrupts."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _waiting, hard, soft = map(int, fields[:7])
    return (user + nice + system + hard + soft) / _TICKS_PER_SECOND
