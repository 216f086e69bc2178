"""A resumable download into a cache folder, from a URL or the storage, verified by its hash."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientResponse,
    ClientTimeout,
)
from pydantic import BaseModel
from yarl import URL

from imagefleet import concurrency, redaction
from imagefleet.errors import SetupError, TransientError
from imagefleet.files.kinds import MODEL
from imagefleet.files.safetensors import sha256_of
from imagefleet.storage.protocol import BlobPart, BlobStore
from imagefleet.telemetry import proxies
from imagefleet.telemetry.logs import Occasion, log
from worker.files.disk_cache import DiskCache
from worker.files.library import rested_blob

#: A server that sends nothing for this long is given up, and asked again.
STALL_SECONDS = 30.0

#: Large enough for the pauses between requests not to matter, small enough for any memory.
_PART_BYTES = 16 * 2**20

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

#: The format and the kind of a file are known by then.
HEAD_BYTES = 2**20

#: So much more than was ever there resets the count of tries: over a bad line, a large file takes
#: many.
PROGRESS_BYTES = 2**20


@dataclass(frozen=True)
class Opened:
    """A response: bytes from *offset* on, which may be less than was requested."""

    offset: int
    total_bytes: int | None  # None where the server does not say it
    version: str | None  # the same means the same bytes; None where the server has none
    chunks: AsyncIterator[bytes]
    #: The file's name as the server gives it; untrusted.
    file_name: str | None = None
    #: True if it goes on with the bytes that are there, of which some may come again.
    is_rest: bool = False


class FileChangedError(TransientError):
    """The file has changed since its download began, or its rest cannot be had: begin anew."""


class HttpSource:
    def __init__(self, address: str, *, requires_https: bool) -> None:
        self._url = URL(address)
        self._requires_https = requires_https
        self.label = redaction.address(address)

    @contextlib.asynccontextmanager
    async def opened(self, offset: int, version: str | None) -> AsyncIterator[Opened]:
        """Opens the file at *offset*, or at 0 if it no longer has that *version*.

        Raises TransientError, also from inside the block, or SetupError if no later try succeeds.
        """
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if version is not None:
                headers["If-Range"] = version
        timeout = ClientTimeout(total=None, sock_connect=10, sock_read=STALL_SECONDS)
        try:
            async with (
                proxies.session(timeout=timeout) as session,
                session.get(self._url, headers=headers) as response,
            ):
                yield self._answer(response, offset)
        except ClientConnectorCertificateError as error:
            raise proxies.unreachable(
                f"{self.label} cannot be fetched", error
            ) from None
        except (ClientError, TimeoutError, OSError) as error:
            # Without its cause, whose text may contain the address with its token.
            raise TransientError(
                f"the download of {self.label} broke off: {type(error).__name__}"
            ) from None

    def _answer(self, response: ClientResponse, offset: int) -> Opened:
        hops = (*response.history, response)
        if self._requires_https and any(hop.url.scheme != "https" for hop in hops):
            raise SetupError(
                f"{self.label} redirects to plain http, where the model could be changed on"
                " its way: set --model-sha256"
            )
        etag = response.headers.get("ETag", "W/")
        version = (
            response.headers.get("Last-Modified") if etag.startswith("W/") else etag
        )
        chunks = response.content.iter_chunked(2**20)
        answer = f"{self.label} answers HTTP {response.status}"
        match response.status:
            case 200 if (
                "Content-Range" not in response.headers
            ):  # all of it, whatever was asked
                disposition = response.content_disposition
                file_name = disposition.filename if disposition else None
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    # The bytes that are counted are not the file's, of which there are no parts.
                    return Opened(0, None, None, chunks, file_name)
                return Opened(0, response.content_length, version, chunks, file_name)
            case 200 | 206:
                found = _CONTENT_RANGE.fullmatch(
                    response.headers.get("Content-Range", "")
                )
                if found is not None:
                    begin = int(found[1])
                    end = int(found[2])
                    total = None if found[3] == "*" else int(found[3])
                    is_known = bool(offset) if total is None else end < total
                    # A cache's parts may begin earlier than was asked, and end earlier.
                    if begin <= offset <= end and is_known:
                        return Opened(
                            begin, total, version, chunks, is_rest=bool(offset)
                        )
                raise FileChangedError(
                    f"{answer} with another part of the file than was asked for"
                )
            case 412 | 416 if offset:  # it is another, or shorter than before
                raise FileChangedError(f"{answer}: the file has changed")
            case status if status in {408, 429} or status >= 500:  # noqa: PLR2004
                raise TransientError(answer)
        raise SetupError(f"{answer}: check the address, and its token if it has one")


class BlobSource:
    """A model's blob in the container of files."""

    def __init__(self, blobs: BlobStore, name: str) -> None:
        self._blobs = blobs
        self._blob = f"{MODEL.folder}/{name}"
        self.label = f"{self._blob} in the container {blobs.name!r}"

    @contextlib.asynccontextmanager
    async def opened(self, offset: int, version: str | None) -> AsyncIterator[Opened]:
        await asyncio.to_thread(rested_blob, self._blobs, self._blob)
        first = await self._part(offset)
        if offset and first.version != version:
            offset = 0
            first = await self._part(0)
        yield Opened(
            offset,
            first.total_bytes,
            first.version,
            self._chunks(offset, first),
            is_rest=bool(offset),
        )

    async def _chunks(self, offset: int, part: BlobPart) -> AsyncIterator[bytes]:
        version = part.version
        while part.data:
            yield part.data
            offset += len(part.data)
            if offset >= part.total_bytes:
                return
            part = await self._part(offset)
            if part.version != version:
                raise FileChangedError(f"{self.label} was replaced during its download")

    async def _part(self, offset: int) -> BlobPart:
        part = await self._blobs.read_part(self._blob, offset, _PART_BYTES)
        if part is None:
            raise SetupError(
                f"there is no {self.label}: `{MODEL.add_command}` stores it, or correct --model"
            )
        return part


