import asyncio
import json
import signal
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

import forks
import made_records
from fleet.campaigns.table import Campaigns
from fleet.monitor import command, watch
from fleet.settings import MonitorSettings
from imagefleet import aio, errors
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import QueueDepth
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import metrics
from imagefleet.validation import JSONDict
from in_process import Imagefleet


async def test_depths_are_reported_as_far_as_the_storage_knows_them(
    storage: Storage,
):
    await storage.queue.send(["one", "two", "three"])
    await storage.poison.send(["bad"])
    await storage.queue.receive(1, lease_seconds=60)

    campaigns = Campaigns(storage)
    found = await command.read_status(aio.Fleet(storage), None, campaigns)

    assert found["storage"] == storage.url
    assert found["queue"]["messages"] == 3
    if found["queue"]["leased"] is None:
        assert found["queue"]["visible"] is None
    else:
        assert (found["queue"]["visible"], found["queue"]["leased"]) == (2, 1)
    assert found["failed"]["messages"] == 1
    assert sum(each["messages"] for each in found["queues"]) == 3
    assert [each["name"] for each in found["queues"]] == [
        f"{storage.queue.name}{suffix}" for suffix in ("-high", "", "-low")
    ]
    assert found["failed"]["name"] == f"{storage.queue.name}-poison"


async def test_a_failed_job_of_which_the_queue_has_several_messages_is_one(
    storage: Storage,
):
    """As after an outage in which the worker did not hear that its message was added."""
    await storage.create()
    failed = made_records.ended(1, error="JobError", reason="broken")
    await RecordLog(storage.blobs, "w1").add([failed])
    await storage.poison.send(["{}", "{}"])
    campaigns = Campaigns(storage)
    found = await command.read_status(aio.Fleet(storage), None, campaigns)
    assert (found["failed"]["messages"], found["failed"]["jobs"]) == (2, 1)
    text = StringIO()
    screen = command.status_screen(found, campaigns, 20)
    Console(file=text, width=100).print(screen)
    rows = [line.split() for line in text.getvalue().splitlines()]
    (row,) = [row for row in rows if row[:1] == [found["failed"]["name"]]]
    assert row[1:4] == ["1", "-", "-"]


@pytest.fixture
async def filled(tmp_path) -> str:
    """The storage address, relative to the test's folder, of a queue with two jobs."""
    async with open_storage(
        StorageSettings(storage=f"local:{tmp_path}/storage")
    ) as storage:
        await storage.create()
        await storage.queue.send(["one", "two"])
    return "local:storage"


def test_status_as_json(filled: str, imagefleet: Imagefleet):
    found = json.loads(imagefleet("status", "--storage", filled, "--json").stdout)

    assert found["storage"] == filled
    assert found["queue"]["messages"] == 2
    assert found["queue"]["oldest_age_seconds"] >= 0
    assert found["failed"] == {
        "name": "jobs-poison",
        "messages": 0,
        "visible": 0,
        "leased": 0,
        "oldest_age_seconds": None,
        "model": None,
        "jobs": 0,
    }


def test_status_as_a_table(filled: str, imagefleet: Imagefleet):
    lines = imagefleet("status", IMAGEFLEET_STORAGE=filled).stdout.splitlines()

    assert lines[0].strip() == filled
    rows = {line.split()[0]: line.split()[1] for line in lines[-4:]}
    assert rows == {"jobs-high": "0", "jobs": "2", "jobs-low": "0", "jobs-poison": "0"}


def test_ctrl_c_is_the_clean_end_of_a_watch(
    filled: str, start: Callable[..., forks.Fork], tmp_path
):
    errors = tmp_path / "errors"
    watching = start("status", "--follow", "--storage", filled, errors=errors)
    first = watching.stdout.readline()  # the watch has begun
    watching.send_signal(signal.SIGINT)

    assert watching.wait() == 0
    assert filled in first
    assert errors.read_text() == ""


async def test_a_watch_outlives_an_outage(
    filled: str,
    tmp_path,
    monkeypatch,
    capsys,
):
    reads = 0
    third = asyncio.Event()

    async def read(*given: Any) -> JSONDict:
        nonlocal reads
        reads += 1
        if reads == 2:
            raise errors.TransientError("the storage does not answer")
        if reads == 3:
            third.set()
        return await read_status(*given)

    read_status = command.read_status
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "read_status", read)
    monkeypatch.setattr(watch, "SECONDS", 0.01)

    settings = MonitorSettings(storage=filled)
    showing = command.command.__wrapped__(settings, count=20, watch=True)
    watching = asyncio.create_task(showing)
    await third.wait()
    watching.cancel()
    await watching

    assert "trying again: the storage does not answer" in capsys.readouterr().out


async def test_models_whose_jobs_wait_without_a_worker_are_named(
    storage: Storage,
):
    jobs = [
        f'{{"prompt": "a", "id": "{n}", "model": "{m}"}}' for n, m in enumerate("aabc")
    ]
    await storage.models.send(jobs)
    await storage.models.note_served("b")
    for message in await storage.models.of("c")["normal"].receive(1, 60):
        await storage.models.of("c")["normal"].delete(message)
    campaigns = Campaigns(storage)
    found = await command.read_status(aio.Fleet(storage), None, campaigns)
    assert found["without_worker"] == [{"model": "a", "messages": 2}]
    assert {each["model"] for each in found["queues"]} == {None, "a", "b", "c"}
    console = Console(width=120, record=True)
    console.print(command.status_screen(found, campaigns, 20))
    screen = console.export_text()
    assert "2 jobs of the model a, which no worker serves" in screen
    assert storage.models.of("c")["normal"].name not in screen, "it is empty"


def test_gauges_of_models_are_bounded():
    registry = CollectorRegistry()
    gauges = metrics.QueueGauges(registry)
    depths = {
        f"jobs-{number}": QueueDepth(2, None, 5.0, model=f"m{number:03}")
        for number in range(80)
    }
    depths["jobs"] = QueueDepth(7, None, 9.0)
    gauges.update("jobs", QueueDepth(167, None, 9.0, depths))
    gauges.update("jobs", QueueDepth(167, None, 9.0, depths))

    def read(model: str) -> float | None:
        return registry.get_sample_value(
            "imagefleet_model_queue_messages", {"model": model}
        )

    assert (read(""), read("m000"), read("m060")) == (7, 2, None)
    assert read(metrics.OTHER_MODELS) == 30 * 2
