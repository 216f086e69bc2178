"""A real worker process with a stand-in engine, which a storm may kill at any moment.

Its arguments: EVENTS TICK_SECONDS FAULT_SHARE SEED MODEL [FLAGS OF imagefleet worker]. A storm runs
its `main` in a fork of a process that has imported it.

Each event is a line appended to the file EVENTS, which survives SIGKILL: `drawn SEED`, the outcome
of a job, `fault`. FAULT_SHARE of the calls to the storage fail before or after their effect, until
there is a file EVENTS.over.
"""

from __future__ import annotations

import io
import os
import random
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.stand_in import StandInEngine
from cli import console, options
from imagefleet import errors
from imagefleet.job.message import Job
from imagefleet.storage import open as storage_open
from imagefleet.storage.open import Storage
from imagefleet.telemetry import logs
from worker import process
from worker.engine import contract
from worker.settings import WorkerSettings
from worker.stages import encode

#: Jobs with this many steps are bad: they fail for good.
BAD_STEPS = 13

SIDE = 64

_CALLS = {
    "receive",
    "renew",
    "release",
    "delete",
    "send",
    "create",
    "append",
    "read",
    "metadata",
}


class Faulty:
    """Forwards to a queue or a blob store; some calls fail, before or after their effect."""

    def __init__(self, inner: Any, share: float, events: Events) -> None:
        self._inner = inner
        self._share = share
        self._events = events

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in _CALLS:
            return call

        async def faulty(*arguments: Any, **named: Any) -> Any:
            chance = 1.0 if self._events.over.exists() else random.random()
            if chance < self._share / 2:
                self._events.write("fault")
                raise errors.TransientError("a fault before the effect")
            result = await call(*arguments, **named)
            if chance < self._share:
                self._events.write("fault")
                error = errors.TransientError("a fault after the effect")
                error.outcome_is_unknown = True  # as every storage says
                raise error
            return result

        return faulty


class Events:
    """Appends lines to a file, each in one write, so that those of several processes stay whole."""

    def __init__(self, path: str) -> None:
        self.over = over(Path(path))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


def over(events: Path) -> Path:
    """The file that ends the faults."""
    return events.with_suffix(".over")


def main() -> None:
    path, tick_seconds, share, seed, model, *flags = sys.argv[1:]
    random.seed(seed)
    events = Events(path)

    def draw(request: contract.ImageRequest) -> np.ndarray[Any, Any]:
        if request.steps == BAD_STEPS:
            raise errors.UnusableFileError("a bad job")
        events.write(f"drawn {request.seed}")
        noise = noise_of(str(request.prompt), request.steps, request.seed)
        return image_of([noise, *([request.init.pixels] if request.init else [])])

    def opened(settings: Any, *arguments: Any, **named: Any) -> Storage:
        storage: Any = storage_open.open_storage(settings, *arguments, **named)
        for name in ("queue", "poison", "blobs", "packs"):
            setattr(storage, name, Faulty(getattr(storage, name), float(share), events))
        served = storage.models.served
        storage.models.served = lambda models: Faulty(
            served(models), float(share), events
        )
        storage.models.send = Faulty(storage.models, float(share), events).send
        return storage

    if float(share):
        process.open_storage = opened  # type: ignore[assignment]
    engine = StandInEngine(
        capacity=4, tick_seconds=float(tick_seconds), size=(SIDE, SIDE), draw=draw
    )
    engine.model_name = model

    @options.flat
    def command(settings: WorkerSettings) -> None:
        logs.configure("json")
        work = process.run_worker(
            settings, load=lambda: engine, on_settled=events.write
        )
        console.run(work)

    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    try:
        code = app(flags, standalone_mode=False)
    except typer.Exit as left:
        code = left.exit_code
    console.leave(code)


def noise_of(prompt: str, steps: int, seed: int) -> contract.Pixels:
    """What a request alone decides: another for each prompt, number of steps and seed."""
    random = np.random.default_rng([zlib.crc32(prompt.encode()), steps, seed])
    return random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def image_of(pixels: Iterable[contract.Pixels]) -> contract.Pixels:
    """A stage's noise on the image that it begins with, which cannot be told from it alone."""
    return sum(pixels, np.zeros((), np.uint8))


def is_image_of(job: Job, index: int, data: bytes) -> bool:
    """Whether a file is what workers draw as image *index* of a job's stage."""
    whole = job.whole
    before = [whole, *(whole.at_stage(number) for number in range(2, job.stage + 1))]
    pixels = image_of(
        noise_of(stage.prompt, stage.steps, stage.image_seed(index)) for stage in before
    )
    file = encode.encode(pixels, job.output, "")
    try:
        return np.array_equal(
            *(np.asarray(Image.open(io.BytesIO(each))) for each in (data, file.data))
        )
    except (OSError, ValueError):
        return False
