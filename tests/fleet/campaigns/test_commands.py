"""`imagefleet status`, `job` and `cancel`, on both storages."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

import sent_jobs
from imagefleet import cancelled
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused
from storages import flags

Result = TypeVar("Result")

NOW = datetime.now(UTC)


def on(
    settings: StorageSettings, work: Callable[[Storage], Awaitable[Result]]
) -> Result:
    """Does *work* with the storage."""

    async def opened() -> Result:
        async with open_storage(settings) as storage:
            await storage.create()
            return await work(storage)

    return asyncio.run(opened())


def status_of(
    in_process: Imagefleet, settings: StorageSettings, *named: str
) -> JSONDict:
    """What `imagefleet status --json` says of all, a campaign or a job."""
    told: JSONDict = json.loads(
        in_process("status", *named, "--json", *flags(settings)).stdout
    )
    return told


def job(id: str, campaign: str = "spring") -> str:  # noqa: A002 - a job's field
    return json.dumps({"prompt": "a cat", "id": id, "campaign": campaign})


async def store(storage: Storage, campaign: str, id: str, **facts: Any) -> None:  # noqa: A002
    """An image and its record, as a worker stores them."""
    name = f"{campaign}/{id}.png"
    metadata = {
        "job": id,
        "campaign": campaign,
        "worker": "w1",
        "attempt": "2",
        "seconds": "1",
    }
    metadata["digest"] = "0" * 64  # as `sent_jobs` notes it
    await storage.blobs.create(name, b"pixels", "image/png", {**metadata, **facts})
    log = RecordLog(storage.blobs, "w1")
    await log.add(
        [Record(outcome="completed", id=id, campaign=campaign, at=NOW, blob=name)]
    )


async def fill(storage: Storage) -> None:
    """Spring: 5 jobs sent, of which each ended otherwise and one is queued; autumn: all done."""
    await store(storage, "spring", "done")
    await store(storage, "autumn", "done")
    log = RecordLog(storage.blobs, "w2")
    operator = RecordLog(storage.files, "operator")
    ended: JSONDict = {"campaign": "spring", "at": NOW, "worker": "w2"}
    await log.add(
        [
            Record(
                outcome="failed",
                id="bad",
                error="JobError",
                reason="no \x1b[31mred",
                **ended,
            ),
            Record(
                outcome="failed", id="again", error="JobError", source="m1", **ended
            ),
            Record(outcome="cancelled", id="late", **ended),
        ]
    )
    await operator.open("spring", "cancelled")
    await operator.add([Record(outcome="replayed", id="again", source="m1", **ended)])
    await sent_jobs.note(storage, "spring", 5, ids=("done", "bad", "again", "late"))
    await sent_jobs.note(storage, "autumn", 1, ids=["done"])
    await storage.queue.send([job("again"), job("flying"), job("waiting", "autumn")])


@pytest.fixture
def filled(storage_settings: StorageSettings) -> StorageSettings:
    on(storage_settings, fill)
    return storage_settings


def test_campaigns_counts_each_outcome_and_lists_the_latest_first(
    filled: StorageSettings, in_process: Imagefleet
):
    listed = status_of(in_process, filled)
    assert listed["queue"]["messages"] == 3
    by_name = {each.pop("campaign"): each for each in listed["campaigns"]}
    assert set(by_name) == {"spring", "autumn"}
    figures = ("sent", "images", "completed", "failed", "cancelled", "pending")
    assert [by_name["spring"][each] for each in figures] == [5, 1, 1, 1, 1, 2]
    assert [by_name["autumn"][each] for each in figures] == [1, 1, 1, 0, 0, 0]
    times = [each["last_at"] for each in listed["campaigns"]]
    assert times == sorted(times, reverse=True)
    plain = in_process("status", *flags(filled)).stdout
    assert "spring" in plain
    assert "autumn" in plain


def test_records_that_do_not_fit_are_told_since_the_figures_lack_them(
    local_settings: StorageSettings, in_process: Imagefleet
):
    async def damage(storage: Storage) -> None:
        await fill(storage)
        for name in "xy":
            await storage.blobs.append(
                f"-records/spring/{name}.jobs.jsonl.gz", b"no gzip", 0
            )

    on(local_settings, damage)
    assert status_of(in_process, local_settings)["unfit_records"] == 2
    shown = in_process("status", *flags(local_settings)).stdout
    assert "2 records not in these figures" in shown


def test_a_job_is_where_it_is(filled: StorageSettings, in_process: Imagefleet):
    is_azure = filled.storage.startswith("Default")
    expected: dict[str, tuple[str, JSONDict]] = {
        "done": ("completed", {"attempts": 2, "worker": "w1"}),
        "bad": (
            "failed",
            {"error": "JobError", "reason": "no \x1b[31mred", "worker": "w2"},
        ),
        "late": ("cancelled", {"worker": "w2"}),
        "again": ("queued", {"attempts": 0, "reason": None}),
    }
    if is_azure:  # it shows only the first messages
        expected["nobody"] = ("queued or in flight", {"since": None})
    else:
        assert in_process("status", "spring/nobody", *flags(filled)).returncode == 2
    for name, (state, facts) in expected.items():
        found = status_of(in_process, filled, f"spring/{name}")
        assert found | facts == found
        assert found["state"] == state
        if found["since"]:
            since = datetime.fromisoformat(found["since"])
            assert abs(since - NOW) < timedelta(hours=1)
        blobs = [each["blob"] for each in found["images"]]
        assert blobs == ["spring/done.png"] * (name == "done")
        plain = in_process("status", f"spring/{name}", *flags(filled)).stdout
        assert state in plain
        assert "\x1b" not in plain
        assert all(each["address"] in plain for each in found["images"])


def test_a_job_in_flight_and_one_of_several_images(
    local_settings: StorageSettings, in_process: Imagefleet
):
    async def lease(storage: Storage) -> None:
        await storage.queue.send([job("flying"), job("flying-1")])
        await storage.queue.receive(1, 600)
        await store(storage, "spring", "flying", job="flying", images="2")

    on(local_settings, lease)
    found = status_of(in_process, local_settings, "spring/flying")
    assert (found["state"], found["attempts"]) == ("in flight", 1)
    assert len(found["images"]) == 1
    other = status_of(in_process, local_settings, "spring/flying-1")
    assert (other["state"], other["images"]) == ("queued", [])


def test_an_image_of_another_digest_than_the_job_that_was_sent_is_not_its_own(
    local_settings: StorageSettings, in_process: Imagefleet
):
    async def squat(storage: Storage) -> None:
        for name, digest in (("taken", "1" * 64), ("done", "0" * 64)):
            await store(storage, "spring", name, digest=digest)
        await sent_jobs.note(storage, "spring", 2, ids=("taken", "done"))
        await storage.queue.send([job("taken")])

    on(local_settings, squat)
    for name, state, images in (("taken", "queued", 0), ("done", "completed", 1)):
        told = status_of(in_process, local_settings, f"spring/{name}")
        assert (told["state"], len(told["images"])) == (state, images)


def test_what_an_image_does_not_tell_of_its_job_is_not_made_up(
    local_settings: StorageSettings, in_process: Imagefleet
):
    async def put(storage: Storage) -> None:
        await storage.blobs.create("spring/mine.png", b"pixels", "image/png", {})

    on(local_settings, put)
    found = status_of(in_process, local_settings, "spring/mine")
    assert found["state"] == "completed"
    assert (found["attempts"], found["worker"]) == (None, None)


def test_cancel_shows_what_it_would_do_asks_and_writes_the_list(
    filled: StorageSettings, in_process: Imagefleet, monkeypatch
):
    monkeypatch.setattr(cancelled, "LOAD_SECONDS", 0.0)

    async def times(storage: Storage) -> dict[str, datetime]:
        found = cancelled.CancelledCampaigns(storage.files, storage.queue.name)
        await found.refresh()
        return dict(found.times)

    call = ("cancel", "spring", *flags(filled))
    assert "2 jobs, less what is being drawn" in in_process(*call, "--dry-run").stdout
    assert_refused(in_process(*call), "add --yes")
    assert on(filled, times) == {}
    found = json.loads(in_process(*call, "--yes", "--json").stdout)
    assert (found["pending"], found["messages"]) == (2, 3)
    assert on(filled, times) == {
        "spring": datetime.fromisoformat(found["cancelled_until"])
    }


def test_purge_asks_with_the_count_and_keeps_failed_jobs(
    filled: StorageSettings, in_process: Imagefleet
):
    async def depths(storage: Storage) -> tuple[int, int]:
        poison = await storage.poison.depth()
        return (await storage.queue.depth()).messages, poison.messages

    async def fail_one(storage: Storage) -> None:
        await storage.poison.send(["{}"])

    on(filled, fail_one)
    assert "3 jobs" in in_process("cancel", "--all", "--dry-run", *flags(filled)).stdout
    assert "Delete 3 jobs" in in_process("cancel", "--all", *flags(filled)).stderr
    assert on(filled, depths) == (3, 1)
    found = json.loads(
        in_process("cancel", "--all", "--yes", "--json", *flags(filled)).stdout
    )
    assert (found["messages"], found["deleted"]) == (3, True)
    assert on(filled, depths) == (0, 1)
    noted = in_process("status", *flags(filled))
    said = " ".join(noted.stdout.split())
    assert (
        "of 2 pending jobs 0 at most in this queue or in flight, 2 not: they wait in another queue"
        in said
    )


def test_a_campaign_is_paused_shown_as_paused_and_resumed(
    in_process: Imagefleet, filled: StorageSettings
):
    call = ("cancel", "spring", *flags(filled))
    said = in_process(*call, "--pause").stdout
    assert "campaign spring is paused: workers put its jobs off" in said
    shown = in_process("status", *flags(filled)).stdout
    assert "spring is paused: `imagefleet cancel spring --resume`" in " ".join(
        shown.split()
    )
    told = json.loads(in_process("status", "--json", *flags(filled)).stdout)
    assert {row["campaign"] for row in told["campaigns"] if row["paused"]} == {"spring"}
    told = json.loads(in_process(*call, "--resume", "--json").stdout)
    assert told == {"campaign": "spring", "paused": False, "changed": True}
    assert "(as before)" in in_process(*call, "--resume").stdout
    for wrong in (["--pause", "--resume"], ["--pause", "--dry-run"]):
        assert_refused(in_process(*call, *wrong), "one of the two, without --dry-run")
