"""Waiting: what it costs the storage, and what becomes of jobs whose clients are gone."""

import asyncio
import contextlib
from typing import Any

import pytest

from gateway.jobs import desk
from imagefleet import cancelled, withdrawal
from imagefleet.records import outcomes, reader
from imagefleet.records.batch import Watch
from polling import until
from storages import azurite_only, local_only

TXT2IMG = "/sdapi/v1/txt2img"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(withdrawal, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(cancelled, "PERIOD_SECONDS", 0.05)


async def ask(served: Any) -> tuple[asyncio.Task[Any], Any]:
    """A request that waits for its job, which is in the queue, and the job's ticket."""
    waiting = asyncio.create_task(served.post(TXT2IMG, {"prompt": "a red house"}))
    (ticket,) = await until(lambda: served.gateway.desk.tickets)
    await until(lambda: ticket.sent_at)
    return waiting, ticket


async def leave(waiting: asyncio.Task[Any]) -> None:
    """Hangs up."""
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def drained(served: Any) -> None:
    """Until no job is in the queue, and none is known to the gateway."""
    await until(served.storage.queue.depth, lambda depth: depth.messages == 0)
    await until(lambda: not served.gateway.desk._tickets)


async def counts_of(served: Any) -> Any:
    return await reader.counts(served.storage, "gateway")


async def test_who_hangs_up_takes_the_message_along_and_the_campaign_adds_up(
    serve,
):
    served = await serve(works=False)
    waiting, ticket = await ask(served)

    await leave(waiting)

    await drained(served)
    assert served.gateway.desk.tickets == []
    counts = await counts_of(served)
    assert (counts.sent, counts.cancelled, counts.pending) == (1, 1, 0)
    facts = await outcomes.look_up(served.storage, ticket.facts)
    assert (facts.status, facts.reason) == ("cancelled", "its client hung up")


async def test_a_job_that_a_worker_has_is_listed_until_it_has_ended(serve):
    served = await serve(works=False)
    waiting, ticket = await ask(served)
    (message,) = await served.storage.queue.receive(1, 60)

    await leave(waiting)

    part = await until(
        lambda: served.storage.files.read_part(cancelled.BLOB, 0, 10_000)
    )
    assert ticket.id.encode() in part.data
    await served.storage.queue.release(message)
    await serve(port=0)  # whose worker reads the list

    async def listed() -> bytes:
        """The list once more is drawn: nobody looks while nobody waits."""
        assert (await served.post(TXT2IMG, {"prompt": "another"}))[0] == 200
        part = await served.storage.files.read_part(cancelled.BLOB, 0, 10_000)
        assert part is not None
        return bytes(part.data)

    await until(listed, lambda data: ticket.id.encode() not in data)
    assert (await counts_of(served)).cancelled == 1


async def test_nobody_who_waits_is_no_look_at_the_storage(serve, monkeypatch):
    served = await serve(works=False)
    waiting, _ = await ask(served)
    await served.storage.queue.receive(1, 60)  # by a worker that dies
    await leave(waiting)
    await until(lambda: served.storage.files.read_part(cancelled.BLOB, 0, 10_000))
    polls = 0
    poll = Watch.poll

    async def counted(self: Watch) -> None:
        nonlocal polls
        polls += 1
        await poll(self)

    monkeypatch.setattr(Watch, "poll", counted)
    other = asyncio.create_task(served.post(TXT2IMG, {"prompt": "another"}))
    await until(lambda: polls > 2)
    await leave(other)
    await drained_but(served, 1)
    await asyncio.gather(*(asyncio.sleep(0) for _ in range(100)))
    at_rest = polls
    for _ in range(5):
        assert (await served.get("/live"))[0] == 200
    assert polls <= at_rest + 1


async def drained_but(served: Any, messages: int) -> None:
    await until(served.storage.queue.depth, lambda depth: depth.messages == messages)


async def test_a_message_that_somebody_deletes_ends_its_request(serve, monkeypatch):
    monkeypatch.setattr(desk, "_LOOK_SECONDS", 0.05)
    served = await serve(works=False)
    one, ticket = await ask(served)

    await served.storage.queue.clear()

    status, found = await one
    assert (status, ticket.id in found["detail"]) == (409, True)
    assert "its message was deleted from the queue" in found["detail"]
    await drained(served)
    counts = await counts_of(served)
    assert (counts.sent, counts.cancelled, counts.pending) == (1, 1, 0)


async def test_a_cancelled_campaign_ends_its_requests_though_no_worker_is_there(
    serve, monkeypatch
):
    monkeypatch.setattr(desk, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(cancelled, "_wait", asyncio.sleep)
    served = await serve(works=False)
    one, _ = await ask(served)

    async def at_once(_: float) -> None: ...

    monkeypatch.setattr(cancelled, "_wait", at_once)
    await cancelled.cancel(served.storage, "gateway")

    status, found = await one
    assert (status, "was cancelled" in found["detail"]) == (409, True)
    await drained(served)
    assert (await counts_of(served)).cancelled == 1


async def test_without_a_worker_it_is_said_so(serve, monkeypatch):
    monkeypatch.setattr(desk, "_LOOK_SECONDS", 0.05)
    served = await serve(works=False, worker_seconds=1)

    async with served.session.post(
        served.url + TXT2IMG, json={"prompt": "a"}
    ) as response:
        found = await response.json()

    assert (response.status, found["detail"]) == (
        503,
        "no worker has been seen for 5 minutes: try again later",
    )
    assert response.headers["Retry-After"]
    await drained(served)
    assert (await counts_of(served)).cancelled == 1


async def test_a_lost_job_locks_nobody_out(serve, clients_file, monkeypatch):
    monkeypatch.setattr(desk, "_LOOK_SECONDS", 0.05)
    served = await serve(works=False, clients=clients_file, wait_seconds=1)
    alice = {"Authorization": "Bearer alice-key"}
    body = {"prompt": "a", "n_iter": 8}
    status, _ = await served.post(TXT2IMG, body, headers=alice)
    assert status == 202
    assert (await served.post(TXT2IMG, body, headers=alice))[0] == 429

    await served.storage.queue.clear()

    await until(
        lambda: served.post(TXT2IMG, body, headers=alice), lambda it: it[0] == 202
    )


async def test_what_is_not_drawn_in_time_has_an_address_to_ask_at(serve):
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
    serve, monkeypatch
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
async def test_hundreds_that_wait_cost_the_storage_what_ten_do(serve, monkeypatch):
    served = await serve(works=False)
    operations = served.storage.operations
    waiting = list[asyncio.Task[Any]]()

    async def looks_of(count: int) -> float:
        """Operations of 20 looks at the records while so many wait."""
        while len(waiting) < count:
            waiting.append(asyncio.create_task(served.post(TXT2IMG, {"prompt": "a"})))
        tickets = await until(
            lambda: served.gateway.desk.tickets, lambda it: len(it) == count
        )
        await until(lambda: all(ticket.sent_at for ticket in tickets))
        (watch,) = served.gateway.desk._watches.values()
        looks = 0
        poll = type(watch).poll

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


@local_only
async def test_what_a_worker_of_this_process_has_ended_is_answered_without_a_poll(
    serve, monkeypatch
):
    monkeypatch.setattr(desk, "_POLL_SECONDS_BESIDE_WORKER", 3600)
    served = await serve(model="stand-in")
    waiting = asyncio.create_task(served.post(TXT2IMG, {"prompt": "a red house"}))
    await until(lambda: counts_of(served), lambda counts: counts.images == 1)
    assert not waiting.done()

    served.gateway.desk.look_soon()

    assert (await waiting)[0] == 200


@azurite_only
async def test_a_worker_of_many_jobs_a_second_makes_no_more_looks_that_are_billed(
    serve,
):
    served = await serve(works=False, model="stand-in")
    served.gateway.desk.look_soon()
    assert not served.gateway.desk._has_news.is_set()


async def test_jobs_that_come_together_are_sent_together(serve):
    served = await serve(works=False)
    jobs = [
        asyncio.create_task(served.post(TXT2IMG, {"prompt": str(n)}))
        for n in range(100)
    ]

    await until(lambda: len(served.gateway.desk.tickets) == 100)
    await until(lambda: all(ticket.sent_at for ticket in served.gateway.desk.tickets))

    assert (await served.storage.queue.depth()).messages == 100
    batches = {ticket.id.partition("-")[0] for ticket in served.gateway.desk.tickets}
    assert len(batches) < 50
    await asyncio.gather(*map(leave, jobs))


async def test_one_job_that_cannot_be_sent_fails_no_other(serve):
    served = await serve()
    long = {"prompt": "a" * 40_000, "negative_prompt": "b" * 40_000}
    bodies = [{"prompt": "a"}, long, {"prompt": "b"}]

    found = await asyncio.gather(*(served.post(TXT2IMG, body) for body in bodies))

    assert [status for status, _ in found] == [200, 422, 200]
    assert "bytes" in found[1][1]["detail"]


async def test_a_gateway_that_stops_answers_all_who_wait(serve):
    served = await serve(works=False)
    waiting, ticket = await ask(served)

    served.gateway.desk.stop()

    status, found = await waiting
    assert status == 503
    assert f"/jobs/{ticket.id}" in found["detail"]
    left = await outcomes.look_up(served.storage, ticket.facts)
    assert left.status == "pending"
