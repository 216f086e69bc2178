"""The files that workers have of their own, and the hashes of models, as lists show them."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError

from imagefleet.errors import SetupError
from imagefleet.files.kinds import MODEL
from imagefleet.job.prompt import is_safe_name
from imagefleet.storage.open import Storage

#: Seconds for which the lists are believed: each model costs a read or two.
_READ_SECONDS = 30.0

_MANIFEST = f"{MODEL.folder}/manifest.json"
_MAX_MANIFEST_BYTES = 2**24

_SHA256 = re.compile("[0-9a-f]{64}")
_Hashes = dict[str, str]


class _Held(BaseModel):
    """What a worker tells of its own files."""

    hash: Annotated[str, StringConstraints(pattern="^[0-9a-f]{10}$")] | None = None
    loras: list[str] = []


class _Signed(BaseModel):
    """A signed list of models; one that is plain has the hashes alone."""

    files: _Hashes


_LISTED: TypeAdapter[_Signed | _Hashes] = TypeAdapter(_Signed | _Hashes)


class HeldFiles:
    """Hashes of models, and LoRAs in folders of workers, who are strangers."""

    def __init__(self, storage: Storage) -> None:
        #: Hashes of models by their names: ten characters, or the whole SHA-256.
        self.hashes: dict[str, str] = {}
        self.loras: set[str] = set()
        self._storage = storage
        self._read_at = -_READ_SECONDS
        self._reading = asyncio.Lock()

    async def refresh(self, served: Iterable[str]) -> None:
        """Reads what the workers of the *served* models tell; raises TransientError."""
        async with self._reading:
            if time.monotonic() - self._read_at < _READ_SECONDS:
                return
            self.hashes = {}
            self.loras = set()
            for model in served:
                self._add_held(model, await self._storage.models.held_now(model))
            files = self._storage.files
            with contextlib.suppress(SetupError):  # no access to the list
                data = await files.read(_MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
                self._add_manifest(data or b"")
            self._read_at = time.monotonic()

    def _add_held(self, model: str, data: bytes) -> None:
        # Names that are no UTF-8 in the worker's folder fail pydantic's own reading of JSON.
        with contextlib.suppress(ValueError, RecursionError):
            held = _Held.model_validate(json.loads(data))
            self.loras.update(filter(is_safe_name, held.loras))
            if held.hash is not None:
                self.hashes[model] = held.hash

    def _add_manifest(self, data: bytes) -> None:
        with contextlib.suppress(ValidationError):
            listed = _LISTED.validate_json(data)
            files = listed.files if isinstance(listed, _Signed) else listed
            for name, sha256 in files.items():
                if _SHA256.fullmatch(sha256):
                    self.hashes[MODEL.stem(name)] = sha256
