"""Uploads a file of any size to Azure as blocks that only their commit makes a blob.

A block's id is its content's hash, so that a repeated upload sends what is missing, and blocks of
two versions of a file are never mixed. Azure removes blocks without a commit after a week.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from azure.core import MatchConditions
from azure.storage.blob import BlobBlock, ContentSettings
from azure.storage.blob.aio import BlobClient

from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.refusals import LESS_PERMISSION

#: The size of a block; Azure's limit of 50,000 blocks is then enough for 400 GB.
BLOCK_BYTES = 8 * 2**20

_CONCURRENT_BLOCKS = 4

#: A block's answer comes only when all of it is sent: four at once take this long at 2 Mbit/s.
_BLOCK_SECONDS = 150.0


class BlockUpload:
    """The upload of one file to one blob that does not exist; *call* retries a request."""

    def __init__(
        self,
        client: BlobClient,
        file: Path,
        call: Callable[[Callable[[], Awaitable[bool]]], Awaitable[bool]],
        on_progress: Callable[[int], None],
    ) -> None:
        self._client = client
        self._file = file
        self._call = call
        self._on_progress = on_progress
        self._stored_bytes = 0
        self._there: set[str] = set()
        self._ids: list[str] = []

    async def send(self) -> None:
        """Stores what is missing; `commit` makes it a blob."""
        await self._call(self._find_blocks)
        blocks = _blocks(self._file)
        running: set[asyncio.Task[None]] = set()
        try:
            while (block := await asyncio.to_thread(next, blocks, None)) is not None:
                self._ids.append(block[0])
                if len(running) == _CONCURRENT_BLOCKS:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                running.add(asyncio.create_task(self._send(*block)))
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def commit(self, content_type: str, metadata: Mapping[str, str]) -> None:
        """One request, which fails if the name is taken."""
        await self._client.commit_block_list(
            [BlobBlock(block_id=each) for each in self._ids],
            content_settings=ContentSettings(content_type=content_type),
            metadata=dict(metadata),
            match_condition=MatchConditions.IfMissing,  # If-None-Match: *
        )

    async def _find_blocks(self) -> bool:
        """Blocks of an earlier attempt."""
        with azure_errors.tolerated({"BlobNotFound", *LESS_PERMISSION}):
            _, uncommitted = await self._client.get_block_list("uncommitted")
            self._there = {each.id for each in uncommitted}
        return bool(self._there)

    async def _send(self, name: str, data: bytes) -> None:
        async def request() -> bool:
            await self._client.stage_block(
                name, data, length=len(data), read_timeout=_BLOCK_SECONDS
            )
            return True

        if name not in self._there:
            await self._call(request)
        self._stored_bytes += len(data)
        self._on_progress(self._stored_bytes)


def _blocks(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each block's id and content."""
    with path.open("rb") as file:
        number = 0
        while data := file.read(BLOCK_BYTES):
            # With its number: the same content may occur twice.
            digest = hashlib.sha256(number.to_bytes(4) + data).digest()
            yield base64.urlsafe_b64encode(digest).decode(), data
            number += 1
