"""The blob store on Azure Blob Storage: one Put Blob per image, which never overwrites."""

import asyncio
import base64
import hashlib
import os
from collections.abc import AsyncIterator, Collection
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote

from azure.core import MatchConditions
from azure.core.async_paging import AsyncItemPaged
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, BlobProperties, ContentSettings
from azure.storage.blob.aio import BlobClient, BlobPrefix, ContainerClient

from imagefleet import concurrency
from imagefleet.concurrency import Operation, Result
from imagefleet.storage import protocol
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.credentials import Access
from imagefleet.storage.azure.roles import ANY_PERMISSION
from imagefleet.storage.protocol import (
    BlobPart,
    BlobRecord,
    BlobStore,
    Clock,
    Metadata,
    OnDoubt,
    OnProgress,
)
from imagefleet.validation import JSONDict

#: Who asks for names mostly stops at the first.
_NAMES_PAGE = 1_000

#: Never exists: `check_blob_name` refuses this name.
_NO_BLOB = ".imagefleet-check"

#: The blob has another length, or is no append blob.
_NOT_APPENDED = {"AppendPositionConditionNotMet", "InvalidBlobType"}

#: A position beyond the end of any append blob.
_NO_POSITION = 2**50

#: The size of a block; Azure's limit of 50,000 blocks is then enough for 400 GB.
BLOCK_BYTES = 8 * 2**20

_CONCURRENT_BLOCKS = 4

#: A block's answer comes only when all of it is sent: four at once take this long at 2 Mbit/s.
_BLOCK_SECONDS = 150.0


