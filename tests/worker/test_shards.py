"""Workers on queues of several shards."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from evaluation.stand_in import StandInEngine
from imagefleet import cancelled
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Selection
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

RunPipeline = Callable[..., Any]  # the fixture of conftest.py


@pytest.mark.usefixtures("cancel_at_once")
async def test_workers_empty_every_shard_and_what_fails_is_replayed_into_all(
    storage: Storage,
    storage_settings: StorageSettings,
    run_pipeline: RunPipeline,
    message: Callable[..., str],
) -> None:
    def bad(number: int) -> str:
        return message(id=f"bad{number}", prompt="a <lora:missing:1>")

    await storage.models.set_shards(3)
    await storage.queue.send(message(id=f"good{number}") for number in range(9))
    await storage.queue.send(bad(number) for number in range(3))
    jobs = (message(id=f"late{number}", campaign="spring") for number in range(3))
    await storage.queues["low"].send(jobs)
    await cancelled.cancel(storage, "spring")
    async with (
        open_storage(storage_settings) as one,
        open_storage(storage_settings) as another,
    ):
        for share, opened in enumerate((one, another)):
            await opened.check()
            opened.models.stand_at(share / 2)
        engines = (StandInEngine(), StandInEngine())
        both = await asyncio.gather(
            *(
                run_pipeline(each, opened=of)
                for each, of in zip(engines, (one, another), strict=True)
            )
        )
        outcomes = sum(
            (Counter(each.metrics.outcomes) for each in both), Counter[str]()
        )
    assert outcomes == {"completed": 9, "failed": 3, "cancelled": 3}
    assert len([name async for name in storage.blobs.names("default/")]) == 9
    sample = both[0].metrics.registry.get_sample_value
    assert sample("imagefleet_queue_shards", {"queue": storage.queue.name}) == 3

    swept = await dead_letter_queue.replay(storage, Selection())
    assert swept.done == 3
    depth = await storage.queues["normal"].depth()
    assert [each.messages for each in depth.by_queue.values()] == [1, 1, 1]
