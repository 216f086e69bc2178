"""Sending processes that end, and loads that end before them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import polling
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.submit import BATCH, BulkSender
from loadgen.load import Checkpoint
from loadgen.processes import Refusals, SenderProcesses

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def storage(local_settings: StorageSettings) -> AsyncIterator[Storage]:
    async with open_storage(local_settings) as opened:
        await opened.create()
        yield opened


def processes_of(settings: StorageSettings, count: int = 2) -> SenderProcesses:
    return SenderProcesses(settings, "normal", count, Refusals())


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(each) for each in children if b"loadgen.processes" in _command(int(each))
    ]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def bodies_in(storage: Storage) -> Counter[str]:
    return Counter([message.body async for message in storage.queue.browse()])


async def test_what_a_killed_process_had_in_flight_is_sent_by_another(
    storage: Storage, local_settings: StorageSettings
) -> None:
    wanted = [f"{number}" for number in range(2_500)]
    async with processes_of(local_settings) as processes:
        sender = BulkSender(processes.send, wanted, concurrency=8)
        sending = asyncio.create_task(sender.run())
        await polling.until(lambda: sender.progress.confirmed >= 500)
        killed, _ = children_of(os.getpid())
        os.kill(killed, signal.SIGKILL)
        progress = await sending
    assert (progress.sent, progress.finished) == (2_500, True)
    assert (await bodies_in(storage)).keys() == set(wanted)


async def test_without_any_process_left_the_operator_is_told(
    local_settings: StorageSettings,
) -> None:
    async with processes_of(local_settings) as processes:
        children = await polling.until(
            lambda: children_of(os.getpid()), lambda found: len(found) == 2
        )
        for child in children:
            os.kill(child, signal.SIGKILL)
        with pytest.raises(
            errors.SetupError, match=r"exit codes: -9, -9.*--processes 1"
        ):
            await BulkSender(processes.send, ["a job"] * 100).run()


async def test_an_error_of_a_process_has_its_class_and_its_words(
    storage: Storage, local_settings: StorageSettings
) -> None:
    async with processes_of(local_settings, count=1) as processes:
        with pytest.raises(errors.JobError, match="a queue message holds 65,536"):
            await processes.send(["x" * 70_000])
        await processes.send(["a job"])
        assert len(children_of(os.getpid())) == 1
    assert await bodies_in(storage) == {"a job": 1}
    assert children_of(os.getpid()) == []


def ids_in(settings: StorageSettings) -> Counter[str]:
    async def browse() -> Counter[str]:
        async with open_storage(settings) as storage:
            return Counter(
                json.loads(body)["id"] for body in (await bodies_in(storage)).elements()
            )

    return asyncio.run(browse())


def test_a_load_of_several_processes_that_is_killed_at_any_moment_resumes_and_loses_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "t.yaml").write_text("prompt: a fox\ncount: 3000\n")
    place = tmp_path / ".t.yaml.jobs.checkpoint.json"
    settings = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")
    command = [sys.executable, "-m", "fleet.main", "load", "t.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("IMAGEFLEET_REQUIRE_AZURITE", None)
    load = subprocess.Popen(
        [*command, "--processes", "2"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def confirmed() -> int:
        assert load.poll() is None, load.communicate()[1]
        found = Checkpoint.read(place)
        return found.confirmed if found else 0

    try:
        polling.until_in_thread(confirmed, lambda jobs: jobs >= 1_000)
        children = children_of(load.pid)
        assert len(children) == 2
    finally:
        load.kill()
        load.communicate()
    # Not if a process goes on without its load.
    polling.until_in_thread(
        lambda: not any(Path(f"/proc/{child}").exists() for child in children)
    )
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    ids = ids_in(settings)
    assert len(ids) == 3_000
    assert ids.total() - 3_000 <= 2 * BATCH
    assert json.loads(result.stdout)["confirmed"] == 3_000
    # A user counts images, and the names of images follow from the ids: none is there twice.
    checkpoint = Checkpoint.read(place)
    assert checkpoint is not None
    assert checkpoint.confirmed == checkpoint.noted == 3_000
