"""Workers as SaladCloud runs them: real processes, a real HTTP service, exit codes that count."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

import forks
from fleet import health
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from polling import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

#: A worker process with a stand-in engine; what takes minutes in production is made short.
PROGRAM = """
import typer
from cli import console
from imagefleet import errors
from imagefleet.storage.routing import queue
from imagefleet.telemetry import logs
from worker import gpu_thread, process, pull
from worker.node import salad
from worker.settings import WorkerSettings
from benchmarks.stand_in import StandInEngine

salad.FIRST_PAUSE_SECONDS = 0.2
pull.LONGEST_PAUSE_SECONDS = 1

def broken(request):
    raise errors.NodeError("the GPU fell off the bus")

{changes}
settings = WorkerSettings()
logs.configure("json")
try:
    console.run(process.run_worker(settings, load=lambda: {engine}))
except typer.Exit as ended:
    console.leave(ended.exit_code)
"""


#: The error of an expired SAS token, once.
EXPIRED_ONCE = """
receive = queue.RoutedQueue.receive
polls = []
async def expired_once(self, *arguments):
    polls.append(1)
    if len(polls) == 3:
        raise errors.SetupError("Azure refuses access")
    return await receive(self, *arguments)
queue.RoutedQueue.receive = expired_once
"""


Program = Callable[..., forks.Fork]  # the fixture below


@pytest.fixture
def on_salad(
    local_settings: StorageSettings, salad_metadata_service, tmp_path
) -> dict[str, str]:
    """The environment of a worker in a SaladCloud container."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SALAD_MACHINE_ID": "6f1c",
        "SALAD_METADATA_URL": salad_metadata_service.url,
        "IMAGEFLEET_STORAGE": local_settings.storage,
        "IMAGEFLEET_MODEL": "stand-in",
        "IMAGEFLEET_DEVICE": "cpu",
        "IMAGEFLEET_CACHE": str(tmp_path / "cache"),
    }


@pytest.fixture
def start(
    on_salad: dict[str, str], stand_in_forks: forks.Forks, tmp_path
) -> Iterator[Program]:
    """Starts worker processes; those that still run at the end of the test are killed."""
    with stand_in_forks.ending() as start_fork:

        def begin(
            changes: str = "", engine: str = "StandInEngine()", **settings: str
        ) -> forks.Fork:
            variables = {
                f"IMAGEFLEET_{name.upper()}": value for name, value in settings.items()
            }
            program = PROGRAM.format(changes=changes, engine=engine)
            return start_fork(
                cwd=tmp_path, variables={**on_salad, **variables}, program=program
            )

        yield begin


async def end(worker: forks.Fork) -> str:
    output, _ = await asyncio.to_thread(worker.communicate)
    return output


async def depth_is(local_storage: Storage, messages: int) -> None:
    await until(local_storage.queue.depth, lambda depth: depth.messages == messages)


async def line_with(worker: forks.Fork, words: str) -> str:
    """The worker's next line that contains *words*."""
    assert worker.stdout is not None
    while line := await asyncio.to_thread(worker.stdout.readline):
        if words in line:
            return line
    raise AssertionError(f"the worker ended without printing {words!r}")


async def test_a_worker_waits_for_missing_storage_and_reports_it_to_the_probes(
    local_settings: StorageSettings, start: Program, unused_port: int
):
    worker = start(port=str(unused_port))
    line = json.loads(await line_with(worker, "setup_awaited"))
    assert (line["severity"], line["error"]) == ("ERROR", "MissingResourceError")
    assert "there is no queue" in line["message"]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{unused_port}") as client:

        async def status(path: str) -> int:
            async with client.get(path) as answer:
                return answer.status

        # A probe that fails would cost the group this node, which is as good as any other.
        assert [await status(path) for path in ("/started", "/live", "/ready")] == [
            200,
            200,
            503,
        ]
        async with client.get("/metrics") as answer:
            shown = await answer.text()
        assert "imagefleet_waiting_for_operator{" in shown
        # Its name leads the operator to its log, and its fleet to the fleet's page.
        (info,) = re.findall(r"^imagefleet_worker_info\{.+\}", shown, re.MULTILINE)
        assert re.search(r'worker="[^"]+"', info)
        folder = Path(local_settings.storage.removeprefix("local:")).name
        samples = [line for line in shown.splitlines() if not line.startswith("#")]
        assert all(
            f'fleet="{folder}/{local_settings.queue}"' in line for line in samples
        )
    async with open_storage(local_settings) as local_storage:
        await local_storage.create()
        await local_storage.queue.send(['{"prompt": "a house", "id": "j"}'])
        await depth_is(local_storage, 0)
        assert [
            name
            async for name in local_storage.blobs.names()
            if not name.startswith("-")
        ] == ["default/j.png"]
    worker.send_signal(signal.SIGTERM)
    output = await end(worker)
    assert worker.returncode == 0, output


