"""What the clients refuse: pictures and jobs that are not those which a name stands for."""

import asyncio
from typing import Any

import pytest

import imagefleet
from imagefleet import Job, aio, errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings


async def test_a_picture_that_is_not_the_one_recorded_is_refused(
    fleet: aio.Fleet, work
):
    batch = await fleet.submit([Job(prompt=name, id=name) for name in ("a", "b")])
    await work()
    found = {result.id: result async for result in batch.results(20)}
    a = found["a"]
    b = found["b"]
    other = await b.data()
    await fleet.storage.blobs.delete("default/a.png")
    assert await fleet.storage.blobs.create("default/a.png", other, "image/png", {})

    with pytest.raises(
        errors.MisfitError,
        match=r"default/a\.png .* is not the picture that was recorded",
    ):
        await a.data()
    with pytest.raises(errors.MisfitError):
        await a.image()
    assert await b.data() == other


def test_the_sync_client_tells_the_same_job_a_changed_one_and_a_taken_name_apart(
    connect_options: dict[str, Any], storage_settings: StorageSettings, work
):
    async def send(body: str) -> None:
        async with open_storage(storage_settings) as storage:
            await storage.create()
            await storage.queue.send([body])

    # Another program's job, which no ledger knows.
    asyncio.run(send(Job(prompt="a boat", id="taken").to_message()))
    asyncio.run(work())
    with imagefleet.connect(**connect_options) as fleet:
        first = fleet.submit([Job(prompt="a house", id="a")])
        with pytest.raises(
            errors.NameTakenError, match="job default/a is not the one that was"
        ):
            fleet.submit([Job(prompt="a tree", id="b"), Job(prompt="a tree", id="a")])
        assert fleet.depth().queue.messages == 1, "nothing of that batch is sent"
        again = fleet.submit([Job(prompt="a house", id="a")])
        taken = fleet.submit([Job(prompt="a tree", id="taken")])
        asyncio.run(work())

        (house,) = first.results()
        assert list(again.results()) == [house]
        assert house.image().text["parameters"].startswith("a house\n")  # type: ignore[attr-defined]
        (refused,) = taken.results()
        assert refused.status == "failed"
        assert refused.reason is not None
        assert "taken" in refused.reason
        assert fleet.campaigns()["default"].sent == 2, "jobs, each once"
