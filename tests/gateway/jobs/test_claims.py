"""Requests with a key of their client's: drawn once, however often they are sent, and wherever."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from gateway.jobs import claims, desk
from imagefleet.records import reader
from polling import until

TXT2IMG = "/sdapi/v1/txt2img"
KEY = {"Idempotency-Key": "order 17"}
HOUSE = {"prompt": "a red house"}


async def names_of(served: Any) -> list[str]:
    return [name async for name in served.storage.blobs.names("gateway/")]


async def claims_of(served: Any) -> list[str]:
    return [name async for name in served.storage.blobs.names(claims.FOLDER)]


@pytest.mark.parametrize("gateways", [1, 2])
async def test_a_request_that_is_sent_again_is_drawn_once(serve, gateways: int):
    first = await serve()
    all_of_them = [first, *[await serve(works=False) for _ in range(gateways - 1)]]
    asked = [served.post(TXT2IMG, HOUSE, headers=KEY) for served in 3 * all_of_them]

    found = await asyncio.gather(*asked)

    assert {status for status, _ in found} == {200}
    assert len({json.dumps(answer["images"]) for _, answer in found}) == 1
    assert len(await names_of(first)) == 1
    status, again = await all_of_them[-1].post(TXT2IMG, HOUSE, headers=KEY)
    assert (status, again["images"]) == (200, found[0][1]["images"])
    assert len(await names_of(first)) == 1
    counts = await until(
        lambda: reader.counts(first.storage, "gateway"), lambda it: it.pending == 0
    )
    assert (counts.sent, counts.completed) == (1, 1)
    await until(lambda: claims_of(first), lambda names: not names)


async def test_a_key_is_of_one_request(serve):
    served = await serve()
    waiting = asyncio.create_task(served.post(TXT2IMG, HOUSE, headers=KEY))
    await until(lambda: served.gateway.desk.tickets)

    during = await served.post(TXT2IMG, {"prompt": "a fish"}, headers=KEY)
    assert (await waiting)[0] == 200
    later = await served.post(TXT2IMG, {"prompt": "a fish"}, headers=KEY)
    other = await served.post(
        TXT2IMG, {"prompt": "a fish"}, headers={"Idempotency-Key": "order 18"}
    )

    assert [status for status, _ in (during, later, other)] == [422, 422, 200]


async def test_who_hangs_up_with_a_key_gets_the_picture_later(serve):
    served = await serve(works=False)
    waiting = asyncio.create_task(served.post(TXT2IMG, HOUSE, headers=KEY))
    (ticket,) = await until(lambda: served.gateway.desk.tickets)
    await until(lambda: ticket.sent_at)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await until(lambda: not ticket.waiters)

    other = await serve()

    status, _ = await other.post(TXT2IMG, HOUSE, headers=KEY)
    assert status == 200
    assert len(await names_of(served)) == 1


async def test_a_gateway_that_died_before_it_sent_a_job_leaves_it_to_another(
    serve, monkeypatch
):
    monkeypatch.setattr(desk, "_LOOK_SECONDS", 0.05)
    served = await serve(works=False)
    waiting = asyncio.create_task(served.post(TXT2IMG, HOUSE, headers=KEY))
    (name,) = await until(lambda: claims_of(served))
    (ticket,) = served.gateway.desk.tickets
    await until(lambda: ticket.sent_at)
    served.gateway.desk.stop()
    assert (await waiting)[0] == 503
    await served.storage.queue.clear()  # as if it had not been sent
    assert await claims_of(served) == [name]
    served = await serve()

    status, _ = await served.post(TXT2IMG, HOUSE, headers=KEY)

    assert status == 200
    assert len(await names_of(served)) == 1


async def test_the_task_id_of_a1111_is_of_one_request_each(serve):
    served = await serve()
    task = {"force_task_id": "task(1)"}
    bodies = [HOUSE | task, HOUSE | task, {"prompt": "a fish"} | task]

    found = await asyncio.gather(*(served.post(TXT2IMG, body) for body in bodies))

    assert {status for status, _ in found} == {200}
    assert len(await names_of(served)) == 2
