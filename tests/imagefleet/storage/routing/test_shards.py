"""A queue of several shards, on both storages: nothing is lost, whatever their number becomes."""

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from pydantic import SecretStr

from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import JobQueue, LeasedMessage, Shards
from imagefleet.storage.routing import route
from imagefleet.storage.settings import (
    MAX_CHARACTERS,
    MAX_SHARDS,
    PRIORITIES,
    StorageSettings,
    job_queue,
    priority_of,
)

LEASE_SECONDS = 30
SHARDS = 4


async def take_all(queue: JobQueue) -> list[LeasedMessage]:
    taken = []
    while page := await queue.receive(32, LEASE_SECONDS):
        taken += page
    return taken


async def counts(queue: JobQueue) -> list[int]:
    return [each.messages for each in (await queue.depth()).by_queue.values()]


async def test_jobs_are_spread_over_the_shards_and_settled_where_they_are(
    storage: Storage,
) -> None:
    await storage.models.set_shards(SHARDS)
    queue = storage.queues["normal"]
    jobs = [f"job {number}" for number in range(18)]
    await queue.send(jobs)
    depth = await queue.depth()
    assert list(depth.by_queue) == [
        queue.name,
        *(f"{queue.name}-{n}" for n in (1, 2, 3)),
    ]
    assert sorted(await counts(queue)) == [4, 4, 5, 5]

    taken = await take_all(storage.queue)
    assert sorted(each.body for each in taken) == sorted(jobs)
    assert {each.queue for each in taken} == {queue.name}, (
        "its shard is nobody else's business"
    )
    assert {each.shard for each in taken} == {0, 1, 2, 3}
    for message in taken[:-1]:
        renewed = await storage.queue.renew(message, LEASE_SECONDS, "rewritten")
        with pytest.raises(errors.LeaseLost):
            await storage.queue.delete(message)
        await storage.queue.delete(renewed)
    await storage.queue.release(taken[-1])
    (again,) = await take_all(storage.queue)
    assert (again.id, again.delivery_count) == (taken[-1].id, 2)
    assert (await storage.queue.depth()).messages == 1


async def test_one_job_at_a_time_goes_round(storage: Storage) -> None:
    await storage.models.set_shards(SHARDS)
    for number in range(SHARDS):
        await storage.queue.send([f"job {number}"])
    assert await counts(storage.queues["normal"]) == [1] * SHARDS


async def test_all_shards_are_browsed_searched_and_cleared(storage: Storage) -> None:
    await storage.models.set_shards(SHARDS)
    jobs = [json.dumps({"id": f"job-{number}"}) for number in range(8)]
    await storage.queue.send(jobs)
    assert sorted([each.body async for each in storage.queue.browse()]) == jobs
    (found,) = [each async for each in storage.queue.find("job-5")]
    assert found[0].queue == storage.queue.name
    await storage.queue.clear()
    assert (await storage.queue.depth()).messages == 0


