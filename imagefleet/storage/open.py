"""The storage, and how the one is opened that an address names."""

import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.signing import JobSigner, Scope
from imagefleet.storage.local.blobs import LocalBlobs
from imagefleet.storage.local.queue import LocalQueue, QueueFile
from imagefleet.storage.proofs import Proofs, Prover
from imagefleet.storage.protocol import BlobStore, JobQueue, Operations, StoredQueue
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.storage.settings import (
    LOCAL_SCHEME,
    Priority,
    SignerSettings,
    StorageSettings,
)

QUEUE_FILE = "queue.sqlite"

#: Names the storage in signatures, wherever its folder is; no queue or container has a dot.
FLEET_FILE = "fleet.id"


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
    #: The operations of this object so far.
    operations: Operations

    @property
    def poison(self) -> JobQueue: ...

    @property
    def blobs(self) -> BlobStore:
        """The images, and what else workers store."""

    @property
    def packs(self) -> BlobStore:
        """The images of bundles of jobs: a file holds many, and none is overwritten or deleted."""

    @property
    def files(self) -> BlobStore:
        """LoRAs and models, which workers only read."""

    @property
    def prover(self) -> Prover | None:
        """Proves what this machine stores; None without a broker's key."""

    async def proofs(self) -> Proofs | None:
        """Tells whose names are proven; None in a fleet without a broker, where none are."""

    async def create(self) -> None:
        """Creates the queues and the containers if they do not exist."""

    async def check(self) -> None:
        """Raises SetupError without a queue or the images; the files are the workers' alone."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class LocalStorage:
    """The queues and blobs of one machine. Accesses the disk on first use."""

    prover = None

    def __init__(self, folder: Path, names: StorageSettings) -> None:
        self.url = f"local:{folder}"
        self.settings = names
        self._file = QueueFile(folder / QUEUE_FILE)
        self.operations = Operations()

        def queue(priority: Priority, model: str | None) -> LocalQueue:
            name = names.queues_of(model)[priority]
            return LocalQueue(self._file, name, self.operations)

        self.poison = LocalQueue(self._file, names.poison_queue, self.operations)
        self.blobs = LocalBlobs(folder / names.container, self.operations)
        self.packs = LocalBlobs(folder / names.packs_container, self.operations)
        self.files = LocalBlobs(folder / names.files_container, self.operations)
        self.models = ModelQueues(queue, self.blobs)
        self.queues = self.models.default
        self.queue = self.models.all
        self.scope = Scope(
            lambda: f"{_fleet_id(folder)}/{names.container}",
            names.queue,
            self.blobs.clock.now,
        )

    async def proofs(self) -> None:
        return None

    async def create(self) -> None:
        await self.models.create()
        await self.poison.create()
        await self.blobs.create_folder()
        await self.packs.create_folder()
        await self.files.create_folder()

    async def check(self) -> None:
        for part in (self.queue, self.poison, self.blobs):
            await part.check()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._file.close()


def _fleet_id(folder: Path) -> str:
    """The id of a local storage, which the first one makes who asks for it."""
    path = folder / FLEET_FILE
    try:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="ascii")
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{uuid.uuid4().hex}")
        draft.write_text(uuid.uuid4().hex, encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        return path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}") from None


def signer_of(settings: SignerSettings) -> JobSigner | None:
    """The signer of jobs for the storage of *settings*; None if they have no signing key."""
    keys = settings.keys()
    return None if keys.signing is None else keys.signer(open_storage(settings).scope)


def open_storage(
    settings: StorageSettings,
    retry_policy: concurrency.RetryPolicy = concurrency.DEFAULT,
    *,
    identity_token: Callable[[], Awaitable[str]] | None = None,
) -> Storage:
    """The storage that `settings.storage` names, to be entered with `async with`.

    *retry_policy* is for storage behind a network. *identity_token* fetches the identity token (a
    JSON Web Token) for the broker at `settings.broker_url`. Nothing connects before its first use.
    Raises SetupError if the address is not valid, or lacks credentials.
    """
    if settings.storage.strip() == LOCAL_SCHEME:
        raise SetupError("the storage 'local:' lacks a folder; write local:FOLDER")
    if settings.local_folder is not None:
        return LocalStorage(settings.local_folder, settings)
    # Azure's libraries are slow to import.
    from imagefleet.storage.azure.storage import AzureStorage

    return AzureStorage(settings, retry_policy, identity_token=identity_token)


def absolute_url(storage: Storage) -> str:
    """The storage's address without secrets, the same from every directory."""
    folder = storage.settings.local_folder
    return storage.url if folder is None else f"{LOCAL_SCHEME}{folder.absolute()}"
