"""`imagefleet worker` on some GPUs of this machine: its process, its log and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from imagefleet import errors

COMMAND = (sys.executable, "-m", "fleet.entry", "worker")

#: A worker's exit code after a signal, once all is done.
DONE = 0

#: Of a worker that is started in the wrong way.
_SETUP = 2

#: From SIGTERM to the end: what has begun is drawn, the rest handed back.
DRAIN_SECONDS = 60.0


@dataclass(slots=True)
class Sample:
    """What the workers had done by a moment, by GPU."""

    at: float
    images: dict[str, int] = field(default_factory=dict)
    compiling: set[str] = field(default_factory=set)

    def read(self, families: Sequence[Metric], machine: Machine) -> None:
        """Takes the figures of a page of metrics; a single worker has no label `device`."""
        for family in families:
            for found in family.samples:
                gpu = found.labels.get("device", machine.gpus[0])
                self.take(gpu, found.name, found.labels, found.value)

    def take(
        self, gpu: str, name: str, _labels: Mapping[str, str], value: float
    ) -> None:
        """Takes one figure."""
        if name == "imagefleet_images_total":
            self.images[gpu] = int(value)
        elif name == "imagefleet_engine_compiling" and value:
            self.compiling.add(gpu)


Read = TypeVar("Read", bound=Sample)


class Machine:
    """A worker process, or a parent and its workers."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        gpus: Sequence[str],
        say: Callable[[str], object],
    ) -> None:
        """*say* gets the lines of the log that tell how far the workers are."""
        self.gpus = gpus
        self._say = say
        self._last_error = ""
        self.process = process
        self.began_at = time.monotonic()
        self._port: int | None = None
        self._started: dict[str, list[int]] = defaultdict(list)
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    def process_ids(self, gpu: str) -> list[int]:
        """Of the workers of that GPU, the newest last; a single GPU has no parent."""
        return self._started[gpu] or [self.process.pid]

    async def end(self) -> int:
        """Has it drain; returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DRAIN_SECONDS):
            await self._reading
            return await self.process.wait()

    async def sample(self, client: aiohttp.ClientSession, kind: type[Read]) -> Read:
        """A sample of that kind; without figures before a worker serves metrics.

        Raises:
            NodeError, SetupError: the process has ended, by its exit code.
        """
        text = ""
        if self._port is not None:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(
                    f"http://127.0.0.1:{self._port}/metrics"
                ) as answer:
                    text = await answer.text()
        if self.has_ended:
            why = f": {self._last_error}" if self._last_error else ""
            is_wrong = self.process.returncode == _SETUP
            raise (errors.SetupError if is_wrong else errors.NodeError)(
                f"the worker ended with exit code {self.process.returncode}{why}"
            )
        found = kind(time.monotonic())
        found.read(list(text_string_to_metric_families(text)), self)
        return found

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
            elif action == ("start_workers" if len(self.gpus) > 1 else "start"):
                self._port = said["port"]
            if said.get("severity") in {"ERROR", "CRITICAL"}:
                self._last_error = str(said["message"])
            if said.get("severity") != "INFO" or action in _SHOWN:
                gpu = f"GPU {said['device']}: " if "device" in said else ""
                self._say(
                    f"  [{time.monotonic() - self.began_at:5.1f} s] {gpu}{said['message']}"
                )
        await self.process.wait()


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


@contextlib.asynccontextmanager
async def running(
    gpus: Sequence[str],
    flags: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], object],
) -> AsyncIterator[Machine]:
    """Runs `imagefleet worker` with *flags* in an *environment* of variables."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *flags, "--log-format", "json"),
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


def rate(samples: Sequence[Sample], gpu: str) -> float:
    """Images/s of a GPU: the slope of the line through all samples.

    Images that start together finish together, so the first and the last sample alone would be
    wrong by up to a round of all slots, 2 % of a minute.
    """
    times = [each.at for each in samples]
    slope, _ = statistics.linear_regression(
        times, [each.images[gpu] for each in samples]
    )
    return slope
