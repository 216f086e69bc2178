"""LoRAs, which prompts name with tags."""

from __future__ import annotations

from pathlib import Path

from imagefleet.files.kinds import LORA
from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from worker.files.library import FileLibrary, own_folder
from worker.files.manifest import Manifest


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
        super().__init__(
            blobs,
            LORA,
            Manifest.stored(blobs, LORA.folder, trusted),
            folders=[own_folder(LORA, directory)] if directory else [],
            cache=cache,
            cache_bytes=cache_bytes,
        )
