"""The ledger of what was sent: many writers, lost replies, damage, and its size."""

import asyncio
import random
from typing import Any

import pytest

import sent_jobs
from imagefleet import errors
from imagefleet.job.message import Job
from imagefleet.records import ledger
from imagefleet.records.catalog import Damaged
from imagefleet.records.ledger import Digests, Ledger, entry_of, job_of
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings


async def noted(storage: Storage, *entries: bytes) -> Ledger:
    of_campaign = Ledger(storage, "spring")
    of_campaign.pending += b"".join(entries)
    await of_campaign.note()
    return of_campaign


async def test_many_writers_at_the_same_time_lose_no_job_and_count_none_twice(
    storage: Storage,
):
    await asyncio.gather(
        *(sent_jobs.note(storage, "spring", 50, 25 * turn) for turn in range(8))
    )
    await sent_jobs.note(storage, "autumn", 3)
    assert len(await ledger.Ledger(storage, "spring").read()) == 225
    assert set(await ledger.listed(storage)) == {"spring", "autumn"}
    # Those that did not read the others' jobs may count some of theirs.
    assert 225 <= (await ledger.Ledger(storage, "spring").count() or 0) <= 400


async def test_a_writer_that_has_read_the_ledger_counts_jobs_of_others_once(
    storage: Storage,
):
    ledgers = [Ledger(storage, "spring") for _ in range(6)]
    for number, each in enumerate(ledgers):
        await each.read()
        for job in range(10 * number, 10 * number + 20):
            each.pending += entry_of(f"{job}", "0" * 64)
    await asyncio.gather(*(each.note() for each in ledgers))
    assert await ledger.Ledger(storage, "spring").count() == 70


async def test_a_full_blob_is_followed_by_another(storage: Storage, monkeypatch):
    monkeypatch.setattr(ledger, "_MAX_FRAMES", 3)
    for number in range(8):
        await noted(storage, entry_of(f"{number}", "0" * 64))
    names = [name async for name in storage.files.names("-sent/")]
    assert [name.rpartition("spring/")[2] for name in names] == ["0000", "0001", "0002"]
    assert await ledger.Ledger(storage, "spring").count() == 8
    assert len(await ledger.Ledger(storage, "spring").read()) == 8


async def test_an_append_whose_reply_is_lost_is_not_made_twice(
    storage: Storage, monkeypatch
):
    append = storage.files.append

    replies = iter([False])

    async def loses_one(*arguments: Any) -> bool:
        is_appended = await append(*arguments)
        if next(replies, True):
            return is_appended
        lost = errors.TransientError("no reply")
        lost.outcome_is_unknown = True
        raise lost

    monkeypatch.setattr(storage.files, "append", loses_one)
    await noted(storage, entry_of("a", "0" * 64))
    part = await storage.files.read_part(
        f"{ledger.folder_of(storage)}spring/0000", 0, 1_000
    )
    assert part is not None
    assert part.total_bytes == 28 + 16


@pytest.mark.parametrize("arrives", ["at once", "behind the next look"])
async def test_an_append_that_was_cancelled_is_asked_for_and_not_made_twice(
    storage: Storage, monkeypatch, arrives: str
):
    """As at a load's end, which cancels whoever notes beside it, and notes the rest itself."""
    append = storage.files.append
    read_part = storage.files.read_part
    began = asyncio.Event()
    on_its_way = list[Any]()

    async def never_answers(*arguments: Any) -> bool:
        monkeypatch.setattr(storage.files, "append", append)
        on_its_way.append(arguments)
        if arrives == "at once":
            await append(*on_its_way.pop())
        began.set()
        await asyncio.Event().wait()
        return False

    async def and_then_it_arrives(*arguments: Any) -> Any:
        found = await read_part(*arguments)
        if on_its_way:
            await append(*on_its_way.pop())
        return found

    monkeypatch.setattr(storage.files, "append", never_answers)
    monkeypatch.setattr(storage.files, "read_part", and_then_it_arrives)
    ledger_ = Ledger(storage, "spring")
    assert await ledger_.is_new()
    ledger_.pending += entry_of("a", "0" * 64)
    noting = asyncio.create_task(ledger_.note())
    await began.wait()
    noting.cancel()
    await asyncio.gather(noting, return_exceptions=True)
    ledger_.pending += entry_of("b", "1" * 64)
    await ledger_.note()
    assert await Ledger(storage, "spring").count() == 2
    assert len(await Ledger(storage, "spring").read()) == 2
    assert ledger_.pending == b""


async def test_a_damaged_part_is_said_and_hides_nothing_else(storage: Storage):
    await noted(storage, entry_of("a", "0" * 64))
    await storage.files.append(
        f"{ledger.folder_of(storage)}spring/0000", b"IF-SENT1 broken off", 44
    )
    await noted(storage, entry_of("b", "1" * 64))
    damaged = Damaged()
    found = await ledger.Ledger(storage, "spring").read(damaged)
    assert len(found) == 2
    assert "/spring/0000: 19 bytes of it are damaged" in str(damaged)
    assert await ledger.Ledger(storage, "spring").count() == 2


async def test_an_id_has_the_digest_that_was_sent_last(storage: Storage):
    first = await noted(storage, entry_of("a", "0" * 64))
    await noted(storage, entry_of("a", "1" * 64))
    found = await first.read()
    assert found.get(ledger.id_hash("a")) == b"\x11" * 8
    assert len(found) == 1


def test_a_message_tells_its_job_whatever_it_holds_besides():
    jobs = [
        Job(prompt='say "id":"x"', id="a", campaign="spring"),
        Job(prompt="a", id="b", metadata={"id": "c", "digest": "d", "campaign": "e"}),
        Job(prompt="a", id="c", then=({"steps": 5, "denoising_strength": 0.5},)),
    ]
    for job in jobs:
        found = job_of(job.to_message())
        assert found.entry == entry_of(str(job.id), job.digest)
        assert (found.campaign, found.id) == (job.campaign or "default", job.id)
    assert job_of(Job(prompt="a", id="a", verify=True).to_message()).entry == b""
    assert (
        job_of('{"prompt": "a", "id": "a"}').entry
        == job_of('{"id":"a","prompt":"a"}').entry
    )


def test_digests_are_found_and_replaced_among_many():
    rng = random.Random(1)
    digests = Digests()
    expected = dict[bytes, bytes]()
    for _ in range(20_000):
        key = rng.randbytes(1) * 2 + rng.randbytes(6)
        value = rng.randbytes(8)
        digests.put(key + value)
        expected[key] = value
    for key in rng.sample(sorted(expected), 1_000):
        expected[key] = rng.randbytes(8)
        digests.put(key + expected[key])
    assert {entry[:8]: entry[8:] for entry in digests} == expected
    assert all(digests.get(key) == value for key, value in expected.items())
    assert digests.get(b"none" * 2) is None


async def test_a_storage_without_files_has_no_counts(
    azurite_settings: StorageSettings,
):
    names = azurite_settings.model_copy(update={"files_container": "no-such-files"})
    async with open_storage(names) as storage:
        assert await ledger.Ledger(storage, "spring").count() is None
        assert await ledger.listed(storage) == {}


async def test_fleets_that_share_their_files_have_ledgers_of_their_own(
    storage: Storage, storage_settings: StorageSettings
):
    others = f"{storage_settings.container}-others"
    names = storage_settings.model_copy(update={"container": others})
    await sent_jobs.note(storage, "spring", 3)
    async with open_storage(names) as other:
        assert await ledger.Ledger(other, "spring").count() is None
        assert await ledger.listed(other) == {}
