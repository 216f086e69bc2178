"""Simulated clients of the Azure SDK, with latency and faults, below the worker's storage code."""

from __future__ import annotations

import asyncio
import gzip
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, TypeVar

from azure.core import exceptions

from simulation.account import IMAGE_BYTES, Account, Blob, Queue, Stored, refusal

Result = TypeVar("Result")

#: Of Azure itself, without the way there.
SERVER_SECONDS = 0.008

#: SaladCloud's measurement of 200 nodes, without retries; half of them after Azure has done it.
FAILURE_SHARE = 0.001

#: An HTTP request and its headers.
REQUEST_BYTES = 1_200

#: Of records, compressed: a line through the real ones of a run.
APPEND_BYTES, RECORD_BYTES = 390, 26
_GZIP = b"\x1f\x8b"

_SENT_AT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Line:
    """A node's way to the storage."""

    round_trip_seconds: float
    upload_bits_per_second: float
    dice: random.Random
    failure_share: float = FAILURE_SHARE
    #: The node is gone: nothing that it sends arrives.
    is_cut: bool = False
    _free_at: float = 0.0

    async def request(self, size: int, act: Callable[[], Result]) -> Result:
        """Sends *size* bytes, calls *act* at the storage, and returns its answer."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        server = self.dice.expovariate(1 / SERVER_SECONDS)
        await asyncio.sleep(self._send(now, size) + self.round_trip_seconds + server)
        if self.is_cut:
            await loop.create_future()
        fails = self.dice.random()
        if fails < self.failure_share / 2:
            raise exceptions.ServiceRequestError("simulated: not sent")
        answer = act()
        if fails < self.failure_share:
            raise exceptions.ServiceResponseError("simulated: the reply was lost")
        return answer

    def _send(self, now: float, size: int) -> float:
        """Seconds until *size* bytes are sent.

        Each request has a connection, and these share the line: an image is sent when those before
        it are, but a request without one takes its part of the line beside them.
        """
        seconds = 8 * size / self.upload_bits_per_second
        images = (
            max(0.0, self._free_at - now)
            * self.upload_bits_per_second
            / 8
            / IMAGE_BYTES
        )
        self._free_at = max(now, self._free_at) + seconds
        if size >= IMAGE_BYTES:
            return self._free_at - now
        return min(self._free_at - now, seconds * (1 + math.ceil(images)))


@dataclass(slots=True)
class Address:
    """Stand-in for an account's address: makes the clients of one node for `AzureStorage`."""

    account: Account
    line: Line
    has_key: bool = True
    sas: str | None = None

    def queue_client(
        self, name: str, _credential: object, **options: Any
    ) -> QueueClient:
        return QueueClient(self.account, self.account.queue(name), self.line, options)

    def container_client(
        self, name: str, _credential: object, **options: Any
    ) -> ContainerClient:
        return ContainerClient(self.account, name, self.line, options)


@dataclass(slots=True)
class QueueClient:
    """`azure.storage.queue.aio.QueueClient`, as far as `AzureQueue` uses it."""

    account: Account
    queue: Queue
    line: Line
    options: dict[str, Any]
    credential: None = None

    @property
    def queue_name(self) -> str:
        return self.queue.name

    async def _request(
        self, act: Callable[[], Result], size: int = REQUEST_BYTES
    ) -> Result:
        self.options["raw_request_hook"](None)

        def accepted() -> Result:
            self.account.accept(self.queue)
            return act()

        return await self.line.request(size, accepted)

    async def create_queue(self) -> None:
        await self._request(lambda: None)

    async def send_message(self, body: str, **_: Any) -> None:
        size = REQUEST_BYTES + len(body)
        await self._request(lambda: self.queue.send(body, self.account.clock()), size)

    def receive_messages(
        self, *, messages_per_page: int, visibility_timeout: int, **_: Any
    ) -> SimpleNamespace:
        async def pages() -> AsyncIterator[AsyncIterator[SimpleNamespace]]:
            def receive() -> list[Stored]:
                now = self.account.clock()
                return self.queue.receive(messages_per_page, visibility_timeout, now)

            yield _each([_message(each) for each in await self._request(receive)])

        return SimpleNamespace(by_page=pages)

    async def update_message(
        self, name: str, receipt: str, body: str | None, *, visibility_timeout: int
    ) -> SimpleNamespace:
        def update() -> SimpleNamespace:
            until = self.account.clock() + visibility_timeout
            return _message(self.queue.update(name, receipt, body, until))

        return await self._request(update)

    async def delete_message(self, name: str, receipt: str) -> None:
        await self._request(lambda: self._delete(name, receipt))

    def _delete(self, name: str, receipt: str) -> None:
        self.account.deleted(self.queue.delete(name, receipt), "images")

    async def get_queue_properties(self, **_: Any) -> SimpleNamespace:
        def read() -> SimpleNamespace:
            queue = self.queue
            return SimpleNamespace(
                approximate_message_count=len(queue.messages), metadata=queue.metadata
            )

        return await self._request(read)

    async def set_queue_metadata(self, metadata: dict[str, str]) -> None:
        await self._request(lambda: self.queue.metadata.update(metadata))

    async def peek_messages(self, _most: int) -> list[SimpleNamespace]:
        return await self._request(list)