Source = HttpSource | BlobSource

#: Told of the bytes so far, and of how many, where that is known.
OnProgress = Callable[[int, int | None], None]


class _State(BaseModel):
    """Identifies the download a partial file belongs to: its size, version and name."""

    total_bytes: int | None
    version: str | None
    file_name: str | None = None


@dataclass(eq=False)
class Download:
    """A file that grows to its full size as NAME.part, over broken connections and restarts.

    *copies*: how often the file's size must fit on the disk.
    *check* gets the partial file once its first `HEAD_BYTES` have arrived, and again when it is
    whole; it raises SetupError for what is not wanted, which is then removed.
    """

    cache: DiskCache
    name: str
    source: Source
    sha256: str | None
    copies: int
    check: Callable[[Path, bool], None]
    on_progress: OnProgress = lambda _so_far, _total: None
    file_name: str | None = None
    _is_head_checked: bool = False
    _furthest_bytes: int = 0
    _occasion: Occasion = field(default_factory=lambda: Occasion(seconds=10))

    def __post_init__(self) -> None:
        self.part = self.cache.folder / f"{self.name}.part"
        self._state = self.cache.folder / f"{self.name}.part.json"

    async def run(self, retry_policy: concurrency.RetryPolicy) -> None:
        """Raises SetupError if the file is another; TransientError after the last try."""
        self._furthest_bytes = self._size()
        while not await retry_policy.call(self._advance):
            pass
        self._check_content(is_whole=True)
        with self.cache.errors():
            found = await asyncio.to_thread(sha256_of, self.part)
        if self.sha256 not in {None, found}:
            self.forget()
            raise SetupError(
                f"{self.source.label} has the SHA-256 {found}, not {self.sha256} as in"
                " --model-sha256: one of the two is wrong"
            )

    def forget(self) -> None:
        """Removes the partial file, so that the next try starts anew."""
        self._is_head_checked = False
        self.cache.drop(self._state)
        self.cache.drop(self.part)

    async def _advance(self) -> bool:
        """Downloads over one connection; returns whether the file is complete."""
        size, total, version = self._resume_point()
        if size == total:
            return True
        try:
            async with self.source.opened(size, version) as opened:
                self._refuse_another(opened, total, version)
                await self._receive(opened, opened.total_bytes or total)
                return True
        except FileChangedError:
            self.forget()
            raise
        except TransientError as error:
            if self._size() - self._furthest_bytes < PROGRESS_BYTES:
                raise
            self._furthest_bytes = self._size()
            concurrency.log_retry(error)
            return False

    def _refuse_another(
        self, opened: Opened, total: int | None, version: str | None
    ) -> None:
        """Raises FileChangedError for the rest of another file than that which is there."""
        if not opened.is_rest:
            return
        is_another = opened.version not in {None, version}
        of_another_size = None not in {total, opened.total_bytes} and (
            total != opened.total_bytes
        )
        if is_another or of_another_size:
            raise FileChangedError(f"{self.source.label} was replaced meanwhile")
        if total is None and opened.total_bytes is None:
            raise FileChangedError(f"{self.source.label} does not say how large it is")

    def _resume_point(self) -> tuple[int, int | None, str | None]:
        """Bytes on the disk, of how many, and of which version."""
        try:
            state = _State.model_validate_json(self._state.read_bytes())
        except (OSError, ValueError):
            return 0, None, None
        self.file_name = state.file_name
        if state.version is None:
            return (
                0,
                None,
                None,
            )  # nothing would tell that the rest is of another version
        return self._size(), state.total_bytes, state.version

    async def _receive(self, opened: Opened, total: int | None) -> None:
        size = opened.offset
        began_at = time.monotonic()
        with self.cache.errors():
            if total is not None:
                self.cache.check_room(self.copies * total - size)
            if not opened.is_rest:
                self.part.write_bytes(b"")
                self.file_name = opened.file_name
                state = _State(
                    total_bytes=total,
                    version=opened.version,
                    file_name=opened.file_name,
                )
                self._state.write_text(state.model_dump_json(), encoding="utf-8")
            # Unbuffered: a full disk must raise here, and not once more on closing.
            file = self.part.open("r+b", buffering=0)
        with contextlib.closing(file):
            file.seek(size)
            async for chunk in opened.chunks:
                with self.cache.errors():
                    await asyncio.to_thread(_write, file, chunk)
                size += len(chunk)
                self.on_progress(size, total)
                if size >= HEAD_BYTES and not self._is_head_checked:
                    self._check_content(is_whole=False)
                bytes_per_second = (size - opened.offset) / max(
                    time.monotonic() - began_at, 1e-3
                )
                self._log_progress(size, total, bytes_per_second)
            with self.cache.errors():
                file.truncate()
        if total is not None and size > total:
            raise FileChangedError(
                f"{self.source.label} sent more than the {total:,} bytes it has"
            )
        if total not in {None, size}:
            received = size - opened.offset
            raise TransientError(
                f"{self.source.label} sent {received:,} bytes and no more over one connection:"
                f" {total - size:,} are missing"
            )

    def _check_content(self, *, is_whole: bool) -> None:
        self._is_head_checked = True
        with self.cache.errors():
            try:
                self.check(self.part, is_whole)
            except SetupError:
                self.forget()
                raise

    def _log_progress(
        self, size: int, total: int | None, bytes_per_second: float
    ) -> None:
        if not self._occasion.is_due() and size != total:
            return
        parts = (
            f"{size / 1e6:.0f} of {'?' if total is None else f'{total / 1e6:.0f}'} MB"
        )
        log.info(
            f"fetching {self.source.label}: {parts}, {bytes_per_second / 1e6:.0f} MB/s",
            action="model_progress",
            bytes=size,
            total_bytes=total,
        )

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


def _write(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
