"""A home behind other queues and blobs than its own, which forward to these and add something."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from imagefleet.storage import protocol


class WrappedStorage:
    """Opens, creates and checks *home*; what is asked of its parts goes through the given ones."""

    def __init__(
        self,
        storage: protocol.Storage,
        *,
        queue: protocol.JobQueue,
        poison: protocol.JobQueue,
        blobs: protocol.BlobStore,
    ) -> None:
        self.queue = queue
        self.poison = poison
        self.blobs = blobs
        self._storage = storage

    @property
    def url(self) -> str:
        return self._storage.url

    async def create(self) -> None:
        await self._storage.create()

    async def check(self) -> None:
        await self._storage.check()

    async def __aenter__(self) -> Self:
        await self._storage.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._storage.__aexit__(error_type, error, traceback)
