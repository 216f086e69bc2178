"""What a Kubernetes Job makes of `worker --until-empty`: exit codes of real processes."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import forks
import polling
from imagefleet.storage.open import Storage
from messages import images
from storages import azurite_only

pytestmark = pytest.mark.slow

Start = Callable[..., forks.Fork]  # the fixture of conftest.py


async def start_worker(fork: Start, model: Path) -> forks.Fork:
    process = fork(
        "worker", "--model", model, "--until-empty", "--lease-seconds", "300"
    )
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)  # "pulling from ..."
    return process


async def exit_code(process: forks.Fork) -> int:
    output, _ = await asyncio.to_thread(process.communicate)
    assert "Traceback" not in output
    return process.returncode


@azurite_only
async def test_an_evicted_pod_is_no_success_and_the_others_wait_for_the_last_lease(
    storage: Storage, tiny_model: Path, fork: Start
):
    await storage.queue.send(
        f'{{"prompt": "a house", "id": "j{n}", "steps": 2}}' for n in range(6)
    )
    (leased,) = await storage.queue.receive(1, 300)
    evicted, other = await asyncio.gather(
        *(start_worker(fork, tiny_model) for _ in range(2))
    )
    await polling.until(lambda: images(storage), lambda names: len(names) >= 5)

    evicted.send_signal(signal.SIGTERM)

    assert await exit_code(evicted) == 128 + signal.SIGTERM
    assert other.poll() is None, "ended though a message was still leased"
    await storage.queue.release(leased)
    assert await exit_code(other) == 0
    assert len(await images(storage)) == 6
    assert (await storage.queue.depth()).messages == 0


@azurite_only
async def test_ctrl_c_before_the_end_is_no_success(
    storage: Storage, tiny_model: Path, fork: Start
):
    await storage.queue.send(['{"prompt": "a house", "id": "j"}'])
    await storage.queue.receive(1, 300)
    process = await start_worker(fork, tiny_model)
    process.send_signal(signal.SIGINT)
    assert await exit_code(process) == 128 + signal.SIGINT
