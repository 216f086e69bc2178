"""Jobs of several images on both storages: one by one, and only what is missing a second time."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from evaluation.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.storage import dead_letter
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobRecord
from polling import until
from worker.engine import contract
from worker.jobs.in_flight import InFlightImage

Message = Callable[..., str]
RunPipeline = Callable[..., Any]  # the fixture of conftest.py

#: What does not depend on the storage is tested on one.
local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)

pytestmark = pytest.mark.usefixtures("soon")


class Drawing(StandInEngine):
    """Counts the seeds that it draws, which begin at 0; *fails* raises for some of them."""

    def __init__(
        self,
        fails: Callable[[int], errors.FleetError | None] = lambda _: None,
        **options: Any,
    ) -> None:
        super().__init__(draw=self._drawn, **options)
        self.drawn: list[int] = []
        self.batches: list[int] = []
        self.prepared = 0
        self._fails = fails

    def prepare(self, request: contract.ImageRequest) -> Any:
        self.prepared += 1
        return super().prepare(request)

    def tick(self) -> list[contract.Finished]:
        finished = super().tick()
        self.batches.append(len(finished))
        return finished

    def _drawn(self, request: contract.ImageRequest) -> contract.Pixels:
        self.drawn.append(request.seed)
        if error := self._fails(request.seed):
            raise error
        return draw_noise(request)


@pytest.fixture
def looked_for(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that workers ask the storage for."""
    names: list[str] = []
    record = storage.blobs.record

    async def noted(name: str) -> BlobRecord | None:
        names.append(name)
        return await record(name)

    monkeypatch.setattr(storage.blobs, "record", noted)
    return names


async def stored(storage: Storage) -> set[str]:
    return {name async for name in storage.blobs.names("default/")}


async def kept_aside(storage: Storage) -> list[str]:
    return [name async for name in storage.blobs.names("-duplicates/")]


def name(index: int, job: str = "j") -> str:
    return f"default/{job}~{index}.png" if index else f"default/{job}.png"


def names(images: int, job: str = "j") -> set[str]:
    return {name(index, job) for index in range(images)}


async def interrupted(
    run_pipeline: RunPipeline, engine: Drawing, images: int, **changes: Any
) -> Any:
    """Runs a worker that is told to stop once it has drawn so many images."""
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_pipeline(engine, stop=stop, until_empty=False, lease_seconds=300, **changes)
    )
    await until(lambda: len(engine.drawn) >= images)
    stop.set()
    return await running


