"""The address of an Azure Storage account: a connection string, or a URL and SAS tokens."""

import base64
import re
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from azure.core.credentials import AzureSasCredential
from azure.core.credentials_async import AsyncTokenCredential
from azure.storage.blob.aio import ContainerClient
from azure.storage.queue.aio import QueueClient

from imagefleet import redaction
from imagefleet.errors import SetupError

#: `ACCOUNT.blob.core.windows.net`; other clouds and private links have other suffixes.
_HOST = re.compile(r"([a-z0-9-]{3,50})\.(?:blob|queue)\.([a-z0-9.-]+)")

_CONNECTION_STRING = re.compile(
    r"\b(AccountName|AccountKey|BlobEndpoint|UseDevelopmentStorage)=", re.IGNORECASE
)

_ENDPOINT = re.compile(r"\b((?:Blob|Queue)Endpoint)=([^;]+)", re.IGNORECASE)

_HOLDS_CREDENTIAL = re.compile(
    r"\b(AccountKey|SharedAccessSignature|UseDevelopmentStorage)=", re.IGNORECASE
)

Credential = AzureSasCredential | AsyncTokenCredential | None

_Client = TypeVar("_Client", QueueClient, ContainerClient)


class AzureAddress(NamedTuple):
    """A connection string, or the URLs of both services of an account."""

    connection_string: str | None = None
    queue_url: str = ""
    blob_url: str = ""
    sas: str | None = None

    @property
    def has_key(self) -> bool:
        """True if the connection string holds a credential; a SAS token is in `sas` as well."""
        return bool(_HOLDS_CREDENTIAL.search(self.connection_string or ""))

    def queue_client(
        self, name: str, credential: Credential, **options: Any
    ) -> QueueClient:
        """A client for one queue; *credential* overrides that of the address."""
        return self._client(QueueClient, self.queue_url, name, credential, **options)

    def container_client(
        self, name: str, credential: Credential, **options: Any
    ) -> ContainerClient:
        """A client for one container; *credential* overrides that of the address."""
        return self._client(ContainerClient, self.blob_url, name, credential, **options)

    def _client(
        self,
        kind: type[_Client],
        url: str,
        name: str,
        credential: Credential,
        **options: Any,
    ) -> _Client:
        if self.connection_string is None:
            return kind(url, name, credential, **options)
        try:
            return kind.from_connection_string(
                self.connection_string, name, credential, **options
            )
        except ValueError:  # its text may quote the key
            raise SetupError(
                "the Azure connection string is incomplete: it needs AccountName and AccountKey,"
                " or BlobEndpoint, QueueEndpoint and SharedAccessSignature"
            ) from None


def read_address(address: str) -> AzureAddress:
    """Parses an address; the SetupError for another does not quote it, as it may hold a key."""
    if _CONNECTION_STRING.search(address):
        _check_key(address)
        for kind, endpoint in _ENDPOINT.findall(address):
            try:
                redaction.check_address(endpoint)
            except ValueError as error:
                raise SetupError(f"the {kind} in the storage address {error}") from None
        sas = re.search(r"\bSharedAccessSignature=([^;\s]+)", address, re.IGNORECASE)
        return AzureAddress(
            connection_string=address, sas=sas and sas[1].removeprefix("?")
        )
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    host = _HOST.fullmatch(parts.netloc.lower())
    if parts.scheme != "https" or host is None:
        raise SetupError(
            "the storage address is not understood: write local:FOLDER, an Azure connection"
            " string, or https://ACCOUNT.blob.core.windows.net"
        )
    if parts.path.strip("/"):
        raise SetupError(
            "the URL of the storage must name only the account; set the queue and the container"
            " with --queue and --container"
        )
    account, suffix = host.groups()
    return AzureAddress(
        queue_url=f"https://{account}.queue.{suffix}",
        blob_url=f"https://{account}.blob.{suffix}",
        sas=parts.query or None,
    )


def _check_key(connection_string: str) -> None:
    """The SDK would raise binascii's error only at the first request, or quote the key."""
    found = re.search(r"\bAccountKey=([^;\s]*)", connection_string, re.IGNORECASE)
    try:
        base64.b64decode(found[1] if found else "", validate=True)
    except ValueError:
        raise SetupError(
            "the account key in the storage address is malformed: it should be base64, as Azure"
            " shows it; was it cut off?"
        ) from None
