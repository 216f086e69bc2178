"""Checkpoints that jobs name beside their own model: refiners, and those of second passes."""

import asyncio
from pathlib import Path

from imagefleet import errors
from imagefleet.files import kinds
from imagefleet.storage import protocol
from worker.files import model
from worker.files.addresses import STORE_SCHEME
from worker.files.disk_cache import SUFFIX
from worker.models import checkpoints
from worker.settings import WorkerSettings


class OtherModels:
    """Finds them by name: of the worker's own models, else of the storage; each is fetched once."""

    def __init__(self, settings: WorkerSettings, blobs: protocol.BlobStore) -> None:
        self._settings, self._blobs = settings, blobs
        self._fetched: dict[str, Path] = {}
        self._fetching = asyncio.Lock()

    async def find(self, name: str | None, own: str) -> Path | None:
        """A model's path on this machine; None for the engine's *own*.

        Raises UnusableFileError if there is none, or another kind of file, and TransientError.
        """
        if name in (None, own):
            return None
        async with self._fetching:
            if name not in self._fetched or not self._fetched[name].exists():
                self._fetched[name] = await self._fetch(name)
            return self._fetched[name]

    async def _fetch(self, name: str) -> Path:
        try:
            settings = self._settings_of(name)
            fetched = await model.fetch(settings, self._blobs, wanted=kinds.OTHER_MODEL)
        except errors.SetupError as error:
            raise errors.UnusableFileError(f"the checkpoint {name!r}: {error.message}") from error
        except errors.NodeError as error:  # whose own model is there
            raise errors.TransientError(f"the checkpoint {name!r}: {error.message}") from error
        return model.local_path(fetched)

    def _settings_of(self, name: str) -> WorkerSettings:
        for text in checkpoints.given(self._settings):
            own = self._settings.model_copy(update={"model": text})
            if "*" not in text and model.name_of(own) == name:
                return own
        stored = {"model": f"{STORE_SCHEME}{name}{SUFFIX}", "model_sha256": None, "config": None}
        return self._settings.model_copy(update=stored)
