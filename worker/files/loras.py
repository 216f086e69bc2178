"""LoRAs, which prompts name with tags."""

from __future__ import annotations

from pathlib import Path

from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from worker.files import manifest
from worker.files.library import FileKind, FileLibrary, own_folder
from worker.files.manifest import Manifest

#: The largest LoRA file: it is checked in memory before it is stored, and eight may arrive at once.
MAX_BYTES = 2**30


class LoraLibrary(FileLibrary):
    """The LoRAs of a folder, and of `loras/` in the storage."""

    def __init__(
        self,
        blobs: protocol.BlobStore,
        *,
        directory: Path | None,
        cache: Path,
        cache_bytes: int,
        trusted: TrustedKeys | None = None,
    ) -> None:
        """*directory* comes before the storage, whose files one of the *trusted* keys must list."""
        kind = FileKind("LoRA", manifest.LORAS, MAX_BYTES)
        super().__init__(
            blobs,
            kind,
            Manifest.stored(blobs, manifest.LORAS, trusted),
            folders=[own_folder(kind, directory)] if directory else [],
            cache=cache,
            cache_bytes=cache_bytes,
        )
