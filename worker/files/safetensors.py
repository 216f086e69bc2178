"""Checks of a LoRA's bytes before anything else reads them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from io import BufferedReader, BytesIO

from imagefleet import errors

#: A manifest is read again after this time; a replaced LoRA is fetched again by then.
MANIFEST_SECONDS = 300.0

#: The format's own limit. Without one, eight stray bytes could ask for all memory.
_MAX_HEADER_BYTES = 100_000_000

#: What reading JSON of an unexpected shape may raise.
_MALFORMED = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, RecursionError),
)


class Manifest:
    """The SHA-256 of LoRAs by name, `{"name": "sha256"}`; empty where there is no file."""

    def __init__(self, where: str, read: Callable[[], Awaitable[bytes | None]]) -> None:
        self._where = where
        self._read = read
        self._hashes: dict[str, str] = {}
        self._read_at: float | None = None

    async def sha256(self, name: str) -> str | None:
        """The hash that the file must have, or None where any will do.

        Raises:
            TransientError: the manifest cannot be read or is not valid.
        """
        if self._read_at is None or time.monotonic() - self._read_at > MANIFEST_SECONDS:
            content = await self._read() or b"{}"
            try:
                hashes = json.loads(content)
                self._hashes = {str(key): value.lower() for key, value in hashes.items()}
            except _MALFORMED as error:
                # It may be half-written; going on without it would mean to trust any file.
                raise errors.TransientError(
                    f'{self._where} is not a JSON manifest, {{"name": "sha256", ...}}: {error}'
                ) from error
            self._read_at = time.monotonic()
        return self._hashes.get(name)

    def forget(self) -> None:
        """Reads it again the next time: it and a file disagree, and one of them is old."""
        self._read_at = None


def check_content(name: str, file: BufferedReader | BytesIO, size: int, sha256: str | None) -> None:
    """Checks that a LoRA is complete and matches the manifest.

    Raises:
        TransientError: it is truncated, or has another hash.
        UnusableFileError: it is not a safetensors file.
    """
    expected = _expected_bytes(name, file)
    if expected is None or size < expected:
        raise errors.TransientError(
            f"the LoRA {name}.safetensors is truncated: it has {size:,} bytes"
            + (f" of {expected:,}" if expected else "")
        )
    if sha256 is None:
        return
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        raise errors.TransientError(
            f"the SHA-256 of the LoRA {name}.safetensors is not the one in its manifest.json"
        )


def _expected_bytes(name: str, file: BufferedReader | BytesIO) -> int | None:
    """The file's size according to its header, or None if not even the header is complete."""
    start = file.read(8)
    if len(start) < 8:  # noqa: PLR2004 - the header's length
        return None
    header_bytes = int.from_bytes(start, "little")
    header = file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b"too long"
    if header[:1] in {b"", b"{"} and len(header) < header_bytes:
        return None
    try:
        entries: dict[str, dict[str, list[int]]] = json.loads(header)
        ends = [entry["data_offsets"][1] for key, entry in entries.items() if key[:2] != "__"]
        return int(8 + header_bytes + max(ends, default=0))
    except _MALFORMED as error:
        raise errors.UnusableFileError(
            f"the LoRA {name}.safetensors is not a safetensors file"
        ) from error
