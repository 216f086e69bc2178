"""Azure Storage: one HTTP session, and a client for each queue and container."""

import logging
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import (
    ClientConnectionError,
    ClientConnectorError,
    ClientHandlerType,
    ClientOSError,
    ClientRequest,
    ClientResponse,
    ClientSession,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
)
from azure.core.pipeline import PipelineRequest
from azure.core.pipeline.transport import AioHttpTransport

from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.signing import Scope
from imagefleet.storage.azure import account, sas
from imagefleet.storage.azure.blobs import AzureBlobs
from imagefleet.storage.azure.credentials import Credentials
from imagefleet.storage.azure.queue import MOST_SENDS, AzureQueue
from imagefleet.storage.azure.roles import JOB_QUEUES, name_of
from imagefleet.storage.parts import Storage
from imagefleet.storage.proofs import IN_USE, SECRETS, Proofs, Prover
from imagefleet.storage.protocol import Clock, Operations
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.settings import Resource, StorageSettings
from imagefleet.telemetry import proxies
from imagefleet.telemetry.logs import log

#: An API version that every Azure cloud, Azurite and every allowed release of the SDK support. The
#: SDK's default is the newest, which Azurite refuses.
API_VERSION = "2023-11-03"

#: Connections for the sends in flight to one queue, and some uploads, renewals and deletes.
MAX_CONNECTIONS = MOST_SENDS + 32

#: Connecting normally takes milliseconds, and the slowest answer less than a second. The SDK's
#: defaults, 20 and 60 seconds, could outlast a lease.
CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 20

# It warns, with a traceback, of each answer that is no XML; the error says so already.
logging.getLogger("azure.storage").setLevel(logging.ERROR)


async def surface_lost_replies(
    request: ClientRequest, handler: ClientHandlerType
) -> ClientResponse:
    """Middleware that keeps aiohttp from retrying PUT and DELETE when a connection breaks.

    If the first renewal succeeded, Azure would refuse the second for its stale receipt, as if
    another worker had the message.
    """
    try:
        return await handler(request)
    except ClientConnectorError:
        raise
    except (ServerDisconnectedError, ClientOSError) as error:
        raise ClientConnectionError(str(error) or type(error).__name__) from error


class _ClockReader:
    """Middleware that tells a clock the date of Azure's answers, once for each second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: str | None = None

    async def __call__(
        self, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        asked_at = self._clock.machine()
        response = await handler(request)
        date = response.headers.get("Date")
        # What a proxy answers in Azure's place lacks the id.
        if date != self._last and "x-ms-request-id" in response.headers:
            self._last = date
            if (at := concurrency.http_date(date)) is not None:
                self._clock.answered(at, asked_at)
        return response


class AzureStorage(Storage):
    """The queues and the containers of one storage account. Connects on first use.

    Honours the proxies of the environment; else aiohttp is not to look for one on each request,
    which takes almost half of the CPU time. Raises SetupError as `open_storage`.
    """

    def __init__(
        self,
        settings: StorageSettings,
        retry_policy: concurrency.RetryPolicy,
        *,
        identity_token: sas.IdentityToken | None = None,
        read_timeout_seconds: float = READ_TIMEOUT_SECONDS,
    ) -> None:
        self.settings = settings
        self._through_proxy = proxies.through_proxy()
        self._transport = AioHttpTransport(
            connection_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=read_timeout_seconds,
            use_env_settings=self._through_proxy,
        )
        self.operations = Operations()
        self._clock = Clock()
        options = {
            "transport": self._transport,
            "api_version": API_VERSION,
            # Only our policy retries. The SDK's does not handle 429, and would hide the lost reply
            # to a renewal behind the refusal of its own retry.
            "retry_total": 0,
        }
        address = account.read_address(settings.storage.strip())
        access = self._credentials = Credentials(
            address, settings, identity_token, retry_policy
        )

        def queue(resource: Resource, model: str | None = None) -> AzureQueue:
            of = access.of(resource, model)
            client = address.queue_client(
                name_of(settings, resource, model),
                of.credential,
                raw_request_hook=self._count_queue_operation,
                **options,
            )
            return AzureQueue(client, of, self._clock)

        def container(resource: Resource) -> AzureBlobs:
            of = access.of(resource)
            client = address.container_client(
                name_of(settings, resource),
                of.credential,
                raw_request_hook=self._count_blob_operation,
                **options,
            )
            return AzureBlobs(client, of, self._clock)

        self.poison = queue("poison")
        self.blobs = container("blob")
        self.packs = container("packs")
        self.files = container("files")
        self.models = ModelQueues(
            lambda priority, model: queue(JOB_QUEUES[priority], model), self.blobs
        )
        self.queues = self.models.default
        self.queue = self.models.all
        self.url = self.blobs.address("").rpartition(f"/{settings.container}/")[0]
        of_account = urlsplit(self.url)
        # Also behind a private link, or an emulator's address, which has the account in its path.
        account_name = (
            of_account.path.strip("/") or (of_account.hostname or "").partition(".")[0]
        )
        fleet = f"{account_name}/{settings.container}"
        self.scope = Scope(lambda: fleet, settings.queue, self._clock.now)

    @property
    def prover(self) -> Prover | None:
        return self._credentials.prover

    async def proofs(self) -> Proofs | None:
        if IN_USE not in await self.poison.metadata():
            return None
        try:
            secrets = (await self.files.container_metadata()).get(SECRETS, "")
        except SetupError:
            log.warning(
                "the account's key alone reads what proves who has drawn an image: with these"
                " tokens no worker is believed, and its hours and costs are left out",
                action="proofs_hidden",
            )
            secrets = ""
        return Proofs(filter(None, secrets.split(",")))

    async def __aenter__(self) -> Self:
        self._transport.session = ClientSession(
            connector=TCPConnector(limit=MAX_CONNECTIONS),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            trust_env=self._through_proxy,
            middlewares=[surface_lost_replies, _ClockReader(self._clock)],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._credentials.close()
        await self._transport.close()

    # The SDK calls these for each request that it sends, retries and pages included.

    def _count_queue_operation(self, _: PipelineRequest[Any]) -> None:
        self.operations.queue += 1

    def _count_blob_operation(self, request: PipelineRequest[Any]) -> None:
        http = request.http_request
        is_listing = http.query.get("comp") == "list"  # billed as a write
        if http.method in {"GET", "HEAD"} and not is_listing:
            self.operations.blob_reads += 1
        elif http.method != "DELETE":
            self.operations.blob_writes += 1
