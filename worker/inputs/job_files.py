"""The files that jobs name, found in folders and the storage: one object for a worker's life."""

from __future__ import annotations

from dataclasses import dataclass

from imagefleet.files.kinds import LORA
from imagefleet.signing import TrustedKeys, trusted_keys
from imagefleet.storage.open import Storage
from worker.files.library import EmbeddingLibrary, FileLibrary
from worker.files.manifest import FileHashes
from worker.inputs.reader import InputReader
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class JobFiles:
    """Libraries of LoRAs and embeddings, the reader of input images, and the files' hashes."""

    loras: FileLibrary
    embeddings: EmbeddingLibrary
    inputs: InputReader
    hashes: FileHashes
    trusted: TrustedKeys | None
    """The keys that sign jobs and lists of files; None: they need no signature."""

    @classmethod
    def of(cls, storage: Storage, settings: WorkerSettings) -> JobFiles:
        """The files of a storage and of the settings' own folders."""
        cache, cache_bytes = settings.cache, settings.cache_megabytes * 2**20
        trusted = trusted_keys(settings.trusted_key)
        return cls(
            loras=FileLibrary(
                storage.files,
                LORA,
                directory=settings.lora_directory,
                cache=cache / "loras",
                cache_bytes=cache_bytes,
                trusted=trusted,
            ),
            embeddings=EmbeddingLibrary(
                storage.files,
                directory=settings.embedding_directory,
                cache=cache / "embeddings",
                trusted=trusted,
            ),
            inputs=InputReader(
                storage.files,
                storage.blobs,
                cache=cache,
                cache_bytes=cache_bytes,
                trusted=trusted,
            ),
            hashes=FileHashes(cache),
            trusted=trusted,
        )
