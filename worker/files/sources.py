"""Sources to fetch a file from: a URL, or the storage. Both can resume in the middle."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from imagefleet import errors, redaction
from imagefleet.files.kinds import BY_FOLDER, MODEL
from imagefleet.storage import protocol

#: A server that sends nothing for this long is given up, and asked again.
STALL_SECONDS = 30.0

_CONNECT_SECONDS = 10.0

_CHUNK_BYTES = 2**20

#: Large enough for the pauses between requests not to matter, small enough for any memory.
_PART_BYTES = 16 * 2**20

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class Opened:
    """A response: bytes from *offset* on, which may be 0 although more was requested.

    The same *version* means the same bytes; None where the server has none.
    """

    offset: int
    total_bytes: int | None
    version: str | None
    chunks: AsyncIterator[bytes]
    file_name: str | None = None
    """The file's name as the server gives it; untrusted."""


class FileChangedError(errors.TransientError):
    """The file has changed since its download began."""


class HttpSource:
    """A file at an http or https URL."""

    def __init__(self, address: str, *, requires_https: bool) -> None:
        """*requires_https* refuses redirects to plain http."""
        self._url = URL(address)
        self._requires_https = requires_https
        self.label = redaction.address(address)

    @contextlib.asynccontextmanager
    async def opened(self, offset: int, version: str | None) -> AsyncIterator[Opened]:
        """Opens the file at *offset*, or at 0 if it no longer has that *version*.

        Raises:
            TransientError: a later try may succeed, also from inside the block; SetupError: none
            will.
        """
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if version is not None:
                headers["If-Range"] = version
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=STALL_SECONDS
        )
        through_proxy = bool(urllib.request.getproxies_environment())
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=through_proxy) as session,
                session.get(self._url, headers=headers) as response,
            ):
                yield self._answer(response, offset)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Without its cause, whose text may contain the address with its token.
            raise errors.TransientError(
                f"the download of {self.label} broke off: {type(error).__name__}"
            ) from None

    def _answer(self, response: aiohttp.ClientResponse, offset: int) -> Opened:
        hops = (*response.history, response)
        if self._requires_https and any(hop.url.scheme != "https" for hop in hops):
            raise errors.SetupError(
                f"{self.label} redirects to plain http, where the model could be changed on"
                " its way: set --model-sha256"
            )
        etag = response.headers.get("ETag", "W/")
        version = response.headers.get("Last-Modified") if etag.startswith("W/") else etag
        chunks = response.content.iter_chunked(_CHUNK_BYTES)
        answer = f"{self.label} answers HTTP {response.status}"
        match response.status:
            case 200:  # all of it, whatever was requested
                disposition = response.content_disposition
                file_name = disposition.filename if disposition else None
                return Opened(0, response.content_length, version, chunks, file_name)
            case 206:
                found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if not found or int(found[1]) != offset:
                    raise errors.TransientError(f"{answer} with another part of the file")
                return Opened(offset, int(found[2]), version, chunks)
            case 416:  # Range Not Satisfiable: it is shorter than before
                raise FileChangedError(f"{answer}: the file has changed")
            case status if status in {408, 429} or status >= 500:  # noqa: PLR2004
                raise errors.TransientError(answer)
        raise errors.SetupError(f"{answer}: check the address, and its token if it has one")


class BlobSource:
    """The blob FOLDER/NAME in the container of files."""

    def __init__(self, blobs: protocol.BlobStore, name: str, folder: str = MODEL.folder) -> None:
        self._blobs = blobs
        self._folder = folder
        self._blob = f"{folder}/{name}"
        self.label = f"{self._blob} in the container {blobs.name!r}"

    @contextlib.asynccontextmanager
    async def opened(self, offset: int, version: str | None) -> AsyncIterator[Opened]:
        """Opens the file as `HttpSource.opened` does."""
        first = await self._part(offset)
        if offset and first.version != version:
            offset, first = 0, await self._part(0)
        yield Opened(offset, first.total_bytes, first.version, self._chunks(offset, first))

    async def _chunks(self, offset: int, part: protocol.BlobPart) -> AsyncIterator[bytes]:
        version = part.version
        while part.data:
            yield part.data
            offset += len(part.data)
            if offset >= part.total_bytes:
                return
            part = await self._part(offset)
            if part.version != version:
                raise FileChangedError(f"{self.label} was replaced during its download")

    async def _part(self, offset: int) -> protocol.BlobPart:
        part = await self._blobs.read_part(self._blob, offset, _PART_BYTES)
        if part is None:
            raise errors.SetupError(
                f"there is no {self.label}: `{BY_FOLDER[self._folder].add_command}` stores it"
                + (", or correct --model" if self._folder == MODEL.folder else "")
            )
        return part


Source = HttpSource | BlobSource