async def test_a_worker_waits_for_a_new_token_and_works_on(
    local_storage: Storage, start: Program, unused_port: int
):
    worker = start(EXPIRED_ONCE, port=str(unused_port))
    await line_with(worker, "setup_awaited")
    await local_storage.queue.send(['{"prompt": "a house", "id": "j"}'])
    await depth_is(local_storage, 0)
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{unused_port}") as client,
        client.get("/metrics") as answer,
    ):
        series = [
            line.rpartition(" ")[0] for line in (await answer.text()).splitlines()
        ]
    assert len(series) == len(set(series)), "the first pipeline is still in the metrics"
    worker.send_signal(signal.SIGTERM)
    output = await end(worker)
    assert worker.returncode == 0, output


async def test_a_node_that_works_too_slowly_in_three_windows_is_reallocated_once(
    local_storage: Storage, start: Program, salad_metadata_service
):
    await local_storage.queue.send(
        f'{{"prompt": "a house", "id": "j{number}"}}' for number in range(200)
    )
    # 16x16 pixels are a thousandth of a standard image.
    worker = start(
        "from worker.node import watchdog; watchdog.WINDOW_SECONDS = 0.2",
        engine="StandInEngine(tick_seconds=0.02)",
        min_images_per_second="1",
        prefetch_seconds="0",
    )
    await until(lambda: salad_metadata_service.reasons)
    left = (await local_storage.queue.depth()).messages
    worker.send_signal(signal.SIGTERM)
    output = await end(worker)

    # It stays until it is stopped: one that ends by itself has another code.
    assert worker.returncode == 0, output
    assert len(salad_metadata_service.reasons) == 1
    depth = await local_storage.queue.depth()
    assert (depth.messages, depth.leased) == (left, 0), "it pulled again"


async def test_a_broken_node_that_is_not_stopped_in_time_exits_with_the_code_for_another_one(
    local_storage: Storage, start: Program, salad_metadata_service
):
    await local_storage.queue.send(['{"prompt": "a house", "id": "j"}'])
    worker = start(
        "salad.REALLOCATION_SECONDS = 0.2", engine="StandInEngine(draw=broken)"
    )
    output = await end(worker)

    assert worker.returncode == 3, output
    assert salad_metadata_service.reasons == ["the GPU fell off the bus"]
    assert len(await local_storage.queue.receive(1, 30)) == 1, (
        "the job was not handed back"
    )


async def test_a_gpu_that_hangs_is_not_live_and_its_node_is_reallocated(
    local_storage: Storage, start: Program, salad_metadata_service, unused_port: int
):
    await local_storage.queue.send(['{"prompt": "a house", "id": "j"}'])
    worker = start(
        "salad.REALLOCATION_SECONDS = gpu_thread.STALL_SECONDS = 1",
        engine="StandInEngine(tick_seconds=60)",
        port=str(unused_port),
    )
    await until(lambda: salad_metadata_service.reasons)
    assert await asyncio.to_thread(health.probe, "live", "127.0.0.1", unused_port) == (
        False,
        "the engine hangs",
    )
    output = await end(worker)
    assert worker.returncode == 3, output
    assert len(salad_metadata_service.reasons) == 1
    assert "it hangs" in salad_metadata_service.reasons[0]


async def test_a_broken_node_without_a_metadata_service_exits_at_once_with_that_code(
    local_storage: Storage, start: Program, on_salad: dict[str, str]
):
    await local_storage.queue.send(['{"prompt": "a house", "id": "j"}'])
    on_salad["SALAD_METADATA_URL"] = "http://127.0.0.1:9"
    worker = start(engine="StandInEngine(draw=broken)")
    output = await end(worker)

    assert worker.returncode == 3, output
    assert "reallocation_failed" in output


def line_of(output: str, action: str) -> str:
    return next(
        line for line in output.splitlines() if re.search(f'"action": "{action}"', line)
    )
