"""Jobs of several images on both storages: one by one, and only what is missing a second time."""

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobRecord
from messages import (
    Drawing,
    blobs,
    counts,
    failed_jobs,
    message,
    redelivered,
)
from polling import until
from storages import local_only, on_both
from worker.engine import contract
from worker.jobs import in_flight
from worker.jobs.in_flight import InFlightImage
from worker.pipeline import ENCODE_BACKLOG
from worker.stages.encode import ENCODERS, ENCODING
from worker.stages.upload import UPLOADS, WAITING_PER_UPLOAD

pytestmark = pytest.mark.usefixtures("soon")


class Counting(Drawing):
    """Counts what is prepared, and the images of each tick."""

    prepared = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.batches: list[int] = []

    def prepare(self, request: contract.ImageRequest) -> Any:
        self.prepared += 1
        return super().prepare(request)

    def tick(self) -> list[contract.Finished]:
        finished = super().tick()
        self.batches.append(len(finished))
        return finished


@pytest.fixture
def looked_for(storage: Storage, monkeypatch) -> list[str]:
    """The names that workers ask the storage for."""
    names: list[str] = []
    record = storage.blobs.record

    async def noted(name: str) -> BlobRecord | None:
        names.append(name)
        return await record(name)

    monkeypatch.setattr(storage.blobs, "record", noted)
    return names


def name(index: int, job: str = "j") -> str:
    return f"default/{job}~{index}.png" if index else f"default/{job}.png"


def names(images: int, job: str = "j") -> set[str]:
    return {name(index, job) for index in range(images)}


async def interrupted(
    run_pipeline: Any, engine: Drawing, images: int, **changes: Any
) -> Any:
    """Runs a worker that is told to stop once it has drawn so many images."""
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_pipeline(engine, stop=stop, until_empty=False, lease_seconds=300, **changes)
    )
    await until(lambda: len(engine.seeds) >= images)
    stop.set()
    return await running


async def test_images_are_there_while_the_job_goes_on_and_their_records_at_its_end(
    storage: Storage, run_pipeline
):
    await storage.queue.send([message(id="j", seed=0, batch_size=4, n_iter=10)])
    allowed = threading.Semaphore(0)

    def wait(_: contract.ImageRequest) -> None:
        allowed.acquire()

    engine = Counting(wait, capacity=1)
    running = asyncio.create_task(run_pipeline(engine, until_empty=True))
    for images in (8, 16):
        allowed.release(8)
        # Not at the end alone: the job goes no further.
        await until(
            lambda: blobs(storage), lambda found, images=images: len(found) == images
        )
        assert await counts(storage) == (0, 0, 0), "counted before it was complete"
    allowed.release(40)
    pipeline = await running

    assert set(await blobs(storage)) == names(40)
    assert await counts(storage) == (40, 1, 0)
    assert pipeline.metrics.outcomes == {"completed": 1}
    assert pipeline.metrics.registry.get_sample_value("imagefleet_images_total") == 40
    assert engine.prepared == 1, "the images of a job share what is prepared"


async def test_a_worker_that_was_killed_leaves_only_what_is_missing(
    storage: Storage,
    run_pipeline,
    store_images,
    looked_for: list[str],
):
    bodies = [message(id="j", seed=0, n_iter=8), message(id="k", seed=100)]
    await redelivered(storage, *bodies)  # it dies after it has stored these
    await store_images(bodies[0], 1, 4)
    await store_images(bodies[1])
    engine = Drawing()
    pipeline = await run_pipeline(engine)

    assert sorted(engine.seeds) == [0, 2, 3, 5, 6, 7]
    assert set(await blobs(storage)) == names(8) | {"default/k.png"}
    assert await blobs(storage, "-duplicates/") == []
    assert len(looked_for) == 8 + 1
    assert await counts(storage) == (9, 2, 0)
    assert pipeline.metrics.outcomes == {"completed": 1, "duplicate": 1}


