"""The blob store on Azure Blob Storage: one Put Blob a picture, refused where the name is taken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from azure.core.exceptions import HttpResponseError
from azure.storage.blob import ContentSettings
from azure.storage.blob.aio import ContainerClient

from imagefleet import retry
from imagefleet.storage import protocol
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.credentials import Access

#: The name is taken, so the picture is there. The second is what a token that may only create gets
#: to hear, where one that may also write hears the first.
TAKEN = frozenset({"BlobAlreadyExists", "UnauthorizedBlobOverwrite"})

_NAMES_PAGE = 1_000

#: The most that Azure lists in one answer: who asks for records reads them all.
_RECORDS_PAGE = 5_000

#: The name of no blob: `check_blob_name` refuses it.
_NO_BLOB = ".imagefleet-check"

_Result = TypeVar("_Result")


class AzureBlobs:
    """The blobs of one container."""

    def __init__(self, client: ContainerClient, retries: retry.RetryPolicy, access: Access) -> None:
        self._client = client
        self._retries = retries
        self._access = access

    async def create_container(self) -> None:
        """Creates the container unless it is there."""

        async def request() -> None:
            with azure_errors.tolerated({"ContainerAlreadyExists"}):
                await self._client.create_container()

        await self._call(request)

    async def check(self) -> None:
        """Raises SetupError if the container does not exist or the credentials are wrong."""
        # Asks for a blob that is not there: no container's token may read the properties of the
        # container itself, and Azure answers with the very error code of its firewall.
        await self._call(lambda: self._is_there(_NO_BLOB))

    async def create(
        self, name: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> bool:
        protocol.check_blob_name(name)
        protocol.check_metadata(metadata)

        async def request() -> bool:
            try:
                # Every other conflict is the same exception of the SDK's: only the code tells
                # 'done'. It also answers the repetition of a try whose answer was lost.
                with azure_errors.tolerated(TAKEN):
                    await self._client.upload_blob(
                        name,
                        data,
                        overwrite=False,  # If-None-Match: *
                        content_settings=ContentSettings(content_type=content_type),
                        metadata=dict(metadata),
                    )
                    return True
            except HttpResponseError as error:
                # Azurite's answer to a token without `w` where the name is taken, too.
                refused = azure_errors.code_of(error) in azure_errors.LESS_PERMISSION
                if not refused or not await self._is_there(name):
                    raise
            return False

        return await self._call(request)

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        protocol.check_blob_name(name)

        async def request() -> bytes | None:
            with azure_errors.tolerated({"BlobNotFound"}):
                # Asks for a first part alone (32 MiB), and learns the size with it.
                download = await self._client.download_blob(name)
                protocol.check_blob_size(name, download.size, max_bytes)
                return await download.readall()
            return None

        return await self._call(request)

    async def delete(self, name: str) -> bool:
        protocol.check_blob_name(name)

        async def request() -> bool:
            with azure_errors.tolerated(azure_errors.LESS_PERMISSION):
                with azure_errors.tolerated({"BlobNotFound"}):
                    await self._client.delete_blob(name)
                return True
            return False

        return await self._call(request)

    async def read_part(self, name: str, offset: int, max_bytes: int) -> protocol.BlobPart | None:
        protocol.check_blob_name(name)

        async def request() -> protocol.BlobPart | None:
            with azure_errors.tolerated({"BlobNotFound"}):
                with azure_errors.tolerated({"InvalidRange"}):  # it ends before the offset
                    part = await self._client.download_blob(name, offset=offset, length=max_bytes)
                    # The size that the SDK tells is the part's.
                    total = int((part.properties.content_range or "").rpartition("/")[2])
                    return protocol.BlobPart(await part.readall(), total, part.properties.etag)
                facts = await self._client.get_blob_client(name).get_blob_properties()
                return protocol.BlobPart(b"", facts.size, facts.etag)
            return None

        return await self._call(request)

    async def names(self, prefix: str = "") -> AsyncIterator[str]:
        blobs = self._client.list_blob_names(
            name_starts_with=prefix or None, results_per_page=_NAMES_PAGE
        )
        pages = aiter(blobs.by_page())
        while (page := await self._call(lambda: anext(pages, None))) is not None:
            async for name in page:
                yield name

    async def records(self, prefix: str = "") -> AsyncIterator[protocol.BlobRecord]:
        blobs = self._client.list_blobs(
            name_starts_with=prefix or None, include=["metadata"], results_per_page=_RECORDS_PAGE
        )
        pages = aiter(blobs.by_page())
        while (page := await self._call(lambda: anext(pages, None))) is not None:
            async for blob in page:
                yield protocol.BlobRecord(
                    blob.name, blob.size, blob.creation_time, dict(blob.metadata or {})
                )

    async def _is_there(self, name: str) -> bool:
        """Whether there is such a blob; no, where the credentials may not read it."""
        with azure_errors.tolerated({"BlobNotFound", *azure_errors.LESS_PERMISSION}):
            await self._client.get_blob_client(name).get_blob_properties()
            return True
        return False

    async def _call(self, request: Callable[[], Awaitable[_Result]]) -> _Result:
        what = f"the container {self._client.container_name!r}"
        return await self._retries.call(lambda: self._access.attempt(what, request))
