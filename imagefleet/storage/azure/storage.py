"""The home on Azure Storage: one session and one client for each resource, for a whole process."""

from __future__ import annotations

import urllib.request
from functools import partial
from types import TracebackType
from typing import Any, Self

import aiohttp
from azure.core.pipeline import PipelineRequest
from azure.core.pipeline.transport import AioHttpTransport

from imagefleet import retry
from imagefleet.storage.azure import account, sas
from imagefleet.storage.azure.blobs import AzureBlobs
from imagefleet.storage.azure.credentials import Credentials
from imagefleet.storage.azure.queue import AzureQueue
from imagefleet.storage.protocol import Operations
from imagefleet.storage.settings import StorageSettings

#: An older version of the service's interface: all that is needed here is in it, every Azure
#: cloud and Azurite answer it, and every release of the SDK that we allow offers it. The SDK's
#: own choice is the newest, which Azurite refuses.
API_VERSION = "2023-11-03"

#: Connections at once: the sends in flight (32) and as many for uploads, renewals and deletes.
MAX_CONNECTIONS = 64

#: To a storage that is up, connecting takes milliseconds and the slowest answer under a second.
#: The SDK's own 20 and 60 seconds would eat a lease.
CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 20


async def surface_lost_replies(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Middleware that keeps aiohttp from repeating a PUT or DELETE on its own.

    It repeats them when a connection breaks, and after a renewal that went through, the second
    one is refused with 'stale receipt': as if another worker had the message. We must know.
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise aiohttp.ClientConnectionError(str(error) or type(error).__name__) from error


def count_queue_operation(operations: Operations, _: PipelineRequest[Any]) -> None:
    """Hook of the SDK's pipeline, which each request passes, retries and pages included."""
    operations.queue += 1


def count_blob_operation(operations: Operations, request: PipelineRequest[Any]) -> None:
    """As count_queue_operation; Azure bills listings as writes, and deletes not at all."""
    http = request.http_request
    if http.method in {"GET", "HEAD"} and http.query.get("comp") != "list":
        operations.blob_reads += 1
    elif http.method != "DELETE":
        operations.blob_writes += 1


class AzureStorage:
    """Queues and container of one storage account. Connects when it is first used.

    With a proxy in HTTPS_PROXY or HTTP_PROXY, requests go through it as NO_PROXY allows; without,
    aiohttp is kept from looking for one each time, which makes requests almost twice as cheap.

    Raises:
        SetupError: the address is none, or brings no credentials.
    """

    def __init__(
        self,
        settings: StorageSettings,
        retries: retry.RetryPolicy,
        *,
        identity_token: sas.IdentityToken | None = None,
        read_timeout_seconds: float = READ_TIMEOUT_SECONDS,
    ) -> None:
        self._through_proxy = bool(urllib.request.getproxies_environment())
        self._transport = AioHttpTransport(
            connection_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=read_timeout_seconds,
            use_env_settings=self._through_proxy,
        )
        self.operations = Operations()
        options = {
            "transport": self._transport,
            "api_version": API_VERSION,
            # One policy repeats, counts and bounds: ours. The SDK's knows nothing of 429, and
            # hides the lost reply of a renewal behind the refusal of its own repetition.
            "retry_total": 0,
        }
        address = account.read_address(settings.storage.strip())
        access = self._credentials = Credentials(address, settings, identity_token)
        blob_options = options | {
            "raw_request_hook": partial(count_blob_operation, self.operations)
        }
        options["raw_request_hook"] = partial(count_queue_operation, self.operations)
        queue = address.queue_client(settings.queue, access.queue.credential, **options)
        poison = address.queue_client(settings.poison_queue, access.poison.credential, **options)
        container = address.container_client(
            settings.container, access.blob.credential, **blob_options
        )
        self.queue = AzureQueue(queue, retries, access.queue)
        self.poison = AzureQueue(poison, retries, access.poison)
        self.blobs = AzureBlobs(container, retries, access.blob)
        self.url = f"{container.scheme}://{container.primary_hostname}"

    async def create(self) -> None:
        if not await self.queue.create():
            return  # a token for one queue creates nothing, nor need its bearer reach the rest
        await self.poison.create()
        await self.blobs.create_container()

    async def check(self) -> None:
        await self.queue.check()
        await self.poison.check()
        await self.blobs.check()

    async def __aenter__(self) -> Self:
        self._transport.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=self._through_proxy,
            middlewares=[surface_lost_replies],
        )
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._credentials.close()
        await self._transport.close()
