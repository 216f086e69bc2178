"""Images on their way to a storage that is far away."""

import asyncio
from typing import Any

from imagefleet.storage.open import Storage
from messages import message, records

#: On their way at once, where an engine draws 60 images/s and each takes 0.3 s.
IMAGES = 18


async def test_a_distant_storage_does_not_hold_up_the_fastest_engine(
    storage: Storage,
    run_pipeline,
    monkeypatch,
):
    """None is stored before as many are on their way."""
    create = storage.blobs.create
    on_their_way = asyncio.Barrier(IMAGES)

    async def wait_and_create(name: str, *rest: Any, **more: Any) -> bool:
        if name.endswith(".png"):
            await on_their_way.wait()
        return await create(name, *rest, **more)

    monkeypatch.setattr(storage.blobs, "create", wait_and_create)
    pipeline = await run_pipeline(
        sent=(message(id=f"j{number}") for number in range(2 * IMAGES))
    )
    assert pipeline.metrics.outcomes == {"completed": 2 * IMAGES}


async def test_the_seconds_of_a_record_go_to_the_stored_image(
    storage: Storage, run_pipeline, monkeypatch
):
    create = storage.blobs.create

    async def slow(name: str, *rest: Any, **more: Any) -> bool:
        await asyncio.sleep(0.3)
        return await create(name, *rest, **more)

    monkeypatch.setattr(storage.blobs, "create", slow)
    await run_pipeline(sent=[message(id="j")])
    (record,) = await records(storage)
    assert (record.seconds or 0) >= 0.3
