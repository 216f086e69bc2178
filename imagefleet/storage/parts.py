"""The protocol of a whole storage: its queues and containers, and how they are made and checked."""

from collections.abc import Mapping
from typing import Protocol, Self

from imagefleet.signing import Scope
from imagefleet.storage.proofs import Proofs, Prover
from imagefleet.storage.protocol import BlobStore, Operations, StoredQueue
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.storage.settings import Priority, StorageSettings


class Storage(Protocol):
    """The job queues, their poison queue, the images, and the files that workers read."""

    #: The address without secrets, for messages.
    url: str
    settings: StorageSettings
    #: The fleet and queue that jobs of this storage are signed for.
    scope: Scope
    #: All job queues as one, by priority; it sends to that of normal priority.
    queue: RoutedQueue
    #: The queue of each priority of jobs without a model.
    queues: Mapping[Priority, StoredQueue]
    #: The queues of jobs that name a model; what sends jobs to the right ones.
    models: ModelQueues
    poison: StoredQueue
    #: The images, and what else workers store.
    blobs: BlobStore
    #: The images of bundles of jobs: a file holds many, and none is overwritten or deleted.
    packs: BlobStore
    #: LoRAs and models, which workers only read.
    files: BlobStore
    #: The operations of this object so far.
    operations: Operations

    @property
    def prover(self) -> Prover | None:
        """Proves what this machine stores; None without a broker's key."""

    async def proofs(self) -> Proofs | None:
        """Tells whose names are proven; None in a fleet without a broker, where none are."""

    async def create(self) -> None:
        """Creates the queues and containers that do not exist, if the credentials allow it."""
        if await self.models.create():
            await self.poison.create()
            for blobs in (self.blobs, self.packs, self.files):
                await blobs.create_container()

    async def check(self) -> None:
        """Raises SetupError without a queue or the images; the files are the workers' alone."""
        for part in (self.queue, self.poison, self.blobs):
            await part.check()

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