async def test_a_drain_waits_for_the_images_in_slots_and_leaves_the_others_to_the_next_worker(
    storage: Storage, run_pipeline, looked_for: list[str]
):
    await storage.queue.send([message(id="j", seed=0, batch_size=50)])
    first = Drawing(capacity=2, tick_seconds=0.1)
    pipeline = await interrupted(run_pipeline, first, 5)
    assert pipeline.metrics.outcomes == {"handed_back": 1}
    assert 5 <= len(first.seeds) < 30, "it has drawn on after it was told to stop"
    assert set(await blobs(storage)) == {name(seed) for seed in first.seeds}

    second = Drawing()
    pipeline = await run_pipeline(second)  # at once, not after 300 s
    assert Counter(first.seeds + second.seeds) == Counter(range(50))
    assert set(await blobs(storage)) == names(50)
    assert len(looked_for) == 50
    assert await counts(storage) == (50, 1, 0)
    assert pipeline.metrics.outcomes == {"completed": 1}


@local_only
async def test_a_worker_that_has_to_hurry_leaves_the_next_one_to_look(
    storage: Storage, run_pipeline, looked_for: list[str]
):
    await storage.queue.send([message(id="j", seed=0, batch_size=20)])
    first = Drawing(capacity=2, tick_seconds=0.2)
    await interrupted(run_pipeline, first, 5, grace_seconds=0)
    # The storage ends what it has begun before it stores another blob.
    await storage.blobs.create("last", b"", "text/plain", {})
    before = set(await blobs(storage))
    second = Drawing()
    await run_pipeline(second)
    assert {name(seed) for seed in second.seeds} == names(20) - before
    assert looked_for
    assert await blobs(storage, "-duplicates/") == []
    assert await counts(storage) == (20, 1, 0)


async def test_a_failed_image_fails_its_job_once_and_says_what_is_stored(
    storage: Storage, run_pipeline
):
    def bad(request: contract.ImageRequest) -> errors.FleetError | None:
        return errors.JobError("it does not fit") if request.seed == 6 else None

    engine = Drawing(bad, capacity=2, tick_seconds=0.03)
    pipeline = await run_pipeline(engine, sent=[message(id="j", seed=0, batch_size=40)])
    assert pipeline.metrics.outcomes == {"failed": 1}
    assert len(engine.seeds) < 30, "drawn on after it had failed"
    done = sorted(set(engine.seeds) - {6})
    assert set(await blobs(storage)) == {name(index) for index in done}
    (failed,) = await failed_jobs(storage)
    # On a busy machine those after it may not have been begun.
    later = {5: "", 7: ", 7"}.get(done[-1], f", 7-{done[-1]}")
    assert (
        failed.reason
        == f"image 6: it does not fit; of its 40 images are stored: 0-5{later}"
    )
    assert await counts(storage) == (len(done), 0, 1)

    second = Drawing()
    await run_pipeline(second, sent=[failed.body or ""])
    assert sorted(second.seeds) == sorted(set(range(40)) - set(done))
    assert set(await blobs(storage)) == names(40)
    assert (await counts(storage))[1] == 1