@dataclass(slots=True)
class ContainerClient:
    """`azure.storage.blob.aio.ContainerClient`, as far as `AzureBlobs` uses it."""

    account: Account
    container_name: str
    line: Line
    options: dict[str, Any]
    credential: None = None
    url: str = "https://simulated.blob.core.windows.net/images"
    scheme: str = "https"
    primary_hostname: str = "simulated.blob.core.windows.net"
    _hook: Callable[[Any], None] = field(init=False)

    def __post_init__(self) -> None:
        self._hook = self.options["raw_request_hook"]

    @property
    def blobs(self) -> dict[str, Blob]:
        return self.account.container(self.container_name)

    async def request(
        self, method: str, act: Callable[[], Result], size: int = REQUEST_BYTES
    ) -> Result:
        self._hook(
            SimpleNamespace(http_request=SimpleNamespace(method=method, query={}))
        )

        def accepted() -> Result:
            self.account.accept()
            return act()

        return await self.line.request(size, accepted)

    def get_blob_client(self, name: str) -> BlobClient:
        return BlobClient(self, name)


@dataclass(slots=True)
class BlobClient:
    """`azure.storage.blob.aio.BlobClient`, for the shards of records and for questions."""

    container: ContainerClient
    name: str

    async def upload_blob(
        self,
        data: bytes,
        *,
        overwrite: bool = False,
        metadata: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        size = len(data)

        def put() -> None:
            container = self.container
            container.account.put(
                container.container_name, self.name, size, overwrite=overwrite
            )
            container.blobs[self.name].digest = (metadata or {}).get("digest")

        await self.container.request("PUT", put, size + REQUEST_BYTES)

    async def download_blob(self, *_: int) -> SimpleNamespace:
        return await self.container.request("GET", self._missing)

    def _missing(self) -> SimpleNamespace:
        if self.name not in self.container.blobs:
            raise refusal(404, "BlobNotFound")
        raise NotImplementedError(f"the simulation keeps no bytes of {self.name}")

    async def delete_blob(self) -> None:
        await self.container.request(
            "DELETE", lambda: self.container.blobs.pop(self.name, None)
        )

    async def create_append_blob(self, **_: Any) -> None:
        def create() -> None:
            container = self.container
            container.account.put(container.container_name, self.name, 0)
            container.blobs[self.name].content = bytearray()

        await self.container.request("PUT", create)

    async def append_block(self, data: bytes, *, appendpos_condition: int) -> None:
        def append() -> None:
            blob = self.container.blobs.get(self.name)
            if blob is None:
                raise refusal(404, "BlobNotFound")
            if blob.content is None:
                raise refusal(409, "InvalidBlobType")
            if appendpos_condition != len(blob.content):
                raise refusal(412, "AppendPositionConditionNotMet")
            blob.content += data

        size = len(data)
        if data.startswith(_GZIP):
            # Real times and random names, compressed, would make each run another.
            size = APPEND_BYTES + RECORD_BYTES * gzip.decompress(data).count(b"\n")
        await self.container.request("PUT", append, size + REQUEST_BYTES)

    async def get_blob_properties(self) -> SimpleNamespace:
        def read() -> SimpleNamespace:
            if self.name not in self.container.blobs:
                raise refusal(404, "BlobNotFound")
            blob = self.container.blobs[self.name]
            return SimpleNamespace(
                name=self.name,
                size=blob.size,
                creation_time=_SENT_AT,
                last_modified=_SENT_AT,
                metadata={} if blob.digest is None else {"digest": blob.digest},
            )

        return await self.container.request("GET", read)


def _message(stored: Stored) -> SimpleNamespace:
    return SimpleNamespace(
        id=stored.id,
        content=stored.body,
        dequeue_count=stored.deliveries,
        inserted_on=_SENT_AT,
        pop_receipt=str(stored.receipt),
    )


async def _each(items: list[SimpleNamespace]) -> AsyncIterator[SimpleNamespace]:
    for item in items:
        yield item
