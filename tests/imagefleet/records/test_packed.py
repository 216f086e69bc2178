"""A picture in a pack is a picture to whoever reads a campaign, whatever its records say."""

import dataclasses

import pytest

import made_records
import sent_jobs
from imagefleet import aio, errors
from imagefleet.records import catalog, outcomes, pictures, reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.dedupe import Rivals
from imagefleet.records.follower import Follower
from imagefleet.records.log import RecordLog
from imagefleet.records.outcomes import JobFacts
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from stored_images import member, pack_name, store_alone, store_pack


async def images(storage: Storage, damaged: Damaged | None = None) -> list[Record]:
    found = [
        record
        async for records in reader.image_parts(storage, "spring", damaged)
        for record in records
    ]
    return sorted(found, key=lambda record: str(record.blob))


async def delivered(storage: Storage, record: Record) -> bytes | str:
    found = await pictures.find(storage, [record])
    return found if isinstance(found, str) else found.data


async def test_pictures_of_a_pack_are_listed_counted_and_delivered(storage: Storage):
    made = [member("a"), member("b")]
    records = await store_pack(storage, made)

    assert await images(storage) == records
    assert (await reader.counts(storage, "spring")).images == 2
    for record, (_, data) in zip(records, made, strict=True):
        assert await delivered(storage, record) == data


async def test_the_client_gives_pictures_of_a_pack(storage: Storage):
    made = [member("a"), member("b")]
    await store_pack(storage, made)

    fleet = aio.Fleet(storage)
    found = {each.id: each async for each in fleet.results("spring")}
    assert await found["b"].data() == made[1].data
    assert (await found["a"].image()).size == (32, 32)
    status = await outcomes.look_up(storage, JobFacts("a", "spring"))
    assert (status.status, status.blobs) == ("completed", ("spring/a.png",))


async def test_a_follower_hands_on_what_a_pack_holds_and_reads_each_pack_once(
    storage: Storage,
):
    records = await store_pack(storage, [member(each) for each in "abcdefgh"])
    before = dataclasses.replace(storage.operations)

    found = await Follower(storage, "spring").poll()

    assert found == records
    reads = storage.operations.blob_reads - before.blob_reads
    assert reads <= 5, "the shard, the pack's start and its time, the ledger"


async def test_a_pack_whose_worker_died_before_it_wrote_records_is_found(
    storage: Storage,
):
    known = await store_pack(storage, [member("a")])
    lost = await store_pack(
        storage, [member("b"), member("c")], name=pack_name(1), recorded=False
    )

    assert await images(storage) == [*known, *lost]
    assert (await reader.counts(storage, "spring")).images == 3
    drawn = [each async for each in reader.drawings(storage, "spring", Damaged())]
    assert [record for records in drawn for record in records] == [*known, *lost]


async def test_records_that_another_worker_wrote_again_count_once(storage: Storage):
    records = await store_pack(storage, [member("a"), member("b")])
    await RecordLog(storage.blobs, "w2").add(records, again=True)
    await store_pack(storage, [member("c")], name=pack_name(1), again=True)

    assert [each.id for each in await images(storage)] == ["a", "b", "c"]
    assert (await reader.counts(storage, "spring")).images == 3


@pytest.mark.parametrize("first", ["single", "pack", "another pack"])
async def test_of_a_single_job_and_a_member_the_first_stored_counts_and_the_other_is_told(
    storage: Storage, first: str
):
    """Names of packs are in the order in which they are not stored."""
    ours = member("a")
    other = member("a", shade=1)

    async def store(which: str) -> Record:
        if which == "single":
            return await store_alone(storage, other)
        number = {"pack": 5, "another pack": 9}[which]
        held = [ours if which == "pack" else other]
        (record,) = await store_pack(storage, held, name=pack_name(number))
        return record

    counts = await store(first)
    await made_records.later(storage)
    await store("single" if first == "pack" else "pack")

    damaged = Damaged()
    found = await images(storage, damaged)

    assert found == [counts]
    assert damaged.count == 1
    assert "another image than the one that is stored" in str(damaged)
    drawn = reader.drawings(storage, "spring", Damaged())
    records = [record async for some in drawn for record in some]
    picture = await pictures.find(storage, records[::-1])
    assert not isinstance(picture, str)
    assert picture.record == counts


async def test_packs_of_one_moment_are_decided_by_their_names(
    azurite_settings: StorageSettings,
):
    """The times of Azure are whole seconds."""
    async with open_storage(azurite_settings) as storage:
        for number in range(20):
            names = [pack_name(2 * number + more) for more in (1, 0)]
            for shade, name in enumerate(names):
                of_job = member(f"a{number}", shade=shade)
                await store_pack(storage, [of_job], name=name)
            second, first = [await storage.packs.record(name) for name in names]
            assert first is not None
            assert second is not None
            if first.created_at == second.created_at:
                found = {record.id: record.pack for record in await images(storage)}
                assert found[f"a{number}"] == names[1]
                return
    pytest.fail("no two packs were stored in one second")


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 0},
        {"sha256": "0" * 64},
        {"size_bytes": 3},
        {"pack": pack_name(7)},
        {"digest": "f" * 64},
    ],
    ids=lambda lie: next(iter(lie)),
)
async def test_a_forged_place_never_counts_beside_the_true_one(
    storage: Storage, lie: dict[str, str]
):
    records = await store_pack(storage, [member("a"), member("b")])
    thief = RecordLog(storage.blobs, "a-thief")  # whose shard is read first
    await thief.add([records[0].model_copy(update=lie)])
    damaged = Damaged()

    found = await images(storage, damaged)

    assert found == records
    assert damaged.count == 1


