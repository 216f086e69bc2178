from collections import Counter
from collections.abc import Iterable

import pytest

import made_records
from browsing import visible
from imagefleet import errors
from imagefleet.job import message as job_message
from imagefleet.job.message import Job, read_job
from imagefleet.records.log import RecordLog
from imagefleet.storage import bundle, dead_letter, dead_letter_queue
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import JobQueue, LeasedMessage
from made_records import MISSING, fail
from storages import local_only

UNUSABLE = errors.UnusableFileError("the LoRA 'oil' does not fit")


async def ids(queue: JobQueue) -> Counter[str]:
    """The ids of the jobs that are visible in a queue."""
    found: Counter[str] = Counter()
    async for message in visible(queue):
        record = dead_letter.FailedJob.parse(message.body)
        found[record.id if record else str(read_job(message.body, message.id).id)] += 1
    return found


async def test_a_replayed_job_is_unchanged_but_for_its_delivery_count(
    storage: Storage,
):
    await fail(storage, "a")

    swept = await dead_letter_queue.replay(storage, Selection())

    assert (swept.done, swept.refused) == (1, [])
    [message] = await storage.queue.receive(32, 60)
    assert message.delivery_count == 1
    assert read_job(message.body, message.id) == Job(
        prompt="a cat", id="a", seed=1, campaign="spring"
    )
    assert (await storage.poison.depth()).messages == 0


@local_only
@pytest.mark.parametrize(
    ("selection", "selected"),
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
async def test_only_selected_jobs_are_replayed_and_the_others_stay_visible(
    storage: Storage, selection: Selection, selected: set[str]
):
    await fail(storage, "a")
    await fail(storage, "b", campaign="summer")
    await fail(storage, "c", error=UNUSABLE)

    listed = {each.id async for each in dead_letter_queue.recorded(storage, selection)}
    swept = await dead_letter_queue.replay(storage, selection)

    assert listed == selected
    assert swept.done == len(selected)
    assert set(await ids(storage.queue)) == selected
    assert set(await ids(storage.poison)) == {"a", "b", "c"} - selected


async def test_discarded_jobs_are_in_neither_queue(storage: Storage):
    await fail(storage, "a")
    await fail(storage, "b", campaign="summer")

    swept = await dead_letter_queue.discard(storage, Selection(campaign="summer"))

    assert swept.done == 1
    assert set(await ids(storage.poison)) == {"a"}
    assert (await storage.queue.depth()).messages == 0


async def test_copies_of_a_message_after_a_lost_reply_are_deleted_with_it(
    storage: Storage,
):
    await fail(storage, "a", "b")
    [first, second] = [message async for message in visible(storage.poison)]
    await storage.poison.send([first.body, second.body, first.body])

    swept = await dead_letter_queue.replay(storage, Selection(id="a"))
    assert (swept.done, swept.refused) == (1, [])
    assert await ids(storage.queue) == {"a": 1}
    assert await ids(storage.poison) == {"b": 2}

    swept = await dead_letter_queue.discard(storage, Selection())
    assert swept.done == 1
    assert (await storage.poison.depth()).messages == 0


async def test_a_foreign_message_is_deleted_only_with_all_failed_jobs(storage: Storage):
    await fail(storage, "a", "b")
    await storage.poison.send(["what is this?"])

    assert (await dead_letter_queue.replay(storage, Selection(id="a"))).done == 1
    assert (await dead_letter_queue.discard(storage, Selection(id="b"))).done == 1
    [left] = [message async for message in visible(storage.poison)]
    assert left.body == "what is this?"

    assert (await dead_letter_queue.discard(storage, Selection())).done == 0
    assert (await storage.poison.depth()).messages == 0


async def test_a_sweep_handles_more_than_one_page(
    storage: Storage,
):
    await fail(storage, *(f"a{number}" for number in range(40)))
    await fail(storage, *(f"b{number}" for number in range(40)), campaign="summer")

    seen: list[int] = []
    swept = await dead_letter_queue.replay(
        storage, Selection(campaign="summer"), seen.append
    )

    assert swept.done == seen[-1] == 40
    assert (await storage.queue.depth()).messages == 40
    assert len(await ids(storage.poison)) == 40


async def test_many_failed_jobs_are_replayed_in_few_messages_and_each_once(
    storage: Storage, monkeypatch
):
    monkeypatch.setattr(bundle, "jobs_per_bundle", lambda count: count // 5)
    await fail(storage, *(f"a{number}" for number in range(40)))

    swept = await dead_letter_queue.replay(storage, Selection())

    bodies = [message.body for message in await storage.queue.receive(32, 60)]
    assert len(bodies) == 5
    jobs = [job for body in bodies for job in bundle.messages_of(body)]
    found = sorted(str(job_message.fields_if_any(job)["id"]) for job in jobs)
    assert found == sorted(f"a{number}" for number in range(40))
    assert (swept.done, (await storage.poison.depth()).messages) == (40, 0)


async def test_a_replay_ends_even_if_the_jobs_fail_again_meanwhile(
    storage: Storage,
):
    await fail(storage, *(f"a{number}" for number in range(10)))
    send = storage.queues["normal"].send

    async def send_and_fail_again(bodies: Iterable[str]) -> list[LeasedMessage]:
        sent = await send(bodies)
        while messages := await storage.queue.receive(32, 60):
            for message in messages:
                job = read_job(message.body, message.id)
                failed = await made_records.dead_letter(
                    storage, message, job, MISSING, "w"
                )
                await RecordLog(storage.blobs, "w").add([failed])
        return sent

    storage.queues["normal"].send = send_and_fail_again  # type: ignore[method-assign]
    swept = await dead_letter_queue.replay(storage, Selection())

    assert swept.done == 10
    assert len(await ids(storage.poison)) == 10


async def test_a_failed_send_to_the_job_queue_leaves_the_failed_jobs_visible(
    storage: Storage,
):
    await fail(storage, "a", "b")

    async def refuse(bodies: Iterable[str]) -> None:
        raise errors.TransientError

    storage.queues["normal"].send = refuse  # type: ignore[method-assign]
    with pytest.raises(errors.TransientError):
        await dead_letter_queue.replay(storage, Selection())

    assert set(await ids(storage.poison)) == {"a", "b"}


async def test_a_lease_that_expires_during_the_sweep_is_not_an_error(
    storage: Storage,
):
    await fail(storage, "a")
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
