"""A storage whose clock differs from this machine's by an hour: times that are compared are its."""

import dataclasses
import logging
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import generate_latest

import azurite
from benchmarks.stand_in import StandInEngine, draw_noise
from browsing import visible
from fleet.report import figures
from fleet.report import records as report_records
from fleet.webhooks import events
from imagefleet import cancelled, errors
from imagefleet.job.message import Job
from imagefleet.pricing import prices
from imagefleet.records import reader
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import Clock
from imagefleet.storage.settings import StorageSettings
from messages import failed_jobs
from worker.engine import contract

HOUR = 3600

#: An answer that takes seconds, on a busy machine, tells the clock that much less exactly.
BLUR = timedelta(seconds=30)


@pytest.fixture(
    scope="module", params=[HOUR, pytest.param(-HOUR, marks=pytest.mark.slow)]
)
def address(request) -> Iterator[str]:
    if azurite.why_missing():
        pytest.skip("no Azurite")
    with azurite.running(request.param) as address:
        yield address


@pytest.fixture
def storage_settings(address: str) -> StorageSettings:
    name = f"test-{uuid.uuid4().hex[:16]}"
    return StorageSettings(
        storage=address, queue=name, container=name, files_container=f"{name}-files"
    )


def draw(request: contract.ImageRequest) -> contract.Pixels:
    if request.seed == 5:
        raise errors.JobError("no")
    return draw_noise(request)


async def test_records_have_the_storages_time(storage: Storage, run_pipeline):
    jobs = [Job(prompt="a", id="good"), Job(prompt="a", id="bad", seed=5)]
    await storage.queue.send([job.to_message() for job in jobs])
    began_at = storage.blobs.clock.now() - BLUR

    await run_pipeline(StandInEngine(draw=draw))

    until = storage.blobs.clock.now() + BLUR
    (image,) = [record async for record in reader.images(storage, "default")]
    (ended,) = [record async for record in reader.ended(storage, "default")]
    assert image.started_at is not None
    for at in (image.at, ended.at, image.started_at):
        assert began_at <= at <= until
    (failed,) = await failed_jobs(storage)
    assert began_at <= failed.at <= until


async def test_a_report_divides_by_times_of_one_clock(
    storage: Storage, storage_settings: StorageSettings, run_pipeline
):
    """One of two workers has the storage's time, the other an hour more or less."""
    async with open_storage(storage_settings) as right:
        right.blobs.clock.machine = lambda: storage.blobs.clock.now().timestamp()
        for number, opened in enumerate((storage, right, storage)):
            await storage.queue.send([Job(prompt="a", id=f"j{number}").to_message()])
            await run_pipeline(opened=opened)
    records = await report_records.read_records(storage, "default", 0)
    computed = figures.compute(records, storage.url, prices.BUILT_IN)
    assert computed["seconds"] < HOUR / 2


async def test_a_clock_that_is_off_is_named_once_and_measured(
    storage: Storage, run_pipeline, caplog
):
    with caplog.at_level(logging.WARNING):
        pipeline = await run_pipeline()
        await storage.check()
    said = [*caplog.get_records("setup"), *caplog.records]
    assert (
        sum("this machine's clock is 3,600 seconds" in each.message for each in said)
        == 1
    )
    text = generate_latest(pipeline.metrics.registry).decode()
    (line,) = [
        each for each in text.splitlines() if each.startswith("imagefleet_clock_offset")
    ]
    assert abs(float(line.split()[-1])) == pytest.approx(HOUR, abs=30)


async def test_a_signature_ends_by_the_storages_clock(
    storage: Storage, run_pipeline, tmp_path
):
    """Half an hour ago by the storage's clock, whatever this machine's says."""
    key = SigningKey.create(tmp_path / "key.pem")
    scope = storage.scope
    for name, minutes in (("past", -30), ("holds", 30)):
        shift = timedelta(days=-30, minutes=minutes)
        ended = dataclasses.replace(scope, now=lambda shift=shift: scope.now() + shift)
        await storage.queue.send(
            [Job(prompt="a", id=name).to_message(JobSigner(key, ended))]
        )
    await run_pipeline(trusted_key=key.public)
    (failed,) = await failed_jobs(storage)
    assert (failed.id, failed.error) == ("past", "UntrustedJobError")


@pytest.mark.usefixtures("cancel_at_once")
async def test_a_campaign_is_cancelled_by_the_storages_clock(storage: Storage):
    await storage.queue.send([Job(prompt="a", id="a", campaign="spring").to_message()])
    (message,) = [each async for each in visible(storage.queue)]
    at = await cancelled.cancel(storage, "spring")
    ahead = timedelta(seconds=cancelled.LOAD_SECONDS)
    assert ahead <= at - message.enqueued_at < ahead + BLUR


async def test_a_campaigns_webhook_does_not_wait_for_this_machines_clock(
    storage: Storage, run_pipeline, monkeypatch
):
    monkeypatch.setattr(events, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(events, "QUIET_SECONDS", 0.0)
    await run_pipeline(sent=[Job(prompt="a", id="a", campaign="spring").to_message()])
    state = events.State(address="https://example.com")
    source = events.Source(storage, state, "fleet")

    await source.read()
    await source.find_ends(is_patient=False)

    (event,) = state.waiting.values()
    assert event.type == "campaign.completed"
    assert abs(event.timestamp - storage.blobs.clock.now()) < timedelta(
        seconds=HOUR / 2
    )


# The clock alone


def test_a_clock_narrows_down_to_less_than_a_second():
    now = 1_000_000.0
    clock = Clock(lambda: now)
    for step in range(100):
        now = 1_000_000 + step * 1.37
        storages = now - 7.4
        clock.answered(datetime.fromtimestamp(int(storages), UTC), now - 0.05)
    assert clock.offset_seconds == pytest.approx(7.4, abs=0.1)


def test_a_clock_that_is_set_meanwhile_is_noticed_with_the_next_answer():
    now = 1_000_000.0
    clock = Clock(lambda: now)
    clock.answered(datetime.fromtimestamp(1_000_000, UTC), now)
    assert clock.offset_seconds == 0
    now += 600
    clock.answered(datetime.fromtimestamp(1_000_001, UTC), now)
    assert clock.offset_seconds == pytest.approx(599, abs=1)


@pytest.mark.slow
def test_a_request_that_took_long_says_little():
    clock = Clock(lambda: 1_000_000.0)
    clock.answered(datetime.fromtimestamp(1_000_000 - 40, UTC), 1_000_000 - 50)
    assert clock.offset_seconds == 0
