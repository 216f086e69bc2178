"""The storage, and how the one is opened that an address names."""

import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.signing import JobSigner, Scope
from imagefleet.storage import parts
from imagefleet.storage.local.blobs import LocalBlobs
from imagefleet.storage.local.queue import LocalQueue, QueueFile
from imagefleet.storage.protocol import Operations
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.settings import (
    LOCAL_SCHEME,
    Priority,
    SignerSettings,
    StorageSettings,
)

QUEUE_FILE = "queue.sqlite"

#: Names the storage in signatures, wherever its folder is; no queue or container has a dot.
FLEET_FILE = "fleet.id"


#: The protocol of every storage, for those who open one.
Storage = parts.Storage


class LocalStorage(Storage):
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
