"""New records as they come."""

from collections.abc import Awaitable, Callable
from typing import Any

from imagefleet.records import reader
from imagefleet.records.follower import Follower
from imagefleet.storage.open import Storage

Add = Callable[..., Awaitable[Any]]


async def test_a_follower_that_begins_at_the_end_reads_only_what_comes(
    storage: Storage, store_images: Add
):
    await store_images(storage, "0001")
    new = Follower(storage, "spring", await reader.end(storage, "spring"))
    assert await new.poll() == []

    await store_images(storage, "0002")
    assert [each.id for each in await new.poll()] == ["0002"]