class AzureBlobs(BlobStore):
    """The blobs of one container."""

    def __init__(
        self,
        client: ContainerClient,
        access: Access,
        clock: Clock,
    ) -> None:
        self.name = client.container_name
        self.clock = clock
        self._client = client
        self._address = client.url.partition("?")[0]
        self._access = access
        self._call = access.call

    async def create_container(self) -> None:
        await self._found("", self._client.create_container, {"ContainerAlreadyExists"})

    async def container_metadata(self) -> Metadata:
        """Of the container itself, which takes the account's key; raises SetupError."""
        found = await self._call("", self._client.get_container_properties)
        return dict(found.metadata or {})

    async def check(self) -> None:
        async def request() -> None:
            # By a blob that does not exist: a container's SAS token may not read the properties of
            # the container itself, and the error code would be that of Azure's firewall.
            with azure_errors.tolerated(self._not_there):
                with azure_errors.tolerated(azure_errors.LESS_PERMISSION):
                    await self._client.get_blob_client(_NO_BLOB).get_blob_properties()
                await self._may_create()

        await self._call(ANY_PERMISSION, request)

    async def create(
        self,
        name: str,
        data: bytes,
        content_type: str,
        metadata: Metadata,
        on_doubt: OnDoubt = lambda: None,
    ) -> bool:
        blob = self._blob(name)
        protocol.check_metadata(metadata)
        # Its default is If-None-Match: *.
        request = partial(blob.upload_blob, data, **_properties(content_type, metadata))
        return await self._create(request, on_doubt)

    async def upload(
        self,
        name: str,
        file: Path,
        content_type: str,
        metadata: Metadata,
        on_progress: OnProgress = lambda _: None,
    ) -> bool:
        """Uploads blocks, of which a commit makes the blob; Azure removes others after a week."""
        blob = self._blob(name)
        protocol.check_metadata(metadata)
        if await self.record(name) is not None:
            return False
        earlier = azure_errors.LESS_PERMISSION
        lists = await self._found(
            "c", lambda: blob.get_block_list("uncommitted"), earlier
        )
        there = {block.id for block in lists[1]} if lists else set()
        stored_bytes = 0

        async def send(number: int) -> None:
            nonlocal stored_bytes
            ids[number], data = await asyncio.to_thread(_block, source, number)
            if ids[number] not in there:
                stage = partial(
                    blob.stage_block, ids[number], data, read_timeout=_BLOCK_SECONDS
                )
                await self._call("c", stage)
            stored_bytes += len(data)
            on_progress(stored_bytes)

        with await asyncio.to_thread(file.open, "rb") as source:
            ids = [""] * -(-os.fstat(source.fileno()).st_size // BLOCK_BYTES)
            await concurrency.for_each(range(len(ids)), send, _CONCURRENT_BLOCKS)
        commit = partial(
            blob.commit_block_list,
            [BlobBlock(block_id=each) for each in ids],
            match_condition=MatchConditions.IfMissing,  # If-None-Match: *
            **_properties(content_type, metadata),
        )
        return await self._create(commit)

    async def replace(
        self, name: str, data: bytes, content_type: str, version: str | None
    ) -> bool:
        if version is None:
            return await self.create(name, data, content_type, {})
        write = partial(self._blob(name).upload_blob, data, **_over(version))
        request = partial(write, **_properties(content_type, {}))
        return await self._found("w", request, {"ConditionNotMet"}) is not None

    async def append(self, name: str, data: bytes, position: int) -> bool:
        blob = self._blob(name)
        if position == 0:
            # The name may be taken by an earlier call whose append failed.
            condition = MatchConditions.IfMissing
            await self._create(
                lambda: blob.create_append_blob(match_condition=condition)
            )

        async def request(is_in_doubt: bool) -> bool:
            with azure_errors.tolerated(_NOT_APPENDED | {"BlobNotFound"}):
                await blob.append_block(data, appendpos_condition=position)
                return True
            return is_in_doubt

        return await self._access.call_in_doubt("a", request)

    async def exists(self, name: str) -> bool:
        blob = self._blob(name)

        async def request() -> bool:
            # Appends to no blob; the refusal tells whether there is one.
            with azure_errors.tolerated(_NOT_APPENDED):
                await blob.append_block(b"\n", appendpos_condition=_NO_POSITION)
            return True

        return await self._found("a", request) is not None

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        blob = self._blob(name)

        async def request() -> bytes:
            # Fetches only the first part (32 MiB), with which comes the size.
            download = await blob.download_blob()
            protocol.check_blob_size(name, download.size, max_bytes)
            return await download.readall()

        return await self._found("r", request)

    async def record(self, name: str) -> BlobRecord | None:
        blob = await self._found("r", self._blob(name).get_blob_properties)
        return None if blob is None else _record(blob)

    async def delete(self, name: str) -> bool:
        blob = self._blob(name)

        async def request() -> bool:
            with azure_errors.tolerated({"BlobNotFound"}):
                await blob.delete_blob()
            return True

        return await self._found("d", request, azure_errors.LESS_PERMISSION) is not None

    async def read_part(
        self, name: str, offset: int, max_bytes: int
    ) -> BlobPart | None:
        blob = self._blob(name)

        async def request() -> BlobPart:
            with azure_errors.tolerated({"InvalidRange"}):  # the offset is past its end
                download = await blob.download_blob(offset, max_bytes)
                found = download.properties
                total_bytes = int(str(found.content_range).rpartition("/")[2])
                return BlobPart(await download.readall(), total_bytes, found.etag)
            properties = await blob.get_blob_properties()
            return BlobPart(b"", properties.size, properties.etag)

        return await self._found("r", request)

    def address(self, name: str) -> str:
        return f"{self._address}/{quote(name, safe='~/')}"

    async def names(self, prefix: str = "") -> AsyncIterator[str]:
        listing = self._client.list_blob_names(
            name_starts_with=prefix, results_per_page=_NAMES_PAGE
        )
        async for name in self._listed(listing):
            yield name

    async def records(self, prefix: str = "") -> AsyncIterator[BlobRecord]:
        listing = self._client.list_blobs(name_starts_with=prefix, include=["metadata"])
        async for blob in self._listed(listing):
            yield _record(blob)

    async def folders(self, prefix: str) -> AsyncIterator[str]:
        listing = self._client.walk_blobs(name_starts_with=prefix, delimiter="/")
        async for found in self._listed(listing):
            if isinstance(found, BlobPrefix):
                yield found.name.removeprefix(prefix).removesuffix("/")

    async def _listed(self, listing: AsyncItemPaged[Any]) -> AsyncIterator[Any]:
        """Items of a listing; each page, of 5,000 unless it asks for fewer, is a request."""
        marker: str | None = ""
        while marker is not None:
            found, marker = await self._call("l", partial(_page, listing, marker))
            for item in found:
                yield item

    @property
    def _not_there(self) -> Collection[str]:
        """The error codes that say that there is no blob."""
        return {"BlobNotFound", *(azure_errors.MISSING if self.may_be_missing else ())}

    def _blob(self, name: str) -> BlobClient:
        protocol.check_blob_name(name)
        return self._client.get_blob_client(name)

    async def _may_create(self) -> bool:
        """True if the credentials allow creating blobs; creates none."""
        with azure_errors.tolerated(azure_errors.LESS_PERMISSION):
            with azure_errors.tolerated({"ConditionNotMet"}):
                # An ETag that no blob has.
                await self._client.get_blob_client(_NO_BLOB).upload_blob(
                    b"", **_over('"0x0"')
                )
            return True
        return False

    async def _create(
        self,
        request: Operation[object],
        on_doubt: OnDoubt = lambda: None,
    ) -> bool:
        """Calls *request*, which creates a blob; False if its name is taken.

        Taken after an attempt whose reply was lost: that attempt counts as what created it.
        """

        async def create(is_in_doubt: bool) -> bool:
            try:
                # The SDK raises the same exception for every conflict: only these codes mean that
                # the blob exists, perhaps from an attempt whose reply was lost.
                with azure_errors.tolerated(azure_errors.TAKEN):
                    await request()
                    return True
            except HttpResponseError as error:
                # Not Azure's answer, whose roles and tokens need moments to reach all its servers.
                if (
                    not azure_errors.is_azurites_overwrite(error)
                    or not await self._may_create()
                ):
                    raise
            if is_in_doubt:
                on_doubt()
            return is_in_doubt

        return await self._access.call_in_doubt("c", create)

    async def _found(
        self,
        permission: str,
        request: Operation[Result],
        codes: Collection[str] = (),
    ) -> Result | None:
        """Awaits *request*; None if there is no blob, or for one of the error *codes*."""

        async def tolerant() -> Result | None:
            with azure_errors.tolerated({*self._not_there, *codes}):
                return await request()
            return None

        return await self._call(permission, tolerant)


async def _page(
    listing: AsyncItemPaged[Any], marker: str
) -> tuple[list[Any], str | None]:
    """The page of a listing that begins at *marker*, and where the next one does."""
    pages: Any = listing.by_page(marker or None)
    found = [item async for item in await anext(pages)]
    if not pages.service_endpoint:  # the SDK takes a proxy's page for an empty listing
        raise azure_errors.ReplyLostError(azure_errors.not_of_azure("the container"))
    return found, pages.continuation_token


def _record(blob: BlobProperties) -> BlobRecord:
    return BlobRecord(
        blob.name,
        blob.size,
        blob.creation_time,
        dict(blob.metadata or {}),
        blob.last_modified,
    )


def _over(etag: str) -> JSONDict:
    """Overwrites a blob that has this ETag, and no other."""
    return {
        "overwrite": True,
        "etag": etag,
        "match_condition": MatchConditions.IfNotModified,
    }


def _properties(content_type: str, metadata: Metadata) -> JSONDict:
    settings = ContentSettings(content_type=content_type)
    return {"content_settings": settings, "metadata": dict(metadata)}


def _block(file: BufferedReader, number: int) -> tuple[str, bytes]:
    """A block's id and content.

    The id is the content's hash, so that a repeated upload sends what is missing, and blocks of two
    versions of a file are never mixed.
    """
    data = os.pread(file.fileno(), BLOCK_BYTES, number * BLOCK_BYTES)
    # With its number: the same content may occur twice.
    digest = hashlib.sha256(number.to_bytes(4) + data).digest()
    return base64.urlsafe_b64encode(digest).decode(), data
