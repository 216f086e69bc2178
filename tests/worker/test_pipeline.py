"""A job's whole way on both storages, with a stand-in engine."""

import asyncio
import dataclasses
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

import polling
from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import concurrency, errors
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage
from messages import blobs, failed_jobs, failing, message
from worker import gpu_thread
from worker.engine import contract


async def is_empty(storage: Storage) -> bool:
    return (await storage.queue.depth()).messages == 0


async def test_each_job_becomes_the_image_of_its_seed(storage: Storage, run_pipeline):
    pipeline = await run_pipeline(
        StandInEngine(capacity=3),
        sent=(message(id=f"j{seed}", seed=seed) for seed in range(20)),
    )
    assert set(await blobs(storage)) == {f"default/j{seed}.png" for seed in range(20)}
    for seed in range(20):
        data = await storage.blobs.read(f"default/j{seed}.png")
        assert data is not None
        request = contract.ImageRequest(
            "a house", "", (), "euler_ancestral", 20, 7.0, seed, 16, 16
        )
        image = Image.open(io.BytesIO(data))
        assert np.array_equal(np.asarray(image), draw_noise(request))
        assert f"Seed: {seed}," in image.info["parameters"]
    assert pipeline.metrics.outcomes == {"completed": 20}
    assert await is_empty(storage)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("nonsense", "not JSON"),
        ("[]", "no object"),
        ('{"prompt": "a", "steps": 100000}', "steps: should be less than"),
        ('{"prompt": "a", "stepz": 3}', "did you mean 'steps'"),
        ('{"prompt": "a <lora:../../etc/passwd:1>"}', "with no path"),
        ('{"prompt": "a <lora:nowhere:1>"}', "no LoRA nowhere.safetensors"),
    ],
)
async def test_a_job_that_can_never_succeed_goes_to_the_poison_queue_at_once(
    storage: Storage,
    run_pipeline,
    body: str,
    reason: str,
):
    pipeline = await run_pipeline(sent=[body, message(id="good")])
    (record,) = await failed_jobs(storage)
    assert reason in record.reason
    assert record.attempts == 1
    assert record.worker == "test-worker"
    assert set(await blobs(storage)) == {"default/good.png"}
    assert pipeline.metrics.outcomes == {"completed": 1, "failed": 1}
    assert await is_empty(storage)


