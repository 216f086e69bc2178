"""Waiting: what it costs the storage, and what becomes of jobs whose clients are gone."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from gateway import desk
from imagefleet import cancelled
from imagefleet.records import outcomes
from imagefleet.records.batch import Watch
from polling import until

Serve = Callable[..., Any]
TXT2IMG = "/sdapi/v1/txt2img"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(desk, "_CANCEL_SECONDS", 0.01)
    monkeypatch.setattr(cancelled, "PERIOD_SECONDS", 0.05)


async def leave(waiting: asyncio.Task[Any]) -> None:
    """Hangs up."""
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def test_who_hangs_up_has_what_has_not_begun_cancelled(serve: Serve):
    served = await serve(works=False)
    waiting = asyncio.create_task(served.post(TXT2IMG, {"prompt": "a red house"}))
    tickets = await until(lambda: served.gateway.desk.tickets)
    await until(tickets[0].sent.done)

    await leave(waiting)

    part = await until(
        lambda: served.storage.files.read_part(cancelled.BLOB, 0, 10_000)
    )
    assert tickets[0].id.encode() in part.data
    await serve(port=0)  # whose worker reads the list
    facts = await asyncio.shield(tickets[0].ended)
    assert facts.status == "cancelled"
    names = [name async for name in served.storage.blobs.names("gateway/")]
    assert names == []
    await until(
        lambda: served.storage.files.read_part(cancelled.BLOB, 0, 10_000),
        lambda part: tickets[0].id.encode() not in part.data,
    )


async def test_what_is_not_drawn_in_time_has_an_address_to_ask_at(serve: Serve):
    served = await serve(works=False, wait_seconds=1)

    async with served.session.post(
        served.url + TXT2IMG, json={"prompt": "a"}
    ) as response:
        assert response.status == 202
        where = response.headers["Location"]

    assert b'"status": "pending"' in (await served.get(where))[1]
    again = await serve()  # another gateway knows of it from the records
    await until(lambda: again.get(where), lambda it: b"completed" in it[1])
    status, image = await again.get(f"{where}/0")
    assert (status, image[:4]) == (200, b"\x89PNG")
    status, _ = await again.post("/v1/images/generations", {"prompt": "a"})
    assert status == 200


async def test_a_job_whose_end_the_reader_has_missed_is_told_to_who_asks_for_it_later(
    serve: Serve, monkeypatch
):
    async def blind(_: Watch) -> None: ...

    monkeypatch.setattr(Watch, "poll", blind)
    served = await serve(wait_seconds=1)

    async with served.session.post(
        served.url + TXT2IMG, json={"prompt": "a"}
    ) as response:
        assert response.status == 202
        where = response.headers["Location"]

    await until(lambda: served.get(where), lambda it: b"completed" in it[1])


@pytest.mark.slow
async def test_hundreds_that_wait_cost_the_storage_what_ten_do(
    serve: Serve, monkeypatch
):
    served = await serve(works=False)
    operations, waiting = served.storage.operations, list[asyncio.Task[Any]]()

    async def looks_of(count: int) -> float:
        """Operations of 20 looks at the records while so many wait."""
        while len(waiting) < count:
            waiting.append(asyncio.create_task(served.post(TXT2IMG, {"prompt": "a"})))
        tickets = await until(
            lambda: served.gateway.desk.tickets, lambda it: len(it) == count
        )
        await until(lambda: all(ticket.sent.done() for ticket in tickets))
        (watch,) = served.gateway.desk._watches.values()
        looks, poll = 0, type(watch).poll

        async def counted(self: Any) -> None:
            nonlocal looks
            looks += 1
            await poll(self)

        before = operations.blob_reads + operations.blob_writes + operations.queue
        monkeypatch.setattr(type(watch), "poll", counted)
        await until(lambda: looks >= 20)
        monkeypatch.setattr(type(watch), "poll", poll)
        return (
            operations.blob_reads + operations.blob_writes + operations.queue - before
        ) / looks

    few = await looks_of(10)
    many = await looks_of(200)

    assert few > 0
    assert many <= 1.5 * few
    await asyncio.gather(*map(leave, waiting))


async def test_jobs_that_come_together_are_sent_together(serve: Serve):
    served = await serve(works=False)
    jobs = [
        asyncio.create_task(served.post(TXT2IMG, {"prompt": str(n)}))
        for n in range(100)
    ]

    await until(lambda: len(served.gateway.desk.tickets) == 100)
    await until(
        lambda: all(ticket.sent.done() for ticket in served.gateway.desk.tickets)
    )

    assert (await served.storage.queue.depth()).messages == 100
    batches = {ticket.id.partition("-")[0] for ticket in served.gateway.desk.tickets}
    assert len(batches) < 50
    await asyncio.gather(*map(leave, jobs))


async def test_one_job_that_cannot_be_sent_fails_no_other(serve: Serve):
    served = await serve()
    await served.storage.files.create("models/other.safetensors", b"x", "a/b", {})
    bodies = [{"prompt": "a"}, {"prompt": "a", "model": "nowhere"}, {"prompt": "b"}]

    found = await asyncio.gather(*(served.post(TXT2IMG, body) for body in bodies))

    assert [status for status, _ in found] == [200, 422, 200]
    assert "no worker can have the model 'nowhere'" in found[1][1]["detail"]


async def test_a_gateway_that_stops_answers_all_who_wait(serve: Serve):
    served = await serve(works=False)
    waiting = asyncio.create_task(served.post(TXT2IMG, {"prompt": "a"}))
    tickets = await until(lambda: served.gateway.desk.tickets)
    await until(tickets[0].sent.done)

    served.gateway.desk.stop()

    status, found = await waiting
    assert status == 503
    assert f"/jobs/{tickets[0].id}" in found["detail"]
    left = await outcomes.look_up(served.storage, tickets[0].sent.result())
    assert left.status == "pending"
