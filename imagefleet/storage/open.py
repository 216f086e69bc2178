"""Opens the storage that an address names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from imagefleet import errors, retry
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

LOCAL_SCHEME = "local:"


def open_storage(
    settings: StorageSettings,
    retry_policy: retry.RetryPolicy = retry.DEFAULT,
    *,
    identity_token: Callable[[], Awaitable[str]] | None = None,
) -> Storage:
    """The storage that `settings.storage` names, to be entered with `async with`.

    *retry_policy* is for storage behind a network. *identity_token* fetches the identity token (a
    JSON Web Token) for the broker at `settings.broker_url`. Nothing connects before its first use.

    Raises:
        SetupError: the address is not valid, or lacks credentials.
    """
    address = settings.storage.strip()
    if address.startswith(LOCAL_SCHEME):
        from imagefleet.storage.local.storage import LocalStorage

        folder = address.removeprefix(LOCAL_SCHEME)
        if not folder:
            raise errors.SetupError("the storage 'local:' lacks a folder; write local:FOLDER")
        return LocalStorage(Path(folder).expanduser(), settings)
    # Azure's libraries are slow to import.
    from imagefleet.storage.azure.storage import AzureStorage

    return AzureStorage(settings, retry_policy, identity_token=identity_token)


def absolute_url(storage: Storage) -> str:
    """The storage's address without secrets, the same from every directory."""
    if not storage.url.startswith(LOCAL_SCHEME):
        return storage.url
    return LOCAL_SCHEME + str(Path(storage.url.removeprefix(LOCAL_SCHEME)).absolute())
