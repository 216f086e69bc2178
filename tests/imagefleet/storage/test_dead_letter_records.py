"""Failed jobs are read from their records, which agree with the poison queue whatever is killed."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

import made_records
import polling
from browsing import visible
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.records.log import RecordLog
from imagefleet.storage import dead_letter, dead_letter_queue
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import JobQueue, LeasedMessage, Message
from imagefleet.storage.settings import StorageSettings
from made_records import fail


async def listed(storage: Storage) -> Counter[str]:
    found = dead_letter_queue.recorded(storage, Selection())
    return Counter([entry.id async for entry in found])


async def queued(queue: JobQueue) -> Counter[str]:
    return Counter(
        [str(read_job(each.body, each.id).id) async for each in visible(queue)]
    )


async def test_lists_at_the_same_time_count_every_failed_job(
    azurite_settings: StorageSettings,
):
    """On Azure the messages themselves are seen by one reader at a time."""
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        job = Job(prompt="a cat", campaign="spring")
        records = [
            dead_letter.FailedJob(
                outcome="failed",
                id=f"j{number}",
                campaign="spring",
                error="E",
                reason="r",
                attempts=1,
                worker="w",
                at="2026-11-22T12:00:00Z",
                source=f"m{number}",
                body=job.identified(f"j{number}").to_message(),
            )
            for number in range(600)
        ]
        await storage.poison.send(each.encode() for each in records[:9])
        await RecordLog(storage.blobs, "worker-1").add(records)

        before = dataclasses.replace(storage.operations)
        killed = asyncio.create_task(listed(storage))
        await polling.until(lambda: storage.operations != before)
        killed.cancel()
        lists = await asyncio.gather(*(listed(storage) for _ in range(3)))
        assert [each.total() for each in lists] == [600] * 3
        before = dataclasses.replace(storage.operations)
        assert (await listed(storage)).total() == 600
        after = storage.operations
        # As docs/failed-jobs.md says, of one shard; a listing is billed as a write.
        assert after.queue == before.queue
        assert after.blob_writes - before.blob_writes == 3
        assert after.blob_reads - before.blob_reads == 1


async def test_an_invalid_job_fails_under_the_id_and_campaign_that_it_gives(
    storage: Storage,
):
    """So that it is the same job once it is mended."""
    bodies = {
        '{"prompt":"a cat","id":"cat","campaign":"spring","steps":500}': (
            "cat",
            "spring",
        ),
        '{"prompt":5,"id":"../x","campaign":"a b"}': (None, "default"),
        '["id"]': (None, "default"),
    }
    for body, (job_id, campaign) in bodies.items():
        await storage.queue.send([body])
        (message,) = await storage.queue.receive(1, 60)
        failed = await made_records.dead_letter(
            storage, message, None, errors.JobError("no"), "w"
        )
        assert (failed.id, failed.campaign) == (job_id or message.id, campaign)
        await storage.queue.delete(message)


class Killed(BaseException):
    """Simulates the end of the process: no code may catch it."""


class Step(NamedTuple):
    """A call of a sweep, before or after which the process ends."""

    part: str
    name: str
    after: bool


@contextlib.contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch, storage: Storage, step: Step
) -> Iterator[None]:
    """The block ends at *step*, as if its process were killed."""
    parts = {"notes": RecordLog, "poison": storage.poison}
    target = parts.get(step.part, storage.queues["normal"])
    call = getattr(target, step.name)

    async def killed(*arguments: Any) -> None:
        if step.after:
            await call(*arguments)
        raise Killed

    with monkeypatch.context() as only:
        only.setattr(target, step.name, killed)
        with pytest.raises(Killed):
            yield


STEPS = [
    Step("queue", "send", after=False),
    Step("queue", "send", after=True),
    Step("notes", "add", after=False),
    Step("notes", "add", after=True),
    Step("poison", "delete", after=True),
]


@pytest.mark.parametrize("step", STEPS)
async def test_a_replay_killed_at_any_moment_sends_again_and_loses_none(
    local_settings: StorageSettings, monkeypatch, step: Step
):
    async with open_storage(local_settings) as storage:
        await storage.create()
        await fail(storage, "a", "b", "c")
        with killed_at(monkeypatch, storage, step):
            await dead_letter_queue.replay(storage, Selection())
        assert set(await queued(storage.queue)) | set(await listed(storage)) == {
            "a",
            "b",
            "c",
        }
        await dead_letter_queue.replay(storage, Selection())
        sent = await queued(storage.queue)
        assert set(sent) == {"a", "b", "c"}
        assert max(sent.values()) <= 2, "it errs by sending a job twice"
        assert await listed(storage) == Counter()
        assert (await storage.poison.depth()).messages == 0


@pytest.mark.parametrize("step", [each for each in STEPS if each.part != "queue"])
async def test_a_discard_killed_at_any_moment_is_finished_by_the_next(
    local_settings: StorageSettings, monkeypatch, step: Step
):
    async with open_storage(local_settings) as storage:
        await storage.create()
        await fail(storage, "a", "b", "c")
        await fail(storage, "kept", campaign="summer")
        with killed_at(monkeypatch, storage, step):
            await dead_letter_queue.discard(storage, Selection(campaign="spring"))
        await dead_letter_queue.discard(storage, Selection(campaign="spring"))
        assert await listed(storage) == {"kept": 1}
        assert (await storage.poison.depth()).messages == 1
        assert await queued(storage.queue) == Counter()


async def test_a_job_that_fails_again_during_its_replay_is_on_the_list(
    storage: Storage, monkeypatch
):
    await fail(storage, "a")
    queue = storage.queues["normal"]
    send = queue.send

    async def send_and_fail(bodies: Iterable[str]) -> list[LeasedMessage]:
        monkeypatch.setattr(queue, "send", send)
        await fail(storage, "a")  # before the replay is noted
        return [Message("1", body, 0, datetime.now(UTC)).leased("") for body in bodies]

    monkeypatch.setattr(queue, "send", send_and_fail)
    await dead_letter_queue.replay(storage, Selection())
    assert await listed(storage) == {"a": 1}


async def test_without_access_to_the_records_nothing_is_moved(
    storage: Storage, monkeypatch
):
    await fail(storage, "a")

    async def refuse(*_: object) -> bool:
        raise errors.SetupError("the token may not append to records")

    monkeypatch.setattr(storage.files, "append", refuse)
    for sweep in (dead_letter_queue.replay, dead_letter_queue.discard):
        with pytest.raises(errors.SetupError):
            await sweep(storage, Selection())
    assert (await queued(storage.queue), await listed(storage)) == (Counter(), {"a": 1})
    assert (await storage.poison.depth()).messages == 1


async def test_a_failed_job_whose_message_somebody_deleted_is_replayed(
    storage: Storage,
):
    await fail(storage, "a", "b")
    (message, *_) = await storage.poison.receive(1, 60)
    await storage.poison.delete(message)
    assert (await dead_letter_queue.replay(storage, Selection())).done == 2
    assert await listed(storage) == Counter()


async def test_a_job_that_failed_in_two_messages_is_discarded_at_once(storage: Storage):
    await fail(storage, "a")
    await fail(storage, "a")
    await dead_letter_queue.discard(storage, Selection())
    assert await listed(storage) == Counter()
    assert (await storage.poison.depth()).messages == 0


async def test_the_message_of_a_job_that_was_completed_after_all_is_deleted(
    storage: Storage,
):
    await fail(storage, "done", "failed")
    job = Job(prompt="a cat", id="done", seed=1, campaign="spring")
    facts = {"job": "done", "digest": job.stage_digest}
    await storage.blobs.create("spring/done.png", b"image", "image/png", facts)
    assert await listed(storage) == {"failed": 1}
    assert (await dead_letter_queue.replay(storage, Selection(id="none"))).done == 0
    assert (await storage.poison.depth()).messages == 1


async def test_a_message_that_another_reader_holds_stays_in_the_poison_queue(
    storage: Storage,
):
    await fail(storage, "a", "b")
    (held,) = await storage.poison.receive(1, 60)
    assert (await dead_letter_queue.discard(storage, Selection())).done == 2
    await storage.poison.release(held)
    assert (await storage.poison.depth()).messages == 1
    await dead_letter_queue.discard(storage, Selection())
    assert (await storage.poison.depth()).messages == 0
