"""Thousands of requests of which a third ends otherwise: nothing is lost, held or looked for."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import astuple
from typing import Any

import pytest

from gateway.jobs import desk
from imagefleet import cancelled, errors
from imagefleet.records import reader
from imagefleet.storage.settings import StorageSettings
from polling import until

pytestmark = pytest.mark.slow

REQUESTS = 5_000
AT_ONCE = 50

TXT2IMG = "/sdapi/v1/txt2img"

#: What becomes of each ninth request, by its number; the others are waited for.
ENDINGS = ("hung up", "cancelled", "deleted")


@pytest.fixture
def storage_settings(local_settings: StorageSettings) -> StorageSettings:
    """One kind of storage: the gateway's side is the same."""
    return local_settings


class Endings:
    """Requests of one gateway, each ended as its number says."""

    def __init__(self, served: Any) -> None:
        self.served = served
        self.answers: Counter[tuple[str, int]] = Counter()
        self._to_cancel: set[str] = set()

    async def ask(self, number: int) -> None:
        ending = ENDINGS[number % 9] if number % 9 < len(ENDINGS) else ""
        body = {"prompt": f"picture {number}", "width": 64, "height": 64}
        asked = asyncio.create_task(self.served.post(TXT2IMG, body))
        if ending:
            ticket = await until(lambda: self.ticket_of(number) or asked.done())
            if ticket is not True:
                await self.end(ending, ticket, asked)
        with contextlib.suppress(asyncio.CancelledError):
            status, _ = await asked
            self.answers[ending, status] += 1

    def ticket_of(self, number: int) -> Any:
        prompt = f"picture {number}"
        tickets = self.served.gateway.desk.tickets
        return next((each for each in tickets if each.job.prompt == prompt), None)

    async def end(self, ending: str, ticket: Any, asked: Any) -> None:
        if ending == "hung up":
            asked.cancel()
            return
        await until(lambda: ticket.sent_at)
        if ending == "cancelled":
            self._to_cancel.add(ticket.key)
        elif ticket.message is not None:
            queue = self.served.storage.models.of(None)[ticket.priority]
            with contextlib.suppress(errors.LeaseLost):  # a worker has it
                await queue.delete(ticket.message)

    async def keep_cancelling(self) -> None:
        storage = self.served.storage
        await cancelled.allow(storage, "gateway")
        while True:
            await until(lambda: self._to_cancel)
            keys = self._to_cancel
            self._to_cancel = set()
            await cancelled.cancel_jobs(storage, keys, ())


async def test_campaigns_add_up_places_are_free_and_nobody_looks(serve, monkeypatch):
    monkeypatch.setattr(desk, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(cancelled, "PERIOD_SECONDS", 0.2)
    served = await serve()
    endings = Endings(served)
    numbers = iter(range(REQUESTS))

    async def client() -> None:
        for number in numbers:
            await endings.ask(number)

    cancelling = asyncio.create_task(endings.keep_cancelling())
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    cancelling.cancel()

    gateway = served.gateway
    await until(served.storage.queue.depth, lambda depth: depth.messages == 0)
    await until(lambda: not gateway.desk._tickets)
    counts = await until(
        lambda: reader.counts(served.storage, "gateway"),
        lambda counts: counts.pending == 0,
    )
    assert counts.sent == counts.completed + counts.cancelled
    waited_for = REQUESTS - sum(number % 9 < len(ENDINGS) for number in range(REQUESTS))
    assert endings.answers["", 200] == waited_for
    assert {status for _, status in endings.answers} == {200, 409}
    assert counts.cancelled >= endings.answers["deleted", 409] > 0
    assert (gateway.desk.tickets, +gateway._requests) == ([], Counter())
    await until(lambda: not gateway.desk._is_reading)
    at_rest = astuple(served.storage.operations)
    for _ in range(100):
        assert (await served.get("/live"))[0] == 200
    assert astuple(served.storage.operations) == at_rest