async def test_images_and_their_records_are_there_while_the_job_goes_on(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    await storage.queue.send([message(id="j", seed=0, batch_size=4, n_iter=10)])
    allowed = threading.Semaphore(0)

    def wait(_seed: int) -> None:
        allowed.acquire()

    async def recorded(images: int) -> reader.Counts:
        return await until(
            lambda: reader.counts(storage, "default"),
            lambda counts: counts.images == images,
        )

    engine = Drawing(wait, capacity=1)
    running = asyncio.create_task(run_pipeline(engine, until_empty=True))
    for images in (8, 16):
        allowed.release(8)
        counts = await recorded(images)  # not at the end alone: the job goes no further
        assert len(await stored(storage)) == images
        assert counts.completed == 0, "counted before it was complete"
    allowed.release(40)
    pipeline = await running

    assert await stored(storage) == names(40)
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (40, 1)
    assert pipeline.metrics.outcomes == {"completed": 1}
    assert pipeline.metrics.registry.get_sample_value("imagefleet_images_total") == 40
    assert engine.prepared == 1, "the images of a job share what is prepared"


async def test_a_worker_that_was_killed_leaves_only_what_is_missing(
    storage: Storage,
    run_pipeline: RunPipeline,
    message: Message,
    store_images: Callable[..., Any],
    looked_for: list[str],
) -> None:
    bodies = [message(id="j", seed=0, n_iter=8), message(id="k", seed=100)]
    await storage.queue.send(bodies)
    for leased in await storage.queue.receive(
        2, 60
    ):  # it dies after it has stored these
        await storage.queue.release(leased)
    await store_images(bodies[0], 1, 4)
    await store_images(bodies[1])
    engine = Drawing()
    pipeline = await run_pipeline(engine)

    assert sorted(engine.drawn) == [0, 2, 3, 5, 6, 7]
    assert await stored(storage) == names(8) | {"default/k.png"}
    assert await kept_aside(storage) == []
    assert len(looked_for) == 8 + 1
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (9, 2)
    assert pipeline.metrics.outcomes == {"completed": 1, "duplicate": 1}


@local_only
async def test_a_job_whose_images_were_all_stored_is_counted_once_and_not_drawn(
    storage: Storage,
    run_pipeline: RunPipeline,
    message: Message,
    store_images: Callable[..., Any],
) -> None:
    await storage.queue.send([body := message(id="j", seed=0, n_iter=3)])
    (leased,) = await storage.queue.receive(1, 60)
    await storage.queue.release(leased)
    await store_images(body)
    engine = Drawing()
    pipeline = await run_pipeline(engine)
    counts = await reader.counts(storage, "default")
    assert (engine.drawn, counts.images, counts.completed) == ([], 3, 1)
    assert pipeline.metrics.outcomes == {"duplicate": 1}


async def test_a_drain_waits_for_the_images_in_slots_and_leaves_the_others_to_the_next_worker(
    storage: Storage, run_pipeline: RunPipeline, message: Message, looked_for: list[str]
) -> None:
    await storage.queue.send([message(id="j", seed=0, batch_size=50)])
    first = Drawing(capacity=2, tick_seconds=0.1)
    pipeline = await interrupted(run_pipeline, first, 5)
    assert pipeline.metrics.outcomes == {"handed_back": 1}
    assert 5 <= len(first.drawn) < 30, "it has drawn on after it was told to stop"
    assert await stored(storage) == {name(seed) for seed in first.drawn}
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (len(first.drawn), 0)

    second = Drawing()
    pipeline = await run_pipeline(second)  # at once, not after 300 s
    assert Counter(first.drawn + second.drawn) == Counter(range(50))
    assert await stored(storage) == names(50)
    assert looked_for == [], "the message says what is stored"
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (50, 1)
    assert pipeline.metrics.outcomes == {"completed": 1}


@local_only
async def test_a_worker_that_has_to_hurry_leaves_the_next_one_to_look(
    storage: Storage, run_pipeline: RunPipeline, message: Message, looked_for: list[str]
) -> None:
    await storage.queue.send([message(id="j", seed=0, batch_size=20)])
    first = Drawing(capacity=2, tick_seconds=0.2)
    await interrupted(run_pipeline, first, 5, grace_seconds=0)
    before = await stored(storage)
    recorded = (await reader.counts(storage, "default")).images
    second = Drawing()
    await run_pipeline(second)
    assert {name(seed) for seed in second.drawn} == names(20) - before
    assert looked_for or recorded == len(before)
    assert await kept_aside(storage) == []
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (20, 1)


async def test_a_failed_image_fails_its_job_once_and_says_what_is_stored(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    def bad(seed: int) -> errors.FleetError | None:
        return errors.JobError("it does not fit") if seed == 6 else None

    await storage.queue.send([message(id="j", seed=0, batch_size=40)])
    engine = Drawing(bad, capacity=2, tick_seconds=0.03)
    pipeline = await run_pipeline(engine)
    assert pipeline.metrics.outcomes == {"failed": 1}
    assert len(engine.drawn) < 30, "drawn on after it had failed"
    done = sorted(set(engine.drawn) - {6})
    assert await stored(storage) == {name(index) for index in done}
    (entry,) = [each async for each in storage.poison.browse()]
    failed = dead_letter.FailedJob.parse(entry.body)
    assert failed is not None
    # On a busy machine those after it may not have been begun.
    later = {5: "", 7: ", 7"}.get(done[-1], f", 7-{done[-1]}")
    assert (
        failed.reason
        == f"image 6: it does not fit; of its 40 images are stored: 0-5{later}"
    )
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed, counts.failed) == (len(done), 0, 1)

    await storage.queue.send([await failed.message(storage.blobs)])  # as a replay does
    second = Drawing()
    await run_pipeline(second)
    assert sorted(second.drawn) == sorted(set(range(40)) - set(done))
    assert await stored(storage) == names(40)
    assert (await reader.counts(storage, "default")).completed == 1


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
    run_pipeline: RunPipeline,
    message: Message,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Drawing(capacity=4)
    held = Held(storage, monkeypatch)
    held.is_held = lambda _: len(engine.drawn) < 40
    await storage.queue.send([message(id="j", seed=0, n_iter=40)])
    await run_pipeline(engine)
    assert held.created[0] == name(0)
    assert sorted(engine.drawn) == list(range(40))
    assert await stored(storage) == names(40)


@pytest.mark.parametrize("later", [0, 100])
async def test_of_two_batches_of_one_id_at_the_same_moment_one_is_completed(
    storage: Storage,
    run_pipeline: RunPipeline,
    message: Message,
    monkeypatch: pytest.MonkeyPatch,
    later: int,
) -> None:
    held = Held(storage, monkeypatch)
    held.is_held = lambda metadata: metadata["seed"] == str(later) and not held.created
    await storage.queue.send(
        [message(id="j", seed=seed, n_iter=3) for seed in (0, 100)]
    )
    await run_pipeline(Drawing(capacity=6))
    metadata = [each.metadata async for each in storage.blobs.records("default/")]
    first = 100 - later
    assert sorted(int(each["seed"]) for each in metadata) == [
        first,
        first + 1,
        first + 2,
    ]
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed, counts.failed) == (3, 1, 1)


