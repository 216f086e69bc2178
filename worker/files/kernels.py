"""Compiled kernels of other workers: fetched from the storage or the image, and stored for others.

Each file is one graph's (`worker.engine.kernels.package`), created and never replaced; its name
says what it depends on, so whoever needs a graph asks for one name and lists nothing. Whatever goes
wrong is one line in the log: the worker then compiles, as it does without them.

Loading them runs code. With a trusted key, a worker takes only what that key has signed: the list
of what an operator has added, or the metadata of what another worker has stored.
"""

import asyncio
import contextlib
import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from imagefleet.concurrency import RetryPolicy
from imagefleet.errors import FleetError, MissingFileError, SetupError
from imagefleet.files import kernels
from imagefleet.files.kinds import KERNELS
from imagefleet.signing import SigningKey, TrustedKeys, trusted_keys
from imagefleet.storage.protocol import BlobRecord, BlobStore
from imagefleet.telemetry.logs import log
from worker.files.disk_cache import DiskCache, write
from worker.files.manifest import Manifest
from worker.settings import WorkerSettings

#: Fewer than for a model: without it, the worker compiles.
RETRIES = RetryPolicy(tries=3, give_up_seconds=30)

#: What a signature is for, and the blob's metadata that hold it and what `files list` shows.
_PURPOSE = "kernels"
_SIGNATURE = "signature"
_SHA256 = "sha256"
_CONTENT = "content"


@dataclass(eq=False)
class KernelExchange:
    """An `engine.kernels.packages.Exchange`: the engine's thread asks, the event loop answers."""

    _blobs: BlobStore
    #: A folder of files that came with the worker.
    _image: Path | None = None
    _trusted: TrustedKeys | None = None
    _signing: SigningKey | None = None
    shares: bool = False
    retry_policy: RetryPolicy = RETRIES
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @classmethod
    def of_worker(
        cls, settings: WorkerSettings, blobs: BlobStore, *, may_share: bool
    ) -> "KernelExchange":
        """By a worker's settings; it stores its own if it *may* and others would take them."""
        trusted = trusted_keys(settings.trusted_key)
        key_file = settings.signing_key if may_share else None
        signing = SigningKey.read(key_file) if key_file else None
        shares = may_share and (signing is not None or trusted is None)
        return cls(blobs, settings.kernels, trusted, signing, shares)

    def find(self, name: str, target: Path) -> Future[bool]:
        """Fetches a package; the answer is whether it is there."""
        return asyncio.run_coroutine_threadsafe(self._find(name, target), self._loop)

    def share(self, path: Path) -> None:
        """Stores a package for others."""
        if self.shares:
            asyncio.run_coroutine_threadsafe(self._share(path), self._loop)

    async def _find(self, name: str, target: Path) -> bool:
        try:
            return await self._copy(name, target) or await self._fetch(name, target)
        except (FleetError, OSError) as error:
            log.warning(
                f"stored kernels cannot be used: {error}", action="kernels_failed"
            )
        except Exception:  # noqa: BLE001 - logged
            log.exception("stored kernels cannot be used", action="kernels_failed")
        return False

    async def _copy(self, name: str, target: Path) -> bool:
        source = self._image and self._image / name
        if source is None or not source.exists():
            return False
        await asyncio.to_thread(lambda: _write(target, source.read_bytes()))
        log.info(f"{name} is the image's", action="kernels_fetched")
        return True

    async def _fetch(self, name: str, target: Path) -> bool:
        blob = f"{KERNELS.folder}/{name}"
        record = await self.retry_policy.call(lambda: self._blobs.record(blob))
        if record is None:
            return False
        sha256 = await self._trusted_hash(name, record)
        if sha256 is None:
            log.warning(
                f"{blob} is left out: it is not signed with the trusted key",
                action="kernels_refused",
            )
            return False
        data = await self.retry_policy.call(
            lambda: self._blobs.read(blob, KERNELS.max_bytes)
        )
        if data is None:
            return False
        if hashlib.sha256(data).hexdigest() != sha256:
            log.warning(
                f"{blob} is left out: it is damaged, its SHA-256 is not the one stated",
                action="kernels_refused",
            )
            return False
        await asyncio.to_thread(_write, target, data)
        log.info(
            f"{name} is fetched: {len(data) / 1e6:.1f} MB", action="kernels_fetched"
        )
        return True

    async def _trusted_hash(self, name: str, record: BlobRecord) -> str | None:
        """The hash that a file must have: that of the operator's list, or of a worker's own words.

        None: nobody who is trusted states one.
        """
        listed = Manifest.stored(self._blobs, KERNELS, self._trusted)
        with contextlib.suppress(MissingFileError):
            found = await self.retry_policy.call(lambda: listed.sha256(name))
            if found is not None:
                return found
        stated = record.metadata.get(_SHA256)
        signed = {"name": name, _SHA256: stated or ""}
        signature = record.metadata.get(_SIGNATURE)
        if self._trusted and not self._trusted.accept(_PURPOSE, signed, signature):
            return None
        return stated

    async def _share(self, path: Path) -> None:
        try:
            header, _ = await asyncio.to_thread(kernels.read, path)
            data = await asyncio.to_thread(path.read_bytes)
            sha256 = hashlib.sha256(data).hexdigest()
            metadata = {_SHA256: sha256, _CONTENT: f"{header.made_for}, by a worker"}
            if self._signing is not None:
                signed = {"name": path.name, _SHA256: sha256}
                metadata[_SIGNATURE] = self._signing.sign(_PURPOSE, signed)
            blob = f"{KERNELS.folder}/{path.name}"
            await self.retry_policy.call(
                lambda: self._blobs.create(
                    blob, data, "application/octet-stream", metadata
                )
            )
        except (FleetError, OSError) as error:
            log.info(f"kernels are not shared: {error}", action="kernels_not_shared")
            if isinstance(error, SetupError):
                self.shares = False
        except Exception:  # noqa: BLE001 - logged
            log.exception("kernels are not shared", action="kernels_not_shared")
        else:
            log.info(
                f"{blob} has {len(data) / 1e6:,.1f} MB, for workers with the same GPU",
                action="kernels_shared",
                bytes=len(data),
            )


def _write(target: Path, data: bytes) -> None:
    with DiskCache(target.parent).errors():
        write(target, data)
