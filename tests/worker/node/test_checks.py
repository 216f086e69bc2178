"""A node's checks of its weights, the images that it may have spoilt, the list of quarantined."""

import asyncio
import json
import threading
import time
from datetime import datetime, timedelta

import pytest

import polling
from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import concurrency, errors
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from messages import blobs, message
from storages import local_only
from worker.engine import contract
from worker.node import checks, quarantine, suspects

pytestmark = local_only


class Weights:
    """Weights with a fault at each reading that *faults* tells of."""

    def __init__(self) -> None:
        self.faults: list[str | None] = []
        self.readings = 0

    def find_fault(self) -> str | None:
        self.readings += 1
        return self.faults.pop(0) if self.faults else None


async def recorded(storage: Storage) -> list[JSONDict]:
    return [
        json.loads(await storage.blobs.read(name) or b"")
        for name in await blobs(storage, "-suspect/")
    ]


async def send(storage: Storage, jobs: int) -> None:
    await storage.queue.send(message(id=str(number)) for number in range(jobs))


async def test_a_node_whose_weights_go_wrong_hands_its_jobs_back_and_its_images_are_recorded(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr(checks, "WEIGHTS_SECONDS", 0.05)
    await send(storage, 60)
    engine = StandInEngine(capacity=1, tick_seconds=0.02)
    weights = engine.self_check = Weights()
    running = asyncio.create_task(run_pipeline(engine))

    await polling.until(lambda: blobs(storage))
    readings = weights.readings
    await polling.until(lambda: weights.readings > readings)
    weights.faults = ["unet", "unet"]
    with pytest.raises(errors.NodeError, match="this node draws wrong images: unet"):
        await running
    for record in await recorded(storage):
        assert record["worker"] == "test-worker"
        assert record["since"] <= record["until"]
    depth = await storage.queue.depth()
    assert depth.messages >= 60 - len(await blobs(storage))
    assert depth.leased == 0


async def test_weights_that_differ_once_were_read_wrongly_and_twice_are_a_fault(
    storage: Storage, run_pipeline
):
    await send(storage, 1)
    engine = StandInEngine()
    weights = engine.self_check = Weights()
    weights.faults = ["unet", None]
    pipeline = await run_pipeline(engine)
    assert pipeline.metrics.images_stored == 1
    weights.faults = ["unet", "unet"]
    with pytest.raises(errors.NodeError, match="unet"):
        await run_pipeline(engine)
    assert not await recorded(storage)


# Suspects


async def test_a_record_that_cannot_be_stored_is_in_the_log_with_what_to_do(
    storage: Storage, caplog, monkeypatch
):
    async def refuse(*_: object) -> bool:
        raise errors.TransientError("no answer")

    monkeypatch.setattr(storage.blobs, "create", refuse)
    await suspects.record(storage, "w", time.monotonic(), "wrong", concurrency.NEVER)
    (line,) = caplog.records
    assert "imagefleet redo --worker w --since" in line.getMessage()


async def test_a_record_has_the_time_since_the_last_good_check(storage: Storage):
    good_at = time.monotonic() - 60
    await suspects.record(storage, "odd/näme", good_at, "wrong", concurrency.NEVER)
    (record,) = await recorded(storage)
    since, until = map(datetime.fromisoformat, (record["since"], record["until"]))
    now = storage.blobs.clock.now()
    assert since <= now - timedelta(seconds=60)
    assert now <= until + timedelta(seconds=60)
    assert set(record) == {"worker", "machine", "since", "until", "reason"}
    (name,) = await blobs(storage, "-suspect/")
    assert name.startswith("-suspect/odd_n_me/")


# The list of quarantined nodes


async def put_list(storage: Storage, content: bytes) -> None:
    part = await storage.files.read_part(quarantine.BLOB, 0, 1)
    version = None if part is None else part.version
    await storage.files.replace(quarantine.BLOB, content, "application/json", version)


def listing(*names: str) -> bytes:
    nodes = [
        {"name": name, "reason": "wrong images", "at": "2026-01-01"} for name in names
    ]
    return json.dumps({"nodes": nodes}).encode()


@pytest.mark.parametrize("name", ["test-worker", "machine-7"])
async def test_a_quarantined_node_leases_nothing(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    name: str,
):
    monkeypatch.setenv("SALAD_MACHINE_ID", "machine-7")
    await put_list(storage, listing("somebody else", name))
    await storage.queue.send(['{"prompt": "a cat"}'])
    with pytest.raises(
        errors.NodeError, match=rf"quarantined: {name} is in .*wrong images"
    ):
        await run_pipeline(load=lambda: pytest.fail("the model was loaded"))
    assert (await storage.queue.depth()).leased == 0


async def test_a_node_that_is_quarantined_while_it_works_hands_its_jobs_back(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr(quarantine, "PERIOD_SECONDS", 0.05)
    stored = threading.Event()
    is_read = threading.Event()
    reason = quarantine.Quarantine.reason

    async def noting(self: quarantine.Quarantine) -> str | None:
        found = await reason(self)
        if found is not None:
            is_read.set()
        return found

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if stored.is_set():
            is_read.wait()
        return draw_noise(request)

    monkeypatch.setattr(quarantine.Quarantine, "reason", noting)
    await send(storage, 50)
    running = asyncio.create_task(
        run_pipeline(StandInEngine(capacity=1, tick_seconds=0.01, draw=draw))
    )

    await polling.until(lambda: blobs(storage))
    stored.set()
    await put_list(storage, listing("test-worker"))
    with pytest.raises(errors.NodeError, match="this node is quarantined"):
        await running
    depth = await storage.queue.depth()
    assert depth.messages >= 10
    assert depth.leased == 0


@pytest.mark.parametrize(
    "content", [b"no JSON", b"{}", b'{"nodes": [7]}', b" " * 5_000_000]
)
async def test_a_list_that_cannot_be_read_stops_no_node_and_is_logged_once_a_minute(
    storage: Storage, caplog, content: bytes
):
    await put_list(storage, content)
    looked = quarantine.Quarantine(storage.files, frozenset({"test-worker"}))
    assert await looked.reason() is None
    assert await looked.reason() is None
    (line,) = caplog.records
    assert (
        "quarantine.json in the container 'files' cannot be read" in line.getMessage()
    )
    await put_list(storage, listing("test-worker"))
    assert await looked.reason() is not None