def failing_once(at: int) -> Callable[[int], errors.FleetError | None]:
    """The fault of the image with that seed, the first time that it is drawn."""
    failures = [errors.TransientError("out of memory")]
    return lambda seed: failures.pop() if seed == at and failures else None


@local_only
async def test_a_first_image_that_fails_for_a_time_claims_the_name_later(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    await storage.queue.send([message(id="j", seed=0, n_iter=50)])
    engine = Drawing(failing_once(0), capacity=4)
    pipeline = await run_pipeline(engine)
    assert len(engine.drawn) < 50 + 20, "drawn on without a name"
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}
    assert await stored(storage) == names(50)


@local_only
async def test_one_image_that_fails_for_a_time_is_all_that_is_drawn_again(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    await storage.queue.send([message(id="j", seed=0, batch_size=12)])
    engine = Drawing(failing_once(3))
    pipeline = await run_pipeline(engine)
    assert Counter(engine.drawn) == Counter([*range(12), 3])
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (12, 1)


@local_only
async def test_a_job_that_fails_with_every_image_is_given_up_after_a_few(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    engine = Drawing(lambda _: errors.TransientError("out of memory"), capacity=4)
    await storage.queue.send([message(id="j", seed=0, n_iter=500)])
    pipeline = await run_pipeline(
        engine, max_attempts=4
    )  # without being taken for a broken node
    assert pipeline.metrics.outcomes == {"retried": 3, "failed": 1}
    assert len(engine.drawn) < 100
    (failed,) = [each async for each in reader.ended(storage, "default")]
    assert "out of memory; of its 500 images are stored: none" in str(failed.reason)


@local_only
async def test_a_thousand_images_in_one_message_hold_little_memory_and_keep_their_lease(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    class Sampled(Drawing):
        most = 0

        def tick(self) -> list[contract.Finished]:
            if len(self.batches) % 20 == 0:
                alive = sum(type(each) is InFlightImage for each in gc.get_objects())
                self.most = max(self.most, alive)
            return super().tick()

    gc.collect()  # images of other tests' pipelines
    await storage.queue.send([message(id="j", seed=0, n_iter=1000)])
    engine = Sampled(capacity=16, tick_seconds=0.035)
    pipeline = await run_pipeline(engine, lease_seconds=2)
    assert pipeline.metrics.outcomes == {"completed": 1}
    assert sorted(engine.drawn) == list(range(1000))
    assert engine.most < 200, "more images in memory than in slots and queues"
    renewals = pipeline.metrics.registry.get_sample_value(
        "imagefleet_lease_renewals_total", {"result": "renewed"}
    )
    assert renewals >= 1
    counts = await reader.counts(storage, "default")
    assert (counts.images, counts.completed) == (1000, 1)


@local_only
async def test_a_long_job_and_others_take_turns_and_no_slot_is_empty(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    others = [message(id=f"s{seed}", seed=seed) for seed in range(1000, 1010)]
    await storage.queue.send(
        [*others[:5], message(id="j", seed=0, n_iter=60), *others[5:]]
    )
    engine = Drawing(capacity=4, tick_seconds=0.02)
    await run_pipeline(engine)
    places = [place for place, seed in enumerate(engine.drawn) if seed >= 1000]
    assert len(places) == 10
    assert places[-1] < 40, "the last of the other jobs waited for all of the long one"
    assert engine.drawn[:20].count(0) == 1, "the long job waited for all others"
    assert sum(engine.batches[1:-1]) >= 0.8 * 4 * len(engine.batches[1:-1]), (
        engine.batches
    )


@local_only
async def test_a_worker_takes_images_for_seconds_not_messages(
    storage: Storage, run_pipeline: RunPipeline, message: Message
) -> None:
    await storage.queue.send(message(id=f"j{n}", seed=0, n_iter=50) for n in range(8))
    engine = Drawing(capacity=2, tick_seconds=0.1)
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_pipeline(
            engine, stop=stop, until_empty=False, lease_seconds=300, prefetch_seconds=1
        )
    )
    await until(lambda: len(engine.drawn) >= 6)
    others = await storage.queue.receive(32, 60)
    assert len(others) == 7, "jobs that other workers could have drawn"
    stop.set()
    await running
