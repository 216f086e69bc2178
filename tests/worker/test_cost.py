"""What an image costs: by the metrics, and by the run's own records."""

import time
import uuid
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import polling
from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.pricing import prices
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import Clock, Operations
from messages import message
from worker import metrics, process
from worker.engine import contract
from worker.gpu_clock import GpuClock
from worker.metrics import CostMeter
from worker.replica import Replica
from worker.settings import WorkerSettings

#: Beside images, what says something about jobs and workers.
NOTES = ("-records/", "-models/", "-serving/")

JOBS = 100

#: More than what a worker writes beside images: three containers, its model, itself, its records.
START_WRITES = 10

#: The time in which the stand-in draws four images.
TICK_SECONDS = 0.1

#: Much, so that short times cost more than floats' last digits.
DOLLARS_PER_SECOND = 0.25

PRICED = Replica("RTX 4090 24GB", 3600 * DOLLARS_PER_SECOND, prices.FREE_STORAGE)

StoreImages = Callable[..., Awaitable[None]]  # the same

#: Prices at which storage matters as in production, where an image takes ten times as long.
PRICE_FILE = """
source: a test
storage: {blob_writes_per_10000: 0.055, queue_operations_per_10000: 0.0005}
"""


class FakeEngineThread:
    """The part of an engine thread that the meter reads."""

    def __init__(self) -> None:
        self.clock = GpuClock(time.monotonic())
        self.tick_began_at: float | None = None


def values(meter: CostMeter) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(meter)
    return {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


async def test_images_per_dollar_by_the_metrics_match_the_runs_records(
    storage: Storage,
    victoria_metrics,  # the fixture of conftest.py
    worker_settings: Callable[..., WorkerSettings],
    tmp_path,
):
    path = tmp_path / "prices.yaml"
    path.write_text(PRICE_FILE)
    price = 0.9
    await storage.queue.send(
        message(id=f"j{number}", n_iter=2) for number in range(JOBS)
    )
    settings = worker_settings(
        name=uuid.uuid4().hex,
        price_per_hour=price,
        price_file=path,
        push_url=victoria_metrics.push_url,
    )
    began_at = time.monotonic()
    report = await process.run_worker(
        settings, load=lambda: StandInEngine(capacity=4, tick_seconds=TICK_SECONDS)
    )
    seconds = time.monotonic() - began_at
    stored = [
        name async for name in storage.blobs.names() if not name.startswith(NOTES)
    ]
    assert len(stored) == report.images == 2 * JOBS
    most_dollars = seconds / 3600 * price
    least_dollars = 2 * JOBS / 4 * TICK_SECONDS / 3600 * price
    is_local = settings.storage.startswith("local:")
    table = prices.read_table(path)
    bill = 0 if is_local else table.storage.dollars(prices.operations(JOBS, 2 * JOBS))
    assert is_local or bill > least_dollars / 5, "storage weighs in"

    async def total(metric: str) -> float:
        """Over this worker's series, as the one that names it knows them."""
        mine = f'on (instance) group_left () imagefleet_worker_info{{worker="{settings.name}"}}'
        (series,) = await victoria_metrics.ask(f"sum({metric} * {mine})")
        return float(series["value"][1])

    await victoria_metrics.arrived()
    images = await total("imagefleet_images_total")
    assert images == 2 * JOBS
    gpu = await total("imagefleet_cost_dollars_total{kind='gpu'}")
    assert least_dollars <= gpu <= most_dollars
    assert await total("imagefleet_cost_dollars_total") == pytest.approx(
        gpu + bill, abs=START_WRITES * table.storage.blob_write
    )


async def test_start_up_idle_and_busy_add_up_to_the_whole(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    await storage.queue.send(message(id=f"j{number}") for number in range(12))

    moments: list[float] = []

    class Noting(StandInEngine):
        def __init__(self) -> None:
            moments.append(time.monotonic())
            super().__init__(tick_seconds=0.05)

        def tick(self) -> list[contract.Finished]:
            moments.append(time.monotonic())
            return super().tick()

    began_at = time.monotonic()
    pipeline = await run_pipeline(load=Noting, runs_on=PRICED)
    ended_at = time.monotonic()
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: ended_at))
    seen = values(pipeline.cost)
    busy = pipeline.engine_thread.clock.busy_seconds
    start_up = seen["imagefleet_wasted_dollars_total:start_up"] / DOLLARS_PER_SECOND
    idle = seen["imagefleet_wasted_dollars_total:idle"] / DOLLARS_PER_SECOND

    assert 0 < start_up <= moments[1] - began_at, "it is over with the first tick"
    assert seen["imagefleet_start_up_seconds"] == pytest.approx(start_up)
    assert busy >= 3 * 0.05
    whole = seen["imagefleet_cost_dollars_total:gpu"] / DOLLARS_PER_SECOND
    assert start_up + idle + busy == pytest.approx(whole)
    assert start_up < seen["imagefleet_first_image_seconds"]


