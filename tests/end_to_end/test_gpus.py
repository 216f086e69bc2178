"""`imagefleet worker --gpus`: real parents, real workers and real signals, with a stand-in engine.

The workers run on the CPU, one process for each number.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import polling
from cli import console
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from messages import images
from storages import local_only

JOBS = 40

#: A worker with a stand-in engine, a flag and some Python each (fixture of conftest.py).
StandInWorker = Callable[..., list[Any]]

pytestmark = [
    pytest.mark.slow,
    local_only,
]


class Machine:
    """A parent with a worker for GPU 0 and one for GPU 1, and their log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[JSONDict] = []
        self._reading = asyncio.create_task(self._read())

    async def said(self, action: str, count: int = 1, **fields: object) -> JSONDict:
        """Waits for the line with that action (and fields), or for so many of them."""
        wanted = {"action": action, **fields}.items()

        def look() -> list[JSONDict]:
            over = self._reading.done()
            found = [line for line in self.log if wanted <= line.items()]
            assert len(found) >= count or not over, (
                f"it ended without {action}: {self.log}"
            )
            return found

        found = await polling.until(look, lambda found: len(found) >= count)
        return dict(found[-1])

    async def end(self) -> int:
        await self._reading
        return await self.process.wait()

    def lines(self, action: str) -> list[JSONDict]:
        return [line for line in self.log if line["action"] == action]

    def processes(self) -> dict[str, int]:
        """The newest process of each GPU."""
        return {
            line["gpu"]: line["process_id"] for line in self.lines("worker_started")
        }

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log.append(json.loads(line))


@pytest.fixture
async def machine(
    stand_in_worker: StandInWorker, environment: dict[str, str], tmp_path
) -> AsyncIterator[Callable[..., Any]]:
    started = []

    async def start(*flags: str, **program: str) -> Machine:
        flags = (
            "--device",
            "cpu",
            "--gpus",
            "0,1",
            "--cache",
            str(tmp_path / "cache"),
            *flags,
        )
        command = stand_in_worker(*flags, **program)
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**environment, "IMAGEFLEET_LOG_FORMAT": "json"},
            stderr=subprocess.PIPE,
            limit=2**20,
        )
        started.append(Machine(process))
        return started[-1]

    yield start
    for each in started:
        for process_id in (each.process.pid, *each.processes().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        await each.end()


async def fill(storage: Storage, campaign: str = "default") -> set[str]:
    await storage.queue.send(
        f'{{"prompt": "a house", "id": "j{number}", "campaign": "{campaign}"}}'
        for number in range(JOBS)
    )
    return {f"{campaign}/j{number}.png" for number in range(JOBS)}


async def back(storage: Storage) -> int:
    """Jobs that can be leased now."""
    count = 0
    while messages := await storage.queue.receive(32, 60):
        count += len(messages)
    return count


def is_alive(process_id: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return False
    return not re.search(r"^State:\s+[ZX]", status, re.MULTILINE)


async def test_two_gpus_share_the_jobs_one_comes_back_and_sigterm_drains_both(
    storage: Storage, machine
):
    expected = await fill(storage)
    running = await machine(
        "--lease-seconds", "2", "--price-per-hour", "1000", "--slots", "4"
    )
    await running.said("start", 2)
    address = f"http://127.0.0.1:{(await running.said('start_workers'))['port']}"

    os.kill(running.processes()["1"], signal.SIGKILL)

    await running.said("worker_crashed", gpu="1", exit_code=-9)
    assert (await running.said("worker_started", 2, gpu="1"))["process_id"]
    await running.said("start", 2, device="1")
    await polling.until(lambda: images(storage), lambda found: not found < expected)
    async with aiohttp.ClientSession() as client:
        for probe in ("/started", "/live", "/ready"):
            assert (await client.get(address + probe)).ok, probe
        text = await (await client.get(f"{address}/metrics")).text()
        assert 'imagefleet_gpu_up{device="1"' in text
    await fill(storage, "more")
    await polling.until(lambda: images(storage), lambda found: len(found) >= JOBS + 4)
    running.process.send_signal(signal.SIGTERM)
    assert await running.end() == console.EXIT_DONE
    stored = await images(storage)
    assert expected < stored
    assert len(stored) < 2 * JOBS, "too late to prove anything"
    assert await back(storage) == 2 * JOBS - len(stored)
    assert {line["device"] for line in running.lines("stop")} == {"0", "1"}


async def test_workers_do_not_outlive_a_killed_parent_and_their_jobs_are_back(
    storage: Storage, machine
):
    await fill(storage)
    running = await machine("--lease-seconds", "300")
    await running.said("start", 2)
    await running.said("first_image")

    running.process.kill()

    await running.end()  # the log ends with the last process
    await polling.until(lambda: not any(map(is_alive, running.processes().values())))
    left = (await storage.queue.depth()).messages
    assert left >= JOBS - len(await images(storage))
    assert await back(storage) == left  # at once: no lease of 300 s is left
