"""The local storage: a folder with the queues in a SQLite file, and two folders of blobs."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from imagefleet.storage.local.blobs import LocalBlobs
from imagefleet.storage.local.queue import LocalQueue, QueueFile
from imagefleet.storage.protocol import Operations
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.settings import Priority, StorageSettings

QUEUE_FILE = "queue.sqlite"


class LocalStorage:
    """The queues and blobs of one machine. Accesses the disk on first use."""

    def __init__(self, folder: Path, names: StorageSettings) -> None:
        self.url = f"local:{folder}"
        self._file = QueueFile(folder / QUEUE_FILE)
        self.operations = Operations()

        def shard(priority: Priority, model: str | None, number: int) -> LocalQueue:
            name = names.queues_of(model, number)[priority]
            return LocalQueue(self._file, name, self.operations)

        self.poison = LocalQueue(self._file, names.poison_queue, self.operations)
        self.blobs = LocalBlobs(folder / names.container, self.operations)
        self.files = LocalBlobs(folder / names.files_container, self.operations)
        self.models = ModelQueues(shard, self.blobs)
        self.queues = self.models.default
        self.queue = self.models.all

    async def create(self) -> None:
        await self.models.create()
        await self.poison.create()
        await self.blobs.create_folder()
        await self.files.create_folder()

    async def check(self) -> None:
        for queue in (self.queue, self.poison):
            await queue.check()
        await self.blobs.check()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._file.close()
