"""Small JSON blobs that several commands change: read, changed, and stored if nobody else was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from imagefleet import concurrency, errors
from imagefleet.storage.protocol import BlobPart, BlobStore

#: Others who change a blob in the same moment, before it is given up.
_TRIES = 10


async def edit(
    files: BlobStore, name: str, changed: Callable[[BlobPart | None], bytes | None], max_bytes: int
) -> None:
    """Stores what *changed* makes of a blob, or of None without one; nothing where it is None.

    It is called again where somebody else was faster. Raises TransientError if others keep on.
    """
    for _ in range(_TRIES):
        part = await files.read_part(name, 0, max_bytes)
        data = changed(part)
        version = None if part is None else part.version
        if data is None or await files.replace(name, data, "application/json", version):
            return
        await asyncio.sleep(concurrency.jitter(0.2))
    raise errors.TransientError(
        f"{name} is being changed by others: run the same command again in a moment"
    )