@pytest.mark.parametrize("lie", ["offset", "sha256", "pack"])
async def test_a_forged_place_alone_delivers_no_picture(storage: Storage, lie: str):
    (record, _) = await store_pack(storage, [member("a"), member("b")])
    lies = {"offset": 0, "sha256": "0" * 64, "pack": pack_name(7)}
    forged = record.model_copy(update={lie: lies[lie]})

    expected = "missing" if lie == "pack" else "misfit"
    assert await delivered(storage, forged) == expected
    assert await Follower(storage, "spring").poll()
    await RecordLog(storage.blobs, "thief").add(
        [forged.model_copy(update={"id": "c", "blob": "spring/c.png"})]
    )
    ids = {each.id for each in await Follower(storage, "spring").poll()}
    assert ids == {"a", "b"}


async def test_a_record_of_a_pack_of_another_campaign_is_refused(storage: Storage):
    (record,) = await store_pack(storage, [member("a")])
    name = pack_name(campaign="autumn")
    forged = record.model_copy(update={"id": "c", "blob": "spring/c.png", "pack": name})
    await RecordLog(storage.blobs, "thief").add([forged])
    damaged = Damaged()

    assert await images(storage, damaged) == [record]
    assert damaged.count == 1


@pytest.mark.parametrize("what", [b"", b"no tar", b"x" * 20_000])
async def test_what_is_no_pack_is_empty_to_every_reader(storage: Storage, what: bytes):
    known = await store_pack(storage, [member("a")])
    await storage.packs.create(pack_name(3), what, "application/x-tar", {})

    assert await images(storage) == known
    assert (await reader.counts(storage, "spring")).images == 1


async def test_nobody_says_of_a_job_in_a_pack_that_it_failed(storage: Storage):
    (record,) = await store_pack(storage, [member("a")])
    await sent_jobs.note(storage, "spring", 1, ids=["other"])
    lie = made_records.ended("a", digest=record.digest)
    await RecordLog(storage.blobs, "thief").add([lie])

    ended = [each async for each in reader.ended(storage, "spring")]
    assert ended == []
    assert await images(storage) == [record]
    found = [each async for each in outcomes.of_campaign(storage, "spring")]
    assert [each.status for each in found] == ["completed"]


async def test_a_picture_that_only_a_record_puts_into_a_pack_is_no_picture_of_a_failed_job(
    storage: Storage,
):
    (record,) = await store_pack(
        storage, [member("a")], [made_records.ended("bad", digest="0" * 64)]
    )
    forged = {"id": "bad", "blob": "spring/bad.png", "digest": "0" * 64}
    await RecordLog(storage.blobs, "thief").add([record.model_copy(update=forged)])

    assert await images(storage) == [record]
    ended = [each async for each in reader.ended(storage, "spring")]
    assert [each.id for each in ended] == ["bad"]


async def test_a_replaced_member_is_left_out_also_of_a_pack_without_records(
    storage: Storage,
):
    records = await store_pack(storage, [member("a"), member("b")], recorded=False)
    await store_pack(storage, [member("c")], name=pack_name(1))
    note = records[0].model_copy(
        update={"outcome": "replaced", "source": "redo", "pack": None, "offset": None}
    )
    await RecordLog(storage.files, "redo").add([note])

    assert [each.id for each in await images(storage)] == ["b", "c"]


async def test_campaigns_without_packs_ask_for_none(storage: Storage):
    await store_pack(
        storage, [member("a", "autumn")], name=pack_name(campaign="autumn")
    )
    await store_alone(storage, member("a"))

    (shard,) = await catalog.shards_of(storage, "spring")
    assert not shard.has_packs
    with pytest.raises(errors.JobError, match="no image"):
        await aio.Result("b", "spring", fleet=aio.Fleet(storage)).data()


async def test_an_image_that_only_seems_to_have_a_rival_stays(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
):
    """Names are compared by a filter that takes some for others."""
    records = await store_pack(storage, [member("a"), member("b")])
    monkeypatch.setattr(Rivals, "deny", lambda *_: True)
    damaged = Damaged()

    assert await images(storage, damaged) == records
    assert damaged.count == 0


async def test_a_campaign_of_packs_alone_is_one(storage: Storage):
    records = await store_pack(storage, [member("a")], recorded=False)

    assert [name async for name in reader.campaigns(storage)] == ["spring"]
    assert await images(storage) == records


@pytest.mark.parametrize("lacking", ["offset", "size_bytes", "sha256"])
async def test_a_record_of_an_image_in_a_pack_says_where_and_what_it_is(
    storage: Storage, lacking: str
):
    (record,) = await store_pack(storage, [member("a")])
    vague = {"id": "b", "blob": "spring/b.png", lacking: None}
    await RecordLog(storage.blobs, "thief").add([record.model_copy(update=vague)])
    damaged = Damaged()

    assert await images(storage, damaged) == [record]
    assert damaged.count == 1