class Held:
    """Keeps an image with the name `j.png` from the storage for a while, if it is to be."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[str] = []
        self.is_held: Callable[[Mapping[str, str]], bool] = lambda _: True
        self._create = storage.blobs.create
        monkeypatch.setattr(storage.blobs, "create", self._held)

    async def _held(self, blob: str, data: bytes, *rest: Any, **named: Any) -> bool:
        if blob == name(0):
            await until(lambda: not self.is_held(rest[1]))
        is_new = await self._create(blob, data, *rest, **named)
        self.created += [blob] if blob.startswith("default/") else []
        return is_new


async def test_the_engine_draws_on_while_the_first_image_is_stored_and_the_others_wait_for_it(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    engine = Drawing(capacity=4)
    held = Held(storage, monkeypatch)
    held.is_held = lambda _: len(engine.seeds) < 40
    await run_pipeline(engine, sent=[message(id="j", seed=0, n_iter=40)])
    assert held.created[0] == name(0)
    assert sorted(engine.seeds) == list(range(40))
    assert set(await blobs(storage)) == names(40)


@on_both
@pytest.mark.parametrize("later", [0, 100])
async def test_of_two_batches_of_one_id_at_the_same_moment_one_is_completed(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    later: int,
):
    held = Held(storage, monkeypatch)
    held.is_held = lambda metadata: metadata["seed"] == str(later) and not held.created
    await run_pipeline(
        Drawing(capacity=6),
        sent=[message(id="j", seed=seed, n_iter=3) for seed in (0, 100)],
    )
    metadata = [each.metadata async for each in storage.blobs.records("default/")]
    first = 100 - later
    assert sorted(int(each["seed"]) for each in metadata) == [
        first,
        first + 1,
        first + 2,
    ]
    assert await counts(storage) == (3, 1, 1)


def failing_once(
    at: int,
) -> Callable[[contract.ImageRequest], errors.FleetError | None]:
    """The fault of the image with that seed, the first time that it is drawn."""
    failures = [errors.TransientError("out of memory")]
    return lambda each: failures.pop() if each.seed == at and failures else None


@local_only
@pytest.mark.parametrize(("failing", "most"), [(0, 50 + 20), (3, 50 + 1)])
async def test_one_image_that_fails_for_a_time_is_all_that_is_drawn_again(
    storage: Storage, run_pipeline, failing: int, most: int
):
    """Of the first, whose name is claimed later, also those that were drawn without it."""
    engine = Drawing(failing_once(failing), capacity=4)
    pipeline = await run_pipeline(engine, sent=[message(id="j", seed=0, n_iter=50)])
    assert len(engine.seeds) <= most
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}
    assert set(await blobs(storage)) == names(50)
    assert await counts(storage) == (50, 1, 0)


@local_only
async def test_a_job_that_fails_with_every_image_is_given_up_after_a_few(
    storage: Storage, run_pipeline
):
    engine = Drawing(lambda _: errors.TransientError("out of memory"), capacity=4)
    pipeline = await run_pipeline(
        engine, sent=[message(id="j", seed=0, n_iter=500)], max_attempts=4
    )  # without being taken for a broken node
    assert pipeline.metrics.outcomes == {"retried": 3, "failed": 1}
    assert len(engine.seeds) < 100
    (failed,) = [each async for each in reader.ended(storage, "default")]
    assert "out of memory; of its 500 images are stored: none" in str(failed.reason)


@local_only
async def test_hundreds_of_images_in_one_message_hold_little_memory_and_keep_their_lease(
    storage: Storage, run_pipeline, monkeypatch
):
    alive = weakref.WeakSet[InFlightImage]()

    class Tracked(InFlightImage):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            alive.add(self)

    class Sampled(Counting):
        most = 0

        def tick(self) -> list[contract.Finished]:
            self.most = max(self.most, len(alive))
            return super().tick()

    monkeypatch.setattr(in_flight, "InFlightImage", Tracked)
    engine = Sampled(capacity=16, tick_seconds=0.1)
    pipeline = await run_pipeline(
        engine, lease_seconds=2, sent=[message(id="j", seed=0, n_iter=400)]
    )
    assert pipeline.metrics.outcomes == {"completed": 1}
    assert sorted(engine.seeds) == list(range(400))
    before_files = 2 * engine.capacity + ENCODE_BACKLOG + ENCODERS + ENCODING
    # Those that wait for the first one's name, those in the queue, and those under way.
    as_files = (1 + WAITING_PER_UPLOAD + 1) * UPLOADS
    assert engine.capacity <= engine.most <= before_files + as_files, (
        "more than in slots and queues"
    )
    renewals = pipeline.metrics.registry.get_sample_value(
        "imagefleet_lease_renewals_total", {"result": "renewed"}
    )
    assert renewals >= 1
    assert await counts(storage) == (400, 1, 0)


@local_only
async def test_a_worker_takes_images_for_seconds_not_messages(
    storage: Storage, run_pipeline
):
    await storage.queue.send(message(id=f"j{n}", seed=0, n_iter=50) for n in range(8))
    engine = Drawing(capacity=2, tick_seconds=0.1)
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_pipeline(
            engine, stop=stop, until_empty=False, lease_seconds=300, prefetch_seconds=1
        )
    )
    await until(lambda: len(engine.seeds) >= 6)
    others = await storage.queue.receive(32, 60)
    assert len(others) == 7, "jobs that other workers could have drawn"
    stop.set()
    await running
