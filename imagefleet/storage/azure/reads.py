"""Reads parts of blobs, and lists blobs, in a third and a tenth of the SDK's CPU time."""

from __future__ import annotations

import functools
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree as ET

from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import ContainerClient

from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.signed import SignedRequests
from imagefleet.storage.protocol import BlobPart, BlobRecord, Operations

_OK, _PARTIAL_CONTENT = 200, 206

#: Most blobs of a listing were changed in the same few seconds as others.
_moment = functools.lru_cache(maxsize=1_000)(parsedate_to_datetime)


class Page(NamedTuple):
    """Some of a listing, and where the next page begins; empty behind the last one."""

    blobs: list[BlobRecord]
    folders: list[str]
    marker: str


class BlobReads:
    """The reads of the container of *client*; errors are those of the SDK and of aiohttp."""

    def __init__(
        self,
        client: ContainerClient,
        transport: AioHttpTransport,
        api_version: str,
        operations: Operations,
    ) -> None:
        self._url, _, self._token = client.url.partition("?")
        self._what = f"the container {client.container_name!r}"
        self._requests = SignedRequests(client.credential, transport, api_version)
        self._operations = operations

    async def part(self, name: str, offset: int, max_bytes: int) -> BlobPart:
        """What a blob has from *offset* on; Azure refuses one past its end as InvalidRange."""
        url = f"{self._url}/{quote(name, safe='~/')}{self._token and '?'}{self._token}"
        asked = {"x-ms-range": f"bytes={offset}-{offset + max_bytes - 1}"}
        signed = await self._requests.sign("GET", url, asked)
        self._operations.blob_reads += 1
        headers, data = await self._requests.send("GET", signed, _PARTIAL_CONTENT)
        sent, _, size = headers.get("Content-Range", "").rpartition("/")
        total = int(size) if size.isdecimal() else 0
        if not sent.startswith(f"bytes {offset}-") or len(data) != min(max_bytes, total - offset):
            raise azure_errors.ReplyLostError(
                f"{self._what} sent another part of {name!r} than was asked for"
            )
        return BlobPart(data, total, headers.get("ETag", ""))

    async def page(self, prefix: str, marker: str, **parameters: str) -> Page:
        """A page of the blobs whose names begin with *prefix*, by Azure's *parameters*."""
        asked = {"restype": "container", "comp": "list", "prefix": prefix, "marker": marker}
        query = urlencode({**asked, **parameters}, quote_via=quote)
        url = f"{self._url}?{query}{self._token and '&'}{self._token}"
        signed = await self._requests.sign("GET", url, {})
        self._operations.blob_writes += 1  # as Azure bills it
        _, answer = await self._requests.send("GET", signed, _OK)
        found = ET.fromstring(answer)  # noqa: S314 - Azure's
        if found.tag != "EnumerationResults":
            raise azure_errors.ReplyLostError(azure_errors.not_of_azure(self._what))
        return Page(
            list(map(_record, found.iterfind("Blobs/Blob"))),
            [_name(each) for each in found.iterfind("Blobs/BlobPrefix")],
            found.findtext("NextMarker") or "",
        )


def _record(blob: ET.Element) -> BlobRecord:
    facts = {each.tag: each.text or "" for each in blob.find("Properties") or ()}
    return BlobRecord(
        _name(blob),
        int(facts["Content-Length"]),
        _moment(facts["Creation-Time"]),
        {each.tag: each.text or "" for each in blob.find("Metadata") or ()},
        _moment(facts["Last-Modified"]),
    )


def _name(listed: ET.Element) -> str:
    name = listed.findtext("Name") or ""
    return unquote(name) if listed.find("Name[@Encoded='true']") is not None else name
