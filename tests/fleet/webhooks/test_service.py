"""What the receiver gets: each event at least once, signed, whatever fails in between."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

import polling
import sent_jobs
from fleet.webhooks import events, service
from fleet.webhooks.endpoint import Endpoint, read_secrets
from fleet.webhooks.events import Source, State
from imagefleet import errors
from imagefleet.records.ledger import note
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from stored_images import ImageLog


@pytest.fixture
def storage_settings(local_settings: StorageSettings) -> StorageSettings:
    return local_settings


@pytest.fixture
def log(storage: Storage) -> RecordLog:
    return ImageLog(storage.blobs, "worker-1")


@pytest.fixture
def operator(storage: Storage) -> RecordLog:
    return RecordLog(storage.files, "operator")


@pytest.fixture
def times(monkeypatch) -> pytest.MonkeyPatch:
    """Nothing waits long; a test may set some of them otherwise."""
    monkeypatch.setattr(events, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(service, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(service, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(service, "_STEP_SECONDS", 0.02)
    monkeypatch.setattr(service, "RETRY_SECONDS", (0.05, 0.1))
    return monkeypatch


Run = Callable[..., Any]


@pytest.fixture
def run(storage: Storage, receiver, tmp_path, times: pytest.MonkeyPatch) -> Run:
    """Runs the service: until a condition holds, or once; a killed one saves nothing at its end."""
    key = tmp_path / "secret"
    key.write_text(f"{receiver.secret}\n")

    async def run(
        until: Callable[[], bool] | None = None,
        *,
        is_killed: bool = False,
        **wanted: Any,
    ) -> State:
        file = tmp_path / "webhooks.json"
        campaign = wanted.pop("campaign", None)
        state = State.read(file, "receiver", campaign)
        async with aiohttp.ClientSession() as session:
            to = Endpoint(session, receiver.url, read_secrets(key), storage.blobs.clock)
            running = service.Service(
                Source(storage, state, "acme/jobs", **wanted),
                to,
                CollectorRegistry(),
                file,
            )
            if until is None:
                await running.run(once=True)
                return State.read(file, "receiver", campaign)
            task = asyncio.create_task(running.run())
            await polling.until(lambda: until() or task.done())
            if is_killed:
                running._save = lambda: None  # type: ignore[method-assign]
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return State.read(file, "receiver", campaign)

    return run


def name(job_id: str, index: int) -> str:
    return f"spring/{job_id}~{index}.png" if index else f"spring/{job_id}.png"


def record(number: int, outcome: str = "completed", **fields: Any) -> Record:
    known: JSONDict = {
        "outcome": outcome,
        "id": f"job-{number}",
        "campaign": "spring",
        "at": datetime.now(UTC),
        "source": f"message-{number}",
        "worker": "w1",
    }
    if outcome == "completed":
        known |= {"blob": f"spring/job-{number}.png", "seed": number}
    return Record.model_validate(known | fields)


async def test_a_campaign_that_has_an_end_of_every_job_is_reported_once(
    storage: Storage, log: RecordLog, operator: RecordLog, receiver, run
):
    await sent_jobs.note(storage, "spring", 3, ids=("job-1", "job-2", "job-3"))
    await log.add([record(1), record(2, "failed", error="JobError", reason="no")])
    await run()
    assert receiver.events == [], "one job is pending"
    await operator.open("spring", "cancelled")
    await log.add([record(3, "cancelled")])
    await run()
    await run()
    (event,) = receiver.events
    assert event["type"] == "campaign.completed"
    figures = (
        "campaign",
        "sent",
        "images",
        "completed",
        "failed",
        "cancelled",
        "pending",
    )
    assert [event["data"][name] for name in figures] == ["spring", 3, 1, 1, 1, 1, 0]
    assert event["timestamp"].endswith("Z")


async def test_what_a_worker_has_done_is_reported(
    storage: Storage, log: RecordLog, receiver, run, run_worker
):
    jobs = ({"id": "one"}, {"id": "set", "batch_size": 3}, {"id": "bad", "steps": 500})
    shared = {"prompt": "a cat", "campaign": "spring", "metadata": {"order": 7}}
    bodies = [json.dumps(shared | each) for each in jobs]
    await storage.queue.send(bodies)
    await note(storage, bodies[:2])
    await sent_jobs.note(storage, "spring", 1, ids=["bad"])
    await run_worker("worker-1")
    await run(each_job=True)
    assert {each["id"] for each in receiver.told("job.completed")} == {"one", "set"}
    (failed,) = receiver.told("job.failed")
    assert (failed["id"], failed["campaign"]) == ("bad", "spring")
    assert failed["error"] == "InvalidMessageError"
    (ended,) = receiver.told("campaign.completed")
    figures = [
        ended[name] for name in ("sent", "images", "completed", "failed", "pending")
    ]
    assert figures == [3, 4, 2, 1, 0]


async def test_a_campaign_that_goes_on_ends_again_with_another_id(
    storage: Storage, log: RecordLog, operator: RecordLog, receiver, run
):
    await sent_jobs.note(storage, "spring", 2, ids=("job-1", "job-2"))
    await log.add([record(1), record(2, "failed", error="JobError", reason="no")])
    await run()
    await operator.add([record(2, "replayed")])
    await run()
    await log.add([record(2, source="message-3")])
    await run()
    assert [each["failed"] for each in receiver.told("campaign.completed")] == [1, 0]
    assert len(receiver.requests) == 2


async def test_without_a_filler_that_counts_a_campaign_ends_with_the_queue(
    storage: Storage, log: RecordLog, receiver, run, times: pytest.MonkeyPatch
):
    times.setattr(events, "QUIET_SECONDS", 0.0)
    await storage.queue.send(['{"prompt": "a cat"}'])
    await log.add([record(1)])
    await run()
    assert receiver.events == [], "the queue is not empty"
    (message,) = await storage.queue.receive(1, 60)
    await storage.queue.delete(message)
    await run()
    assert receiver.told("campaign.completed")[0]["pending"] is None


async def test_each_job_is_reported_if_asked(
    log: RecordLog, operator: RecordLog, receiver, run
):
    await log.add([record(1, metadata={"order": 7})])
    await log.add(
        [record(2, "failed", error="MissingFileError", reason="r" * 900, attempts=5)]
    )
    await operator.open("spring", "cancelled")
    await operator.add([record(4, "discarded")])
    await log.add([record(3, "cancelled"), record(5, "dropped", reason="r" * 900)])
    await run(each_job=True)
    (completed,) = receiver.told("job.completed")
    (failed,) = receiver.told("job.failed")
    (dropped,) = receiver.told("job.dropped")
    assert (dropped["id"], dropped["attempts"]) == ("job-5", 1)
    assert dropped["reason"] == failed["reason"] == "r" * 500
    assert completed["metadata"] == {"order": 7}
    assert completed["images"] == ["spring/job-1.png"]
    assert (failed["error"], failed["attempts"]) == ("MissingFileError", 5)
    assert [each["id"] for each in receiver.told("job.cancelled")] == ["job-3"]
    assert len(receiver.events) == 4


async def test_a_job_of_several_images_is_complete_with_the_last_of_them(
    log: RecordLog, receiver, run
):
    image = {"images": 3, "id": "set"}
    for index in (2, 0):
        early = {"index": index, "seed": 7 + index, "completes": False}
        await log.add([record(1, **image, **early, blob=name("set", index))])
    await run(each_job=True)
    assert receiver.events == []
    await log.add(
        [record(1, **image, index=1, seed=8, blob=name("set", 1), completes=True)]
    )
    await run(each_job=True)
    (event,) = receiver.told("job.completed")
    assert event["images"] == [name("set", index) for index in range(3)]
    assert event["seed"] == 7


async def test_a_job_that_is_recorded_again_has_the_same_id(
    log: RecordLog, receiver, run
):
    await log.add([record(1)])
    await run(each_job=True)
    await log.add([record(1, source="message-9")], again=True)
    await run(each_job=True)
    assert len(receiver.requests) == 1


async def test_other_campaigns_and_older_jobs_are_left_out(
    log: RecordLog, receiver, run
):
    old = datetime.now(UTC) - timedelta(days=1)
    await log.add([record(1, campaign="summer"), record(2), record(3, at=old)])
    await run(each_job=True, campaign="spring", since=old + timedelta(hours=1))
    assert [each["id"] for each in receiver.told("job.completed")] == ["job-2"]


async def test_events_that_fail_are_tried_again_and_do_not_hold_up_others(
    log: RecordLog, receiver, run
):
    await log.add([record(number) for number in range(20)])
    receiver.answers.extend(
        [500, 404, 302, web.Response(status=503, headers={"Retry-After": "0"})]
    )
    state = await run(lambda: len(receiver.events) == 20, each_job=True)
    assert len(receiver.told("job.completed")) == 20
    assert receiver.requests.total() == 24
    assert (max(receiver.requests.values()), state.waiting) == (2, {})


async def test_an_event_is_given_up_after_its_time(
    log: RecordLog, receiver, run, times: pytest.MonkeyPatch
):
    times.setattr(service, "GIVE_UP_SECONDS", 0.0)
    await log.add([record(1)])
    receiver.always = 500
    state = await run(lambda: receiver.requests.total() == 1, each_job=True)
    assert state.waiting == {}


async def test_a_busy_receiver_is_left_alone_for_as_long_as_it_says(
    log: RecordLog, receiver, run
):
    await log.add([record(number) for number in range(3)])
    later = web.Response(status=429, headers={"Retry-After": "3600"})
    receiver.answers.append(later)
    with pytest.raises(errors.TransientError, match="run it again"):
        await run(each_job=True)
    assert receiver.requests.total() <= service.CONCURRENCY
    state = await run(each_job=True)  # the operator's next run does try
    assert state.waiting == {}


async def test_a_receiver_that_is_down_gets_everything_after_a_restart(
    log: RecordLog, receiver, run, times: pytest.MonkeyPatch
):
    """And memory is bounded meanwhile: what is not begun waits in the records."""
    times.setattr(service, "MAX_WAITING", 10)
    times.setattr(events, "_RECORDS_AT_ONCE", 1)
    times.setattr(events, "_PART_BYTES", 200)  # of a part with 8 records
    for first in range(0, 40, 8):
        await log.add([record(number) for number in range(first, first + 8)])
    receiver.always = 502
    times.setattr("fleet.webhooks.endpoint.PAUSE_SECONDS", 0.01)
    waiting = await run(lambda: receiver.requests.total() >= 15, each_job=True)
    assert 10 <= len(waiting.waiting) < 40
    receiver.always = 204
    await run(lambda: len(receiver.events) >= 40, each_job=True)
    assert (
        len({each["webhook-id"] for each in receiver.events})
        == len(receiver.events)
        == 40
    )


@pytest.mark.parametrize("each_save", [True, False])
async def test_a_killed_service_loses_no_event(
    log: RecordLog, receiver, run, times: pytest.MonkeyPatch, each_save: bool
):
    times.setattr(service, "SAVE_SECONDS", 0.0 if each_save else 3600.0)
    await log.add([record(number) for number in range(60)])
    for sent in (12, 24, 36, 48):
        receiver.answers.extend([500, 204] * 3)
        await run(
            lambda sent=sent: receiver.requests.total() >= sent,
            each_job=True,
            is_killed=True,
        )
    receiver.answers.clear()
    await run(each_job=True)
    assert {each["id"] for each in receiver.told("job.completed")} == {
        f"job-{number}" for number in range(60)
    }
    if each_save:  # what was in flight comes again, with its id
        assert len(receiver.events) <= 60 + 4 * service.CONCURRENCY


async def test_an_outage_of_the_storage_loses_no_event(
    storage: Storage, log: RecordLog, receiver, run
):
    for number in range(3):
        await ImageLog(storage.blobs, f"worker-{number}").add([record(number)])
    read_part = storage.blobs.read_part
    calls = 0

    async def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise errors.TransientError("the storage is down")
        return await read_part(*arguments)

    storage.blobs.read_part = fail  # type: ignore[method-assign]
    with pytest.raises(errors.TransientError):
        await run(each_job=True)
    storage.blobs.read_part = read_part  # type: ignore[method-assign]
    await run(each_job=True)
    assert len(receiver.told("job.completed")) == 3


async def test_a_receiver_that_is_gone_gets_nothing_more(log: RecordLog, receiver, run):
    await log.add([record(number) for number in range(30)])
    receiver.always = 410
    with pytest.raises(errors.SetupError, match="410 Gone"):
        await run(each_job=True)
    assert receiver.requests.total() <= service.CONCURRENCY


async def test_each_attempt_has_the_time_of_its_own(
    log: RecordLog, receiver, run, times: pytest.MonkeyPatch
):
    """A receiver refuses what is older than five minutes."""
    times.setattr(service, "RETRY_SECONDS", (1.0,))
    await log.add([record(1)])
    receiver.answers.append(500)
    await run(lambda: len(receiver.events) == 1, each_job=True)
    assert receiver.timestamps[1] > receiver.timestamps[0]


def test_no_event_is_larger_than_receivers_take():
    image = {
        "images": 64,
        "id": "i" * 128,
        "campaign": "c" * 128,
        "metadata": {"x": "y" * 4000},
    }
    blob = f"{'c' * 128}/{'i' * 128}-63.png"
    found = events.job_ended(
        "acme/jobs", record(1, **image, completes=True, index=63, blob=blob)
    )
    assert found is not None
    assert len(found.body()) < 30_000
    forged = events.job_ended(
        "acme/jobs", record(1, "cancelled", metadata={"x": "y" * 1_000_000})
    )
    assert forged is not None
    assert len(forged.body()) < 1_000
    assert "." not in found.id
    assert json.loads(found.body())["data"]["id"] == "i" * 128
