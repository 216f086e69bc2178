"""Where jobs and images live: an address chooses the home."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from imagefleet import errors, retry
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

LOCAL_SCHEME = "local:"


def open_storage(
    settings: StorageSettings,
    retries: retry.RetryPolicy = retry.DEFAULT,
    *,
    identity_token: Callable[[], Awaitable[str]] | None = None,
) -> Storage:
    """The home that `settings.storage` names, to be entered with `async with`.

    *retries* is for the homes behind a network; *proof* gives the proof of identity (a JSON Web
    Token) that the broker of `settings.broker_url` wants. Nothing is created or asked before it
    is used.

    Raises:
        SetupError: it is no address, or one without the credentials that it needs.
    """
    address = settings.storage.strip()
    if address.startswith(LOCAL_SCHEME):
        from imagefleet.storage.local.storage import LocalStorage

        folder = address.removeprefix(LOCAL_SCHEME)
        if not folder:
            raise errors.SetupError("the storage 'local:' names no folder; write local:FOLDER")
        return LocalStorage(Path(folder).expanduser(), settings)
    # Only those who use Azure wait for its libraries to load.
    from imagefleet.storage.azure.storage import AzureStorage

    return AzureStorage(settings, retries, identity_token=identity_token)
