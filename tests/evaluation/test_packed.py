"""Images in packs are scored and compared as any others."""

from evaluation.gate.images import CampaignImages
from evaluation.score import plan, run
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from stored_images import member, store_alone, store_pack


async def test_the_gate_sees_images_in_packs_beside_single_ones(storage: Storage):
    held = [member("a"), member("b")]
    await store_pack(storage, held)
    alone = member("c")
    await store_alone(storage, alone)
    side = CampaignImages(storage, "spring")

    assert sorted(await side.names()) == ["a.png", "b.png", "c.png"]
    for record, data in (*held, alone):
        assert await side.read(f"{record.id}.png") == data


async def test_the_score_reads_images_in_packs(storage: Storage, tmp_path):
    held = [member("a"), member("b")]
    await store_pack(storage, held)
    found = [each async for each in reader.images(storage, "spring")]
    planned = await plan.make(storage, "spring", tmp_path, lambda _: None)
    (chunk,) = planned.chunks[plan.ALL]

    rows = chunk.rows()

    assert len(rows) == len(found) == 2
    read = await run._read(chunk, rows, storage)
    assert read == [each.data for each in held]
    assert all(row.is_of(data) for row, data in zip(rows, read, strict=True) if data)
