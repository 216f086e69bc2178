"""An Azure storage account's address: a connection string, or a URL and SAS tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from azure.core.credentials import AzureSasCredential
from azure.core.credentials_async import AsyncTokenCredential
from azure.storage.blob.aio import ContainerClient
from azure.storage.queue.aio import QueueClient

from imagefleet import errors

#: `ACCOUNT.blob.core.windows.net`; other clouds and private links have other suffixes.
_HOST = re.compile(r"([a-z0-9-]{3,50})\.(?:blob|queue)\.([a-z0-9.-]+)")

_CONNECTION_STRING = re.compile(
    r"\b(AccountName|AccountKey|BlobEndpoint|UseDevelopmentStorage)=", re.IGNORECASE
)

_SECRET_OF_ITS_OWN = re.compile(
    r"\b(AccountKey|SharedAccessSignature|UseDevelopmentStorage)=", re.IGNORECASE
)

Credential = AzureSasCredential | AsyncTokenCredential | None

_Client = TypeVar("_Client", QueueClient, ContainerClient)


@dataclass(frozen=True, slots=True)
class AzureAddress:
    """What the SDK's clients are made from: a connection string, or both URLs of an account."""

    connection_string: str | None = None
    queue_url: str = ""
    blob_url: str = ""
    sas: str | None = None

    @property
    def has_key(self) -> bool:
        """Whether it lets its bearer in by itself; a URL's SAS token is `sas`."""
        return bool(_SECRET_OF_ITS_OWN.search(self.connection_string or ""))

    def queue_client(self, name: str, credential: Credential, **options: Any) -> QueueClient:
        """A client of one queue; *credential* goes before what the address itself brings."""
        return self._client(QueueClient, self.queue_url, name, credential, options)

    def container_client(
        self, name: str, credential: Credential, **options: Any
    ) -> ContainerClient:
        """A client of one container; *credential* goes before what the address itself brings."""
        return self._client(ContainerClient, self.blob_url, name, credential, options)

    def _client(
        self,
        kind: type[_Client],
        url: str,
        name: str,
        credential: Credential,
        options: Mapping[str, Any],
    ) -> _Client:
        if self.connection_string is None:
            return kind(url, name, credential, **options)
        try:
            return kind.from_connection_string(self.connection_string, name, credential, **options)
        except ValueError:  # its text may quote what it was given, key and all
            raise errors.SetupError(
                "the Azure connection string is incomplete: it needs AccountName and AccountKey,"
                " or BlobEndpoint, QueueEndpoint and SharedAccessSignature"
            ) from None


def read_address(address: str) -> AzureAddress:
    """Reads an account's address; either service's URL gives the other's.

    Raises:
        SetupError: it is none. The message does not quote it: it may hold a key.
    """
    if _CONNECTION_STRING.search(address):
        return AzureAddress(connection_string=address)
    parts = urlsplit(address)
    host = _HOST.fullmatch(parts.netloc.lower())
    if parts.scheme != "https" or host is None:
        raise errors.SetupError(
            "the storage's address is not understood: write local:FOLDER, an Azure connection"
            " string, or https://ACCOUNT.blob.core.windows.net"
        )
    if parts.path.strip("/"):
        raise errors.SetupError(
            "the storage's address ends with the account; the names of the queue and the container"
            " are settings of their own"
        )
    account, suffix = host.groups()
    return AzureAddress(
        queue_url=f"https://{account}.queue.{suffix}",
        blob_url=f"https://{account}.blob.{suffix}",
        sas=parts.query or None,
    )