@pytest.mark.parametrize("shards", [2, 6])
async def test_whoever_looks_learns_the_number_and_none_is_lost_when_it_changes(
    storage: Storage, storage_settings: StorageSettings, shards: int
) -> None:
    """Raised and lowered with jobs inside, beside a worker that is at work all the time."""
    async with open_storage(storage_settings) as worker:
        await worker.check()
        queue = worker.models.served([])
        await storage.queue.send(["of one shard"])
        await storage.models.set_shards(SHARDS)
        await storage.queue.send([f"of four {number}" for number in range(8)])

        await storage.models.set_shards(shards)
        before = await counts(storage.queues["normal"])
        await storage.queue.send([f"then {number}" for number in range(12)])
        after = await counts(storage.queues["normal"])
        sent = [count - earlier for count, earlier in zip(after, before, strict=True)]
        assert sent == [12 // shards] * shards + [0] * (len(sent) - shards)

        await queue.depth()  # as a worker does each minute
        taken = await take_all(queue)
        assert len({each.body for each in taken}) == len(taken) == 1 + 8 + 12
        for message in taken:
            await queue.delete(message)
    assert (await storage.queue.depth()).messages == 0


async def test_a_sender_that_runs_all_day_uses_shards_that_were_made_meanwhile(
    storage: Storage, storage_settings: StorageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_storage(storage_settings) as sender:
        await sender.queue.send(["of one shard"])
        await storage.models.set_shards(SHARDS)
        await sender.queue.send(["not a minute later"])
        assert await counts(storage.queues["normal"]) == [2, 0, 0, 0]
        monkeypatch.setattr(route, "SENDERS_LOOK_SECONDS", 0.0)
        await sender.queue.send([f"of four {number}" for number in range(8)])
    assert await counts(storage.queues["normal"]) == [4, 2, 2, 2]


async def test_two_who_set_the_number_at_the_same_time_hide_no_shard_with_jobs(
    storage: Storage, storage_settings: StorageSettings
) -> None:
    """The one of fewer has read the number before the other one's is written."""
    await storage.models.set_shards(SHARDS)
    await storage.queue.send(["a job"] * SHARDS)
    queue = storage.queues["normal"]
    await queue.main.first.record_shards(Shards(2, 2))
    assert await queue.main.first.read_shards() == Shards(2, SHARDS)
    async with open_storage(storage_settings) as worker:
        assert len(await take_all(worker.models.served([]))) == SHARDS


async def test_every_priority_and_model_has_shards(
    storage: Storage, storage_settings: StorageSettings
) -> None:
    early, late = (
        json.dumps({"prompt": "a", "model": name}) for name in ("early", "late")
    )
    await storage.models.send([early])
    await storage.models.set_shards(2)
    for priority in PRIORITIES:
        await storage.models.send([early, late, '{"prompt": "a"}'] * 2, priority)
    depth = await storage.queue.depth()
    assert {each.model for each in depth.by_queue.values()} == {None, "early", "late"}
    assert len(depth.by_queue) == 9
    for each in depth.by_queue.values():
        assert len(each.by_queue) == 2
        assert all(shard.messages for shard in each.by_queue.values())

    async with open_storage(storage_settings) as worker:
        await worker.check()
        taken = await take_all(worker.models.served(["early", "late"]))
        assert len(taken) == 1 + 3 * 6
        seen = Counter(priority_of(each.queue) for each in taken)
        assert seen == {"high": 6, "normal": 7, "low": 6}, (
            "a shard's name hides no priority"
        )
        for message in taken:
            await worker.models.served(["early", "late"]).delete(message)
    assert (await storage.queue.depth()).messages == 0


async def test_a_queue_of_one_shard_has_its_old_name_and_costs_no_request_more(
    storage: Storage, storage_settings: StorageSettings
) -> None:
    async with open_storage(storage_settings) as worker:
        await worker.queues["normal"].check()
        before = dataclasses.replace(worker.operations)
        await worker.queues["normal"].send(["a job"])
        (message,) = await worker.queues["normal"].receive(32, LEASE_SECONDS)
        await worker.queues["normal"].delete(message)
        await worker.queues["normal"].receive(32, LEASE_SECONDS)
        depth = await worker.queues["normal"].depth()
        assert worker.operations.queue - before.queue == 5
    assert message.queue == storage_settings.queue
    assert depth.by_queue == {}
    assert await counts(storage.queue) == [0, 0, 0]


async def test_what_knows_the_storage_already_asks_nothing_more_to_learn_the_number(
    azurite_settings: StorageSettings,
) -> None:
    async with open_storage(azurite_settings) as first:
        await first.create()
    async with open_storage(azurite_settings) as sender:
        await sender.create()
        before = sender.operations.queue
        await sender.queue.send(["a job"])
        assert sender.operations.queue - before == 1


async def test_jobs_sent_at_the_same_time_ask_once_how_many_shards_there_are(
    azurite_settings: StorageSettings,
) -> None:
    async with open_storage(azurite_settings) as first:
        await first.create()
    async with open_storage(azurite_settings) as sender:
        queue, before = sender.queues["normal"], sender.operations.queue
        await asyncio.gather(*(queue.send([f"job {number}"]) for number in range(20)))
        assert sender.operations.queue - before == 1 + 20


async def test_jobs_for_a_shard_that_somebody_deleted_go_to_the_first(
    storage: Storage, storage_settings: StorageSettings
) -> None:
    """As in a copy of the storage, or after a crash of the one who made the shards."""
    await storage.queues["normal"].main.first.record_shards(Shards(SHARDS, SHARDS))
    async with open_storage(storage_settings) as sender:
        await sender.queue.send([f"job {number}" for number in range(8)])
        assert len(await take_all(sender.queue)) == 8
        assert (await sender.queues["normal"].depth()).messages == 8
        await sender.models.set_shards(SHARDS + 1)  # makes those as well
        await sender.queue.send(["a"] * 10)
        assert (await sender.queue.depth()).messages == 18
        assert await counts(sender.queues["normal"]) == [10, 2, 2, 2, 2]


async def test_an_earlier_versions_file_gets_shards(tmp_path: Path) -> None:
    settings = StorageSettings(storage=f"local:{tmp_path}")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send(["old"])
        await storage.check()
        await storage.models.set_shards(2)
        await storage.queue.send(["new", "newer"])
        assert len(await take_all(storage.queue)) == 3


def test_the_names_of_shards_fit_into_azures_limit_and_differ() -> None:
    names = {
        job_queue("j" * 40, model, priority, shard)
        for model in ("a long name of a model", "a long name of another", None)
        for priority in PRIORITIES
        for shard in range(MAX_SHARDS)
    }
    assert len(names) == 3 * 3 * MAX_SHARDS
    assert max(map(len, names)) <= MAX_CHARACTERS
    assert job_queue("jobs", None, "high", 3) == "jobs-high-3"
    with pytest.raises(errors.SetupError, match="too long for shards"):
        job_queue("j" * 56, None, "normal", 1)


# Tokens


async def test_tokens_that_may_not_read_the_number_send_to_the_shards_they_have(
    azurite_settings: StorageSettings,
) -> None:
    from fleet.keys import mint
    from imagefleet.storage.azure.roles import ROLES

    async with open_storage(azurite_settings) as owner:
        await owner.create()
        await owner.models.set_shards(SHARDS)
        minter = mint.Minter(azurite_settings)
        for shards in (1, 2):
            minted = minter.mint(ROLES["load"], mint.timedelta(hours=1), shards=shards)
            given = {"storage": minted.storage, "sas": SecretStr(minted.sas)}
            async with open_storage(
                azurite_settings.model_copy(update=given)
            ) as sender:
                await sender.queue.send(["a job"] * 4)
        assert await counts(owner.queues["normal"]) == [6, 2, 0, 0]


async def test_a_worker_takes_the_shards_that_it_has_tokens_for_and_says_what_it_lacks(
    azurite_settings: StorageSettings, caplog: pytest.LogCaptureFixture
) -> None:
    from fleet.keys import mint
    from imagefleet.storage.azure.roles import ROLES

    async with open_storage(azurite_settings) as owner:
        await owner.create()
        await owner.models.set_shards(SHARDS)
        await owner.queue.send(["a job"] * 8)
        minter = mint.Minter(azurite_settings)
        for shards, left in ((3, 2), (SHARDS, 0)):
            minted = minter.mint(
                ROLES["worker"], mint.timedelta(hours=1), shards=shards
            )
            given = {"storage": minted.storage, "sas": SecretStr(minted.sas)}
            caplog.clear()
            caplog.set_level(logging.INFO, logger="imagefleet.storage")
            async with open_storage(
                azurite_settings.model_copy(update=given)
            ) as worker:
                await worker.check()
                queue = worker.models.served([])
                for message in await take_all(queue):
                    await queue.delete(message)
            missing = [
                each for each in caplog.records if "no jobs are taken" in each.message
            ]
            assert len(missing) == (3 if left else 0), "the last shard of each priority"
            assert (await owner.queue.depth()).messages == left
