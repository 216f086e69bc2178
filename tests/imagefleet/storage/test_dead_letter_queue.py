from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.storage import dead_letter, dead_letter_queue
from imagefleet.storage.dead_letter_queue import Selection
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import JobQueue, LeasedMessage, Storage
from imagefleet.storage.settings import StorageSettings

MISSING = errors.MissingFileError("there is no LoRA 'forest'")
UNUSABLE = errors.UnusableFileError("the LoRA 'oil' does not fit")


async def add(
    storage: Storage, *job_ids: str, error: errors.FleetError = MISSING, campaign: str = "spring"
) -> None:
    jobs = {each: Job(prompt="a cat", id=each, seed=1, campaign=campaign) for each in job_ids}
    await storage.queue.send([job.to_message() for job in jobs.values()])
    for _ in job_ids:
        [message] = await storage.queue.receive(1, 60)
        job = read_job(message.body, message.id)
        await dead_letter.add(storage, message, job, error, "worker-1")


async def ids(queue: JobQueue) -> Counter[str]:
    """The ids of the jobs that are visible in a queue, records' in the poison queue."""
    found: Counter[str] = Counter()
    async for message in queue.browse():
        record = dead_letter.FailedJob.read(message.body)
        found[record.id if record else str(read_job(message.body, message.id).id)] += 1
    return found


async def test_a_replayed_job_is_the_same_job_with_a_fresh_count(storage: Storage) -> None:
    await add(storage, "a")

    swept = await dead_letter_queue.replay(storage, Selection())

    assert (swept.done, swept.refused) == (1, [])
    [message] = await storage.queue.receive(32, 60)
    assert message.delivery_count == 1
    assert read_job(message.body, message.id) == Job(
        prompt="a cat", id="a", seed=1, campaign="spring"
    )
    assert (await storage.poison.depth()).messages == 0


@pytest.mark.parametrize(
    ("selection", "meant"),
    [
        (Selection(), {"a", "b", "c"}),
        (Selection(error="MissingFileError"), {"a", "b"}),
        (Selection(error="OIL"), {"c"}),
        (Selection(campaign="summer"), {"b"}),
        (Selection(id="a"), {"a"}),
        (Selection(error="Missing", campaign="spring"), {"a"}),
        (Selection(error="Missing", id="c"), set()),
    ],
)
async def test_only_what_is_meant_is_replayed_and_the_rest_is_visible_at_once(
    storage: Storage, selection: Selection, meant: set[str]
) -> None:
    await add(storage, "a")
    await add(storage, "b", campaign="summer")
    await add(storage, "c", error=UNUSABLE)

    browsed = {entry.id async for entry in dead_letter_queue.browse(storage, selection)}
    swept = await dead_letter_queue.replay(storage, selection)

    assert browsed == meant
    assert swept.done == len(meant)
    assert set(await ids(storage.queue)) == meant
    assert set(await ids(storage.poison)) == {"a", "b", "c"} - meant


async def test_discarded_jobs_are_gone_from_both_queues(storage: Storage) -> None:
    await add(storage, "a")
    await add(storage, "b", campaign="summer")

    swept = await dead_letter_queue.discard(storage, Selection(campaign="summer"))

    assert swept.done == 1
    assert set(await ids(storage.poison)) == {"a"}
    assert (await storage.queue.depth()).messages == 0


async def test_a_message_that_is_no_record_is_shown_and_kept(storage: Storage) -> None:
    await add(storage, "a")
    await storage.poison.send(["what is this?"])

    shown = [entry async for entry in dead_letter_queue.browse(storage, Selection())]
    assert [entry.record is None for entry in shown] == [False, True]
    replayed = await dead_letter_queue.replay(storage, Selection())
    discarded = await dead_letter_queue.discard(storage, Selection())

    assert (replayed.done, len(replayed.refused)) == (1, 1)
    assert (discarded.done, len(discarded.refused)) == (0, 1)
    [left] = [message async for message in storage.poison.browse()]
    assert left.body == "what is this?"


async def test_a_message_that_is_no_record_goes_when_it_is_named(storage: Storage) -> None:
    await storage.poison.send(["what is this?"])
    [left] = [message async for message in storage.poison.browse()]

    swept = await dead_letter_queue.discard(storage, Selection(id=left.id))

    assert swept.done == 1
    assert (await storage.poison.depth()).messages == 0


async def test_more_than_one_page_is_replayed_and_more_than_one_page_held(
    storage: Storage,
) -> None:
    await add(storage, *(f"a{number}" for number in range(40)))
    await add(storage, *(f"b{number}" for number in range(40)), campaign="summer")

    seen: list[int] = []
    swept = await dead_letter_queue.replay(storage, Selection(campaign="summer"), seen.append)

    assert swept.done == seen[-1] == 40
    assert (await storage.queue.depth()).messages == 40
    assert len(await ids(storage.poison)) == 40


