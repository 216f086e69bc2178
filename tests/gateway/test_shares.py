"""What one client asks for, and what the others wait for meanwhile."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from gateway import server
from gateway.jobs import desk
from imagefleet import withdrawal
from imagefleet.job.message import Job
from polling import until

TXT2IMG = "/sdapi/v1/txt2img"
ALICE, BOB = ({"Authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))


async def waiting_in(served: Any, priority: str) -> int:
    return int((await served.storage.models.of(None)[priority].depth()).messages)


@contextlib.asynccontextmanager
async def asking(served: Any, headers: Any, *counts: int) -> Any:
    """Requests of a client, each for so many images, while the block runs."""
    known = len(served.gateway.desk.tickets)
    tasks = [
        asyncio.create_task(
            served.post(TXT2IMG, {"prompt": "a", "n_iter": count}, headers=headers)
        )
        for count in counts
    ]
    tickets = await until(
        lambda: served.gateway.desk.tickets,
        lambda tickets: len(tickets) == known + len(counts),
    )
    await until(lambda: all(ticket.sent_at for ticket in tickets))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_client_with_many_images_lets_the_others_go_first(
    serve, clients_file: Path
):
    served = await serve(works=False, clients=clients_file)

    async with asking(served, BOB, 1), asking(served, ALICE, 8):
        assert await waiting_in(served, "low") == 1
        assert await waiting_in(served, "normal") == 1
        async with asking(served, BOB, 1, 1, 1):
            assert await waiting_in(served, "normal") == 4
    await until(lambda: waiting_in(served, "low"), lambda count: count == 0)


async def test_requests_that_are_hung_up_on_are_counted_until_they_are_gone(
    serve, clients_file: Path, monkeypatch
):
    monkeypatch.setattr(withdrawal, "_WAIT_SECONDS", 60.0)
    served = await serve(works=False, clients=clients_file)

    async with asking(served, BOB, 1):
        async with asking(served, ALICE, *(desk._BURST * [1])):
            assert await waiting_in(served, "low") == 0
        await until(lambda: len(served.gateway.desk.tickets) == 1)
        async with asking(served, ALICE, 1):
            assert await waiting_in(served, "low") == 1


async def test_who_is_alone_keeps_its_priority(serve, clients_file: Path):
    served = await serve(works=False, clients=clients_file)

    async with asking(served, ALICE, 8):
        assert await waiting_in(served, "normal") == 1


async def test_nobody_is_put_behind_a_batch_of_another(
    serve, clients_file: Path, monkeypatch
):
    monkeypatch.setattr(desk, "_AGE_SECONDS", 0.0)
    monkeypatch.setattr(desk, "_OTHERS_SECONDS", 0.0)
    served = await serve(works=False, clients=clients_file)
    batch = [Job(prompt="a", id="batch").to_message()]
    await served.storage.models.send(batch, "low")
    low = served.storage.models.of(None)["low"]
    await until(low.depth, lambda depth: (depth.oldest_age_seconds or 0) > 0)

    async with asking(served, BOB, 1), asking(served, ALICE, 8):
        assert await waiting_in(served, "low") == 1
        assert await waiting_in(served, "normal") == 2


async def test_polls_of_one_client_wait_for_each_other(
    serve, clients_file: Path, monkeypatch
):
    monkeypatch.setattr(server, "_POLLS", 1)
    served = await serve(works=False, clients=clients_file)
    entered = asyncio.Event()
    goes_on = asyncio.Event()

    async def refresh() -> None:
        entered.set()
        await goes_on.wait()

    monkeypatch.setattr(served.gateway.desk.models, "refresh", refresh)
    slow = asyncio.create_task(served.get("/sdapi/v1/sd-models", headers=ALICE))
    await entered.wait()

    next_one = asyncio.create_task(served.get("/sdapi/v1/progress", headers=ALICE))

    assert (await served.get("/sdapi/v1/progress", headers=BOB))[0] == 200
    assert not next_one.done()
    goes_on.set()
    assert {(await slow)[0], (await next_one)[0]} == {200}


async def test_descriptions_are_made_once(serve, monkeypatch):
    served = await serve(works=False)
    monkeypatch.setattr(Job, "model_json_schema", None)

    status, body = await served.get("/openapi.json")

    assert status == 200
    assert b'"/sdapi/v1/txt2img"' in body