async def test_an_image_that_is_stored_already_is_wasted_as_a_duplicate(
    storage: Storage,
    run_pipeline,
    store_images: StoreImages,
):
    await storage.queue.send([message(id="a"), message(id="b")])
    await store_images(message(id="a"))
    pipeline = await run_pipeline(
        StandInEngine(tick_seconds=0.1),
        runs_on=PRICED,
    )
    seen = values(pipeline.cost)

    # The mean when it was lost: the two may have been drawn in ticks of their own.
    one_image = pipeline.engine_thread.clock.busy_seconds / 2 * DOLLARS_PER_SECOND
    assert seen["imagefleet_wasted_dollars_total:duplicate"] == pytest.approx(
        one_image, rel=0.3
    )
    assert seen["imagefleet_wasted_dollars_total:failed"] == 0


async def test_images_of_failed_jobs_are_wasted_as_failed(run_pipeline):
    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if str(request.prompt) == "flat":
            return np.zeros((16, 16, 3), np.uint8)
        if str(request.prompt) == "broken":
            raise errors.JobError
        return draw_noise(request)

    pipeline = await run_pipeline(
        StandInEngine(tick_seconds=0.05, draw=draw),
        sent=[message(prompt=each) for each in ("flat", "broken", "good")],
        runs_on=PRICED,
        max_attempts=1,
    )
    seen = values(pipeline.cost)

    mean = pipeline.engine_thread.clock.busy_seconds / 3 * DOLLARS_PER_SECOND
    assert seen["imagefleet_wasted_dollars_total:failed"] == pytest.approx(
        2 * mean, rel=0.5
    )
    sample = pipeline.metrics.registry.get_sample_value
    assert sample("imagefleet_failed_jobs_total", {"error": "TransientError"}) == 1
    assert sample("imagefleet_failed_jobs_total", {"error": "JobError"}) == 1
    assert sample("imagefleet_failed_jobs_total", {"error": "MissingFileError"}) == 0


def test_wasted_dollars_never_decrease():
    # The engine's thread books a tick only at its end; seen in between, idle must not shrink.
    engine_thread = FakeEngineThread()
    meter = CostMeter(
        engine_thread,
        PRICED,
        Operations(),
        Clock(),
    )  # type: ignore[arg-type]
    meter.ready()
    before = polling.until_in_thread(lambda: meter.wasted_seconds()["idle"])
    engine_thread.clock.busy_seconds += 10

    assert meter.wasted_seconds()["idle"] == before > 0


def test_without_a_price_no_cost_is_reported():
    replica = Replica("none", None, prices.BUILT_IN.storage)
    operations = Operations(blob_writes=10_000)
    seen = values(CostMeter(FakeEngineThread(), replica, operations, Clock()))  # type: ignore[arg-type]

    assert seen["imagefleet_cost_dollars_total:storage"] == pytest.approx(0.055)
    assert "imagefleet_cost_dollars_total:gpu" not in seen
    assert "imagefleet_price_dollars_per_hour" not in seen


def test_a_figure_of_the_first_minutes_that_is_unknown_has_no_series():
    engine_thread = FakeEngineThread()
    clock = engine_thread.clock
    replica = Replica("none", None, prices.FREE_STORAGE)
    meter = CostMeter(engine_thread, replica, Operations(), Clock())  # type: ignore[arg-type]
    names = ["first_image_seconds", "full_speed_seconds", "warm_up_speed_ratio"]
    shown = [f"imagefleet_{name}" for name in names]
    assert not {*shown} & {*values(meter)}

    clock.first_image_at = clock.began_at + 20
    clock.full_speed_at = clock.began_at + 60
    clock.warm_up_speed = 0.5
    seen = values(meter)
    assert [seen[name] for name in shown] == pytest.approx([20, 60, 0.5])


async def test_a_worker_without_a_job_has_no_first_image(run_pipeline):
    pipeline = await run_pipeline()
    seen = values(pipeline.cost)
    assert "imagefleet_start_up_seconds" in seen
    assert "imagefleet_first_image_seconds" not in seen
    assert "imagefleet_full_speed_seconds" not in seen