async def test_a_worker_that_fails_jobs_as_fast_as_they_are_replayed_makes_no_endless_loop(
    storage: Storage,
) -> None:
    await add(storage, *(f"a{number}" for number in range(10)))
    send = storage.queue.send

    async def send_and_fail_again(bodies: Iterable[str]) -> None:
        await send(bodies)
        while messages := await storage.queue.receive(32, 60):
            for message in messages:
                job = read_job(message.body, message.id)
                await dead_letter.add(storage, message, job, MISSING, "worker-2")

    storage.queue.send = send_and_fail_again  # type: ignore[method-assign]
    swept = await asyncio.wait_for(dead_letter_queue.replay(storage, Selection()), 20)

    assert swept.done == 10
    assert len(await ids(storage.poison)) == 10


class Stopped(BaseException):
    """Stands for a kill: nothing in the code may catch it."""


async def test_a_kill_between_the_two_queues_repeats_and_never_loses(storage: Storage) -> None:
    await add(storage, "a", "b", "c")
    delete = storage.poison.delete

    async def killed(message: LeasedMessage) -> None:
        raise Stopped

    storage.poison.delete = killed  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        await dead_letter_queue.replay(storage, Selection())
    storage.poison.delete = delete  # type: ignore[method-assign]

    assert set(await ids(storage.queue)) == {"a", "b", "c"}
    swept = await dead_letter_queue.replay(storage, Selection())
    assert swept.done + len(await ids(storage.poison)) == 3
    assert await ids(storage.queue) <= Counter({"a": 2, "b": 2, "c": 2})


async def test_a_job_queue_that_takes_nothing_leaves_every_failed_job_visible(
    storage: Storage,
) -> None:
    await add(storage, "a", "b")

    async def refuse(bodies: Iterable[str]) -> None:
        raise errors.TransientError

    storage.queue.send = refuse  # type: ignore[method-assign]
    with pytest.raises(errors.TransientError):
        await dead_letter_queue.replay(storage, Selection())

    assert set(await ids(storage.poison)) == {"a", "b"}


async def test_a_lease_that_ends_during_the_sweep_is_no_error(storage: Storage) -> None:
    await add(storage, "a")
    receive = storage.poison.receive

    async def stale(max_messages: int, lease_seconds: float) -> list[LeasedMessage]:
        messages = await receive(max_messages, lease_seconds)
        for message in messages:
            await storage.poison.renew(message, lease_seconds)
        return messages

    storage.poison.receive = stale  # type: ignore[method-assign]
    swept = await dead_letter_queue.replay(storage, Selection())

    assert swept.done == 1
    assert set(await ids(storage.queue)) == {"a"}


async def test_a_record_that_cannot_be_replayed_stays_and_the_others_go(storage: Storage) -> None:
    await add(storage, "a", "b")
    [first, *_] = await storage.poison.receive(1, 60)
    record = dead_letter.FailedJob.read(first.body)
    assert record is not None
    damaged = record.model_copy(update={"body": None, "packed_body": "bm90IHpsaWI="})
    await storage.poison.send([damaged.encode()])
    await storage.poison.delete(first)

    swept = await dead_letter_queue.replay(storage, Selection())

    assert swept.done == 1
    assert [each.id for each in swept.refused] == [record.id]
    assert set(await ids(storage.poison)) == {record.id}


def test_sigkill_in_the_middle_of_a_replay_loses_no_job(tmp_path: Path) -> None:
    settings = StorageSettings(storage=f"local:{tmp_path}")
    job_ids = {f"job-{number}" for number in range(200)}

    async def prepare() -> None:
        async with open_storage(settings) as storage:
            await storage.create()
            await add(storage, *job_ids)

    async def count() -> tuple[Counter[str], int]:
        async with open_storage(settings) as storage:
            return await ids(storage.queue), (await storage.poison.depth()).messages

    asyncio.run(prepare())
    program = textwrap.dedent(f"""
        import asyncio, os, signal
        from imagefleet.storage import dead_letter_queue
        from imagefleet.storage.open import open_storage
        from imagefleet.storage.settings import StorageSettings

        async def main():
            settings = StorageSettings(storage="local:{tmp_path}")
            async with open_storage(settings) as home:
                delete = home.poison.delete
                deleted = 0

                async def counting(message):
                    nonlocal deleted
                    deleted += 1
                    if deleted == 100:
                        os.kill(os.getpid(), signal.SIGKILL)
                    await delete(message)

                home.poison.delete = counting
                await dead_letter_queue.replay(home, dead_letter_queue.Selection())

        asyncio.run(main())
    """)
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    queued, failed_left = asyncio.run(count())
    assert killed.returncode == -signal.SIGKILL
    assert 0 < len(queued) < 200
    assert len(queued) + failed_left >= 200


def test_selections_are_values() -> None:
    assert dataclasses.replace(Selection(id="a"), id=None) == Selection()
