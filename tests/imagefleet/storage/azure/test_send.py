"""Sending messages: odd characters, and a queue that asks to slow down."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from imagefleet import concurrency, errors
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30

#: Tabs, line ends, what XML escapes, and characters of two, three and four bytes.
ODD = "a\tb\nc <&> ]]> \"d\" 'e' é ☃ 🦊 &amp; "


@pytest.fixture
async def storage(azurite_settings: StorageSettings) -> AsyncIterator[AzureStorage]:
    async with AzureStorage(azurite_settings, concurrency.NEVER) as opened:
        await opened.create()
        yield opened


async def test_a_message_arrives_as_it_was_sent(storage: AzureStorage):
    for body in ("a job", ODD, "x" * 65_536, ODD * 500):
        await storage.queue.send([body])
        (message,) = await storage.queue.receive(1, LEASE_SECONDS)
        assert message.body == body


_ADDED = (
    "<?xml version='1.0' encoding='utf-8'?><QueueMessagesList><QueueMessage>"
    "<MessageId>1</MessageId><PopReceipt>a</PopReceipt>"
    "</QueueMessage></QueueMessagesList>"
)


class BusyQueue:
    """Answers 503 to each third message, as Azure does to those that come too fast."""

    def __init__(self) -> None:
        self.taken = self.refused = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":  # the queue's properties
            return web.Response(headers={"x-ms-approximate-messages-count": "0"})
        if (self.taken + self.refused) % 3 == 2:
            self.refused += 1
            return web.Response(status=503, headers={"x-ms-error-code": "ServerBusy"})
        self.taken += 1
        return web.Response(status=201, text=_ADDED, content_type="application/xml")


@pytest.fixture
async def busy() -> AsyncIterator[tuple[BusyQueue, StorageSettings]]:
    queue = BusyQueue()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", queue.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/devstoreaccount1"
    address = f"AccountName=devstoreaccount1;AccountKey=a2V5;BlobEndpoint={url};QueueEndpoint={url}"
    yield queue, StorageSettings(storage=address)
    await runner.cleanup()


async def test_a_storage_that_asks_to_slow_down_gets_every_message_once(
    busy: tuple[BusyQueue, StorageSettings],
):
    queue, settings = busy
    refusals: list[errors.TransientError] = []
    patient = concurrency.RetryPolicy(
        tries=2,
        first_wait_seconds=0.02,
        longest_wait_seconds=0.1,
        waits_while_busy=True,
        on_retry=refusals.append,
    )
    async with AzureStorage(settings, patient) as storage:
        await storage.queues["normal"].send(f"{number}" for number in range(200))
    assert queue.taken == 200
    assert len(refusals) == queue.refused > 0
    assert all(isinstance(each, errors.BusyError) for each in refusals)
