"""Real worker processes, signals and engine on a tiny checkpoint, with both storages."""

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forks
import polling
from imagefleet.storage.open import Storage
from messages import images
from storages import local_only

pytestmark = [pytest.mark.slow, pytest.mark.long]

JOBS = 24
LEASE_SECONDS = "3"

Process = subprocess.Popen[str] | forks.Fork
Start = Callable[..., Process]  # the fixtures of conftest.py


async def fill(storage: Storage, steps: int = 10) -> set[str]:
    """Sends the jobs; returns the names that their images will have."""
    await storage.queue.send(
        f'{{"prompt": "a house", "id": "j{number}", "steps": {steps}}}'
        for number in range(JOBS)
    )
    return {f"default/j{number}.png" for number in range(JOBS)}


async def wait_for_images(storage: Storage, count: int) -> None:
    await polling.until(lambda: images(storage), lambda found: len(found) >= count)


async def end(process: Process) -> str:
    """Waits for a process; returns what it printed."""
    output, _ = await asyncio.to_thread(process.communicate)
    return output


def worker(model: Path | str, *flags: str | Path) -> list[Any]:
    return [
        "worker",
        "--model",
        model,
        "--lease-seconds",
        LEASE_SECONDS,
        "--slots",
        "2",
        *flags,
    ]


async def test_a_worker_killed_in_the_middle_costs_no_image_and_generates_none_twice(
    storage: Storage, tiny_model: Path, fork: Start
):
    expected = await fill(storage)
    first = fork(*worker(tiny_model))
    await wait_for_images(storage, 3)
    first.kill()
    await end(first)
    before = {name: await storage.blobs.read(name) for name in await images(storage)}
    assert len(before) < JOBS, "the worker was killed too late to prove anything"
    second = fork(*worker(tiny_model, "--until-empty"))
    output = await end(second)
    assert second.returncode == 0, output
    assert await images(storage) == expected
    for name, data in before.items():
        assert await storage.blobs.read(name) == data, (
            f"{name} was written a second time"
        )
    assert (await storage.queue.depth()).messages == 0
    assert (await storage.poison.depth()).messages == 0


@pytest.mark.parametrize(
    ("storage_settings", "number"),
    [("local", signal.SIGTERM), ("local", signal.SIGINT), ("azurite", signal.SIGTERM)],
    indirect=["storage_settings"],
)
async def test_a_signal_ends_a_worker_with_exit_code_0_and_every_job_stored_or_back(
    storage: Storage, tiny_model: Path, fork: Start, number: signal.Signals
):
    await fill(storage)
    process = fork(
        "worker", "--model", tiny_model, "--lease-seconds", "300", "--slots", "2"
    )
    await wait_for_images(storage, 1)
    process.send_signal(number)
    output = await end(process)
    assert process.returncode == 0, output
    stored = len(await images(storage))
    assert 0 < stored < JOBS
    back = []
    while messages := await storage.queue.receive(32, 60):
        back += messages
    assert len(back) == JOBS - stored  # at once: nothing waits for a lease of 300 s


@local_only
async def test_a_signal_while_the_model_loads_ends_the_worker_too(
    storage: Storage, tiny_model: Path, start: Start
):
    process = start(*worker(tiny_model))
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)  # "pulling from ..."
    process.send_signal(signal.SIGTERM)
    output = await end(process)
    assert process.returncode == 0, output
    assert "Traceback" not in output