async def test_a_replay_meanwhile_keeps_the_message_of_a_job_that_fails(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    add = storage.poison.send
    recorded: list[str] = []

    async def send(bodies: Iterable[str]) -> None:
        """A replay deletes the messages of jobs that no record calls failed."""
        found = dead_letter_queue.recorded(storage, Selection())
        recorded.extend([str(record.id) async for record in found])
        await add(bodies)

    monkeypatch.setattr(storage.poison, "send", send)
    await run_pipeline(sent=[message(id="bad", steps=100_000)])
    assert recorded == ["bad"]


async def test_a_failed_job_whose_message_cannot_be_added_is_delivered_again(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    down = failing(storage.poison.send, errors.TransientError("503 server busy"), 7)
    monkeypatch.setattr(storage.poison, "send", down)
    bad = message(id="bad", steps=100_000)
    pipeline = await run_pipeline(sent=[bad], lease_seconds=2)
    assert pipeline.metrics.outcomes == {"lost": 1, "failed": 1}
    assert [record.id for record in await failed_jobs(storage)] == ["bad"]


async def test_one_failing_image_does_not_take_its_batch_along(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.1)
    tries = 0

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        nonlocal tries
        if request.seed == 2:
            tries += 1
            raise errors.TransientError("out of memory")
        return draw_noise(request)

    pipeline = await run_pipeline(
        StandInEngine(draw=draw),
        sent=(message(id=f"j{seed}", seed=seed) for seed in range(4)),
        max_attempts=3,
    )
    assert set(await blobs(storage)) == {
        "default/j0.png",
        "default/j1.png",
        "default/j3.png",
    }
    (record,) = await failed_jobs(storage)
    assert (record.id, record.attempts, record.reason) == ("j2", 3, "out of memory")
    assert tries == 3
    assert pipeline.metrics.outcomes == {"completed": 3, "retried": 2, "failed": 1}


async def test_an_image_of_one_colour_is_retried_and_never_stored(
    run_pipeline,
    monkeypatch,
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)
    black = [True]

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        return np.zeros((16, 16, 3), np.uint8) if black.pop() else draw_noise(request)

    black.insert(0, False)
    pipeline = await run_pipeline(StandInEngine(draw=draw), sent=[message(id="j")])
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}


async def test_a_broken_engine_hands_everything_back_for_another_worker(
    storage: Storage, run_pipeline
):
    def draw(_: contract.ImageRequest) -> contract.Pixels:
        raise errors.NodeError("CUDA error: device-side assert triggered")

    await storage.queue.send(message(id=f"j{number}") for number in range(6))
    with pytest.raises(errors.NodeError, match="device-side assert"):
        await run_pipeline(StandInEngine(draw=draw), lease_seconds=300)
    messages = await storage.queue.receive(32, 30)
    assert len(messages) == 6  # at once, not after 300 s


@pytest.mark.parametrize(
    ("faults", "outcomes"),
    [(4, {"completed": 1}), (7, {"retried": 1, "completed": 1})],
)
async def test_an_upload_that_fails_is_repeated_and_storage_that_stays_down_retries_the_job(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    faults: int,
    outcomes: dict[str, int],
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)
    down = failing(storage.blobs.create, errors.TransientError("503 busy"), faults)
    monkeypatch.setattr(storage.blobs, "create", down)
    pipeline = await run_pipeline(sent=[message(id="j")])
    assert pipeline.metrics.outcomes == outcomes
    assert pipeline.engine_thread.clock.images == sum(outcomes.values())
    assert await blobs(storage) == ["default/j.png"]


async def test_the_loras_of_a_job_are_fetched_concurrently(
    storage: Storage,
    run_pipeline,
    lora_bytes: Callable[[str], bytes],
    monkeypatch,
):
    both = asyncio.Barrier(2)
    read = storage.files.read

    async def wait(name: str, max_bytes: int | None = None) -> bytes | None:
        if name.endswith(".safetensors"):
            await both.wait()
        return await read(name, max_bytes)

    for name in ("fox", "owl"):
        file = f"loras/{name}.safetensors"
        await storage.files.create(file, lora_bytes(name), "text/plain", {})
    monkeypatch.setattr(storage.files, "read", wait)
    pipeline = await run_pipeline(
        sent=[message(id="j", prompt="<lora:fox:1> and <lora:owl:1>")]
    )
    assert pipeline.metrics.outcomes == {"completed": 1}


async def test_credentials_that_run_out_cost_a_job_no_attempt(
    storage: Storage,
    run_pipeline,
    lora_bytes: Callable[[str], bytes],
    monkeypatch,
):
    at_once = dataclasses.replace(concurrency.UNTIL_ACCESS, longest_wait_seconds=0.001)
    monkeypatch.setattr(concurrency, "UNTIL_ACCESS", at_once)
    file = "loras/fox.safetensors"
    await storage.files.create(file, lora_bytes("x"), "text/plain", {})
    await storage.queue.send([message(id="j", prompt="a house <lora:fox:1>")])
    for blobs_of, name in ((storage.blobs, "create"), (storage.files, "read")):
        call = getattr(blobs_of, name)
        closed = failing(call, errors.NoAccessError(), 9)  # more than there are tries
        monkeypatch.setattr(blobs_of, name, closed)
    pipeline = await run_pipeline(max_attempts=1)
    assert pipeline.metrics.outcomes == {"completed": 1}


async def test_a_stop_finishes_what_has_begun_and_hands_the_rest_back(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    begun = threading.Event()
    may_end = threading.Event()
    stop = asyncio.Event()

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        begun.set()
        may_end.wait()
        return draw_noise(request)

    stop_accepting = gpu_thread.EngineThread.stop_accepting

    def noting(thread: gpu_thread.EngineThread) -> list[int]:
        tickets = stop_accepting(thread)
        may_end.set()
        return tickets

    monkeypatch.setattr(gpu_thread.EngineThread, "stop_accepting", noting)
    await storage.queue.send(message(id=f"j{number}") for number in range(12))
    running = asyncio.create_task(
        run_pipeline(
            StandInEngine(capacity=2, draw=draw),
            stop=stop,
            until_empty=False,
            lease_seconds=300,
        )
    )
    await asyncio.to_thread(begun.wait)
    stop.set()
    pipeline = await running
    completed = pipeline.metrics.outcomes["completed"]
    assert completed == len(await blobs(storage))
    assert 1 <= completed <= 2  # the engine holds two, and may have begun with one
    assert len(await storage.queue.receive(32, 30)) == 12 - completed  # at once


@dataclass
class HungEngine:
    """An engine that has begun with an image and does not end it before its test."""

    engine: contract.Engine
    begun: threading.Event


@pytest.fixture
def hung(monkeypatch) -> Iterator[HungEngine]:
    monkeypatch.setattr(gpu_thread, "STOP_SECONDS", 0.01)  # in vain
    begun = threading.Event()
    may_end = threading.Event()

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        begun.set()
        may_end.wait()
        return draw_noise(request)

    yield HungEngine(StandInEngine(draw=draw), begun)
    may_end.set()


async def test_what_outlasts_the_grace_time_is_handed_back(
    storage: Storage,
    run_pipeline,
    hung: HungEngine,
):
    stop = asyncio.Event()
    await storage.queue.send([message(id="j")])
    running = asyncio.create_task(
        run_pipeline(
            hung.engine,
            stop=stop,
            until_empty=False,
            grace_seconds=0.1,
            lease_seconds=300,
        )
    )
    await asyncio.to_thread(hung.begun.wait)
    stop.set()
    pipeline = await running
    assert pipeline.metrics.outcomes == {"handed_back": 1}
    assert len(await storage.queue.receive(1, 30)) == 1
    assert set(await blobs(storage)) == set()


async def test_a_second_signal_ends_the_grace_time(
    storage: Storage,
    run_pipeline,
    hung: HungEngine,
):
    stop = asyncio.Event()
    hurry = asyncio.Event()
    await storage.queue.send([message(id="j")])
    running = asyncio.create_task(
        run_pipeline(
            hung.engine, stop=stop, hurry=hurry, until_empty=False, grace_seconds=3600
        )
    )
    await asyncio.to_thread(hung.begun.wait)
    stop.set()
    await polling.turn(50)
    assert not running.done()
    hurry.set()
    pipeline = await running
    assert pipeline.metrics.outcomes == {"handed_back": 1}


async def test_until_empty_waits_for_what_a_dead_worker_still_leases(
    storage: Storage, run_pipeline
):
    await storage.queue.send([message(id="j")])
    await storage.queue.receive(1, 1)  # and dies
    pipeline = await run_pipeline()
    assert pipeline.metrics.outcomes == {"completed": 1}


async def test_every_stage_of_a_job_is_counted(run_pipeline):
    pipeline = await run_pipeline(
        StandInEngine(capacity=4),
        sent=(message(id=f"j{number}") for number in range(40)),
    )
    sample = pipeline.metrics.registry.get_sample_value
    assert sample("imagefleet_images_total") == 40
    assert sample("imagefleet_jobs_total", {"outcome": "completed"}) == 40
    for stage in ("prepare", "wait_gpu", "generate", "encode", "upload", "acknowledge"):
        assert sample("imagefleet_stage_seconds_count", {"stage": stage}) == 40
    assert sample("imagefleet_stage_seconds_count", {"stage": "record"}) < 40, (
        "not one by one"
    )


async def test_the_depth_of_both_queues_is_measured(storage: Storage, run_pipeline):
    pipeline = await run_pipeline(
        StandInEngine(tick_seconds=0.3), sent=[message(id="j"), "nonsense"]
    )
    sample = pipeline.metrics.registry.get_sample_value
    for queue in (storage.queue, storage.poison):
        depth = await queue.depth()
        states = {"any"} if depth.leased is None else {"visible", "leased"}
        for state in states:
            assert sample(
                "imagefleet_queue_messages", {"queue": queue.name, "state": state}
            ) in {
                0,
                1,
                2,
            }
        assert (
            sample("imagefleet_queue_oldest_age_seconds", {"queue": queue.name})
            is not None
        )
