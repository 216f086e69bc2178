"""A home whose operations are counted, since Azure bills each: what an image costs beside the GPU.

Counted is what is asked of the home; a request that the home repeats by itself is one here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from imagefleet.storage import protocol, wrapped

#: Azure's answer to `depth` takes the queue's properties and a look at its front.
DEPTH_OPERATIONS = 2


@dataclass(slots=True)
class Operations:
    """Billed operations so far."""

    queue: int = 0
    blob_writes: int = 0
    blob_reads: int = 0


class MeteredQueue:
    """A job queue that counts what is asked of it."""

    def __init__(self, queue: protocol.JobQueue, operations: Operations) -> None:
        self._queue = queue
        self._operations = operations

    @property
    def name(self) -> str:
        return self._queue.name

    async def check(self) -> None:
        await self._queue.check()

    async def send(self, bodies: Iterable[str]) -> None:
        messages = list(bodies)
        self._operations.queue += len(messages)
        await self._queue.send(messages)

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        self._operations.queue += 1
        return await self._queue.receive(max_messages, lease_seconds)

    async def renew(
        self, message: protocol.LeasedMessage, lease_seconds: float
    ) -> protocol.LeasedMessage:
        self._operations.queue += 1
        return await self._queue.renew(message, lease_seconds)

    async def release(self, message: protocol.LeasedMessage, delay_seconds: float = 0) -> None:
        self._operations.queue += 1
        await self._queue.release(message, delay_seconds)

    async def delete(self, message: protocol.LeasedMessage) -> None:
        self._operations.queue += 1
        await self._queue.delete(message)

    def browse(self) -> AsyncIterator[protocol.Message]:
        self._operations.queue += 1
        return self._queue.browse()

    async def depth(self) -> protocol.QueueDepth:
        self._operations.queue += DEPTH_OPERATIONS
        return await self._queue.depth()


class MeteredBlobs:
    """A blob store that counts what is asked of it; a write that comes second is billed too."""

    def __init__(self, blobs: protocol.BlobStore, operations: Operations) -> None:
        self._blobs = blobs
        self._operations = operations

    async def create(
        self, name: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> bool:
        self._operations.blob_writes += 1
        return await self._blobs.create(name, data, content_type, metadata)

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        self._operations.blob_reads += 1
        return await self._blobs.read(name, max_bytes)

    async def delete(self, name: str) -> bool:
        return await self._blobs.delete(name)  # Azure bills no deletion

    async def read_part(self, name: str, offset: int, max_bytes: int) -> protocol.BlobPart | None:
        self._operations.blob_reads += 1
        return await self._blobs.read_part(name, offset, max_bytes)

    def names(self, prefix: str = "") -> AsyncIterator[str]:
        self._operations.blob_writes += 1  # listings are billed as writes are
        return self._blobs.names(prefix)

    def records(self, prefix: str = "") -> AsyncIterator[protocol.BlobRecord]:
        self._operations.blob_writes += 1
        return self._blobs.records(prefix)


class MeteredStorage(wrapped.WrappedStorage):
    """A home behind the two; *operations* counts on."""

    def __init__(self, storage: protocol.Storage) -> None:
        self.operations = Operations()
        super().__init__(
            storage,
            queue=MeteredQueue(storage.queue, self.operations),
            poison=MeteredQueue(storage.poison, self.operations),
            blobs=MeteredBlobs(storage.blobs, self.operations),
        )
