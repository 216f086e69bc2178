"""Messages are added without the SDK's own path, which they must still be equal to."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from azure.core.credentials import AzureSasCredential
from azure.storage.queue.aio import QueueClient
from pydantic import SecretStr

from imagefleet import concurrency, errors
from imagefleet.storage.azure.signed import MessageSender, SignedRequests
from imagefleet.storage.azure.storage import API_VERSION, AzureStorage
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30

#: Tabs, line ends, what XML escapes, and characters of two, three and four bytes.
ODD = "a\tb\nc <&> ]]> \"d\" 'e' é ☃ 🦊 &amp; "


@pytest.fixture
async def storage(azurite_settings: StorageSettings) -> AsyncIterator[AzureStorage]:
    async with AzureStorage(azurite_settings, concurrency.NEVER) as opened:
        await opened.create()
        yield opened


@pytest.mark.parametrize("body", ["a job", ODD, "x" * 65_536, ODD * 500])
async def test_a_message_arrives_as_it_was_sent(
    storage: AzureStorage, body: str
) -> None:
    await storage.queue.send([body])
    (message,) = await storage.queue.receive(1, LEASE_SECONDS)
    assert message.body == body


async def test_a_new_token_signs_the_next_message(
    azurite_settings: StorageSettings,
) -> None:
    client = QueueClient(
        "https://pictures.queue.core.windows.net",
        "jobs",
        credential := AzureSasCredential("sig=old"),
        api_version=API_VERSION,
    )
    async with AzureStorage(azurite_settings, concurrency.NEVER) as storage:
        requests = SignedRequests(credential, storage._transport, API_VERSION)
        adding = MessageSender(client, requests, storage.operations)
        first = await adding.signed(10)
        credential.update("sig=new")
        second = await adding.signed(10)
    url = "https://pictures.queue.core.windows.net/jobs/messages?messagettl=-1"
    assert (first.url, second.url) == (f"{url}&sig=old", f"{url}&sig=new")


async def test_a_token_in_the_address_is_sent_along(
    azurite_settings: StorageSettings,
) -> None:
    settings = azurite_settings.model_copy(
        update={
            "storage": "QueueEndpoint=https://pictures.queue.core.windows.net;"
            "BlobEndpoint=https://pictures.blob.core.windows.net;"
            "SharedAccessSignature=sv=2023&sig=mine",
            "sas": SecretStr(""),
        }
    )
    async with AzureStorage(settings, concurrency.NEVER) as storage:
        signed = await storage.queues["normal"]._sender.signed(10)
    assert signed.url.startswith("https://pictures.queue.core.windows.net/")
    assert "/messages?messagettl=-1&" in signed.url
    assert signed.url.endswith("sig=mine")


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
        return web.Response(status=201, text="<MessageId>1</MessageId>")


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
) -> None:
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
        sending = storage.queues["normal"]
        await sending.send(f"{number}" for number in range(200))
    assert queue.taken == 200
    assert len(refusals) == queue.refused > 0
    assert all(isinstance(each, errors.BusyError) for each in refusals)
