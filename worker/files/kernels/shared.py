"""Kernels that a fleet's workers have compiled: one stores them, and the others fetch them.

They are KEY/1.tar.xz, KEY/2.tar.xz, ... in the folder of kernels, created and never replaced. Each
has what its worker found in none before it, so their order is that of use, a worker needs no
permission to list them, and of two that compile the same at once only the first adds any.

Loading them runs code: with a trusted key, only those that it has signed are fetched.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from imagefleet import concurrency, errors
from imagefleet.files.kinds import KERNELS
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage import protocol
from imagefleet.telemetry import logs
from worker.files.disk_cache import DiskCache, appearing
from worker.files.download import BlobSource, Download
from worker.files.kernels import archive
from worker.files.kernels.archive import Key

log = logs.EventLog(__name__)

#: The most archives of one key: more sizes and modes than a fleet draws.
MOST = 256

#: Numbers asked for at once; so many that the operator removed in a row hide none behind them.
_AHEAD = 4

#: What a signature is for, and the blob's metadata that hold it and what `files list` shows.
_PURPOSE = "kernels"
_SIGNATURE, _SHA256, _CONTENT = "signature", "sha256", "content"


@dataclass(eq=False)
class SharedKernels:
    """The archives of one key in the storage, and what of them is in this machine's *folder*."""

    blobs: protocol.BlobStore
    _folder: Path
    _key: Key
    _trusted: TrustedKeys | None
    retry_policy: concurrency.RetryPolicy
    _settled: set[int] = field(default_factory=set)
    """The numbers of archives that are unpacked, or refused."""
    unpacked: set[str] = field(default_factory=set)
    """The files that were unpacked, or are about to be."""

    async def fetch(self) -> bool:
        """Unpacks what has appeared since; returns whether anything has. Raises FleetError."""
        has_new = False
        # Another worker may be fetching the same.
        async with DiskCache(self._folder).fetching("kernels", seconds=-1):
            while found := await self._appeared():
                for number, record in found:
                    try:
                        has_new |= await self._take(number, record)
                    except errors.SetupError as error:
                        log.warning(
                            f"kernels of another worker are left out: {error.message}",
                            action="kernels_refused",
                        )
                    self._settled.add(number)
        return has_new

    async def get(self, name: str, sha256: str, stated_in: str) -> None:
        """Fetches and unpacks an archive; raises as `Download.run` and `archive.unpack`."""
        cache, source = (
            DiskCache(self._folder),
            BlobSource(self.blobs, name, KERNELS.folder),
        )
        found = Download(
            cache, sha256, source, sha256, 1, lambda *_: None, stated_in=stated_in
        )
        await found.run(self.retry_policy)
        try:
            await asyncio.to_thread(self.unpack, found.part, sha256)
        finally:
            found.forget()

    def unpack(self, path: Path, source: str) -> None:
        """Unpacks an archive as `archive.unpack` does, and notes the files that *source* has."""
        names = archive.unpack(path, self._folder, self._key, self.unpacked.add)
        self._note(source, names)

    async def share(self, signing: SigningKey | None) -> None:
        """Stores what no archive has, for other workers, unless no graph is among that.

        Raises a FleetError if it cannot; SetupError if the credentials do not allow it.
        """
        await self.fetch()
        while names := await asyncio.to_thread(self._new):
            number = next(self._numbers(), None)
            if number is None:
                raise errors.SetupError(
                    f"there are {MOST} archives of this key already"
                )
            with (
                DiskCache(self._folder).errors(),
                tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part") as part,
            ):
                await self._store(number, Path(part.name), names, signing)
            await self.fetch()

    def _blob(self, number: int) -> str:
        return f"{self._key.name}/{number}{archive.SUFFIX}"

    def _numbers(self) -> itertools.filterfalse[int]:
        return itertools.filterfalse(self._settled.__contains__, range(1, MOST + 1))

    async def _appeared(self) -> list[tuple[int, protocol.BlobRecord]]:
        async def record(number: int) -> protocol.BlobRecord | None:
            blob = f"{KERNELS.folder}/{self._blob(number)}"
            return await self.retry_policy.call(lambda: self.blobs.record(blob))

        numbers = list(itertools.islice(self._numbers(), _AHEAD))
        records = await concurrency.gather(*map(record, numbers))
        return [
            (number, found)
            for number, found in zip(numbers, records, strict=True)
            if found
        ]

    async def _take(self, number: int, record: protocol.BlobRecord) -> bool:
        """Fetches and unpacks an archive, if it is not here already; SetupError: it is refused."""
        sha256 = record.metadata.get(_SHA256, "")
        signed = {"name": self._blob(number), _SHA256: sha256}
        signature = record.metadata.get(_SIGNATURE)
        if self._trusted and not self._trusted.accept(_PURPOSE, signed, signature):
            raise errors.SetupError(f"{record.name} is not signed with the trusted key")
        if record.size_bytes > archive.MAX_BYTES:
            raise errors.SetupError(f"{record.name} has {record.size_bytes:,} bytes")
        if len(sha256) != hashlib.sha256().digest_size * 2 or not sha256.isalnum():
            raise errors.SetupError(f"{record.name} states no SHA-256")
        if (self._folder / f"{sha256}{archive.NOTE_SUFFIX}").exists():
            return False
        await self.get(self._blob(number), sha256, "its metadata")
        return True

    def _note(self, source: str, names: Collection[str]) -> None:
        path = self._folder / f"{source}{archive.NOTE_SUFFIX}"
        with DiskCache(self._folder).errors(), appearing(path) as part:
            part.write_text("\n".join(names))

    def _new(self) -> list[str]:
        """The files that no archive has; none of them without a new graph."""
        notes = self._folder.glob(f"*{archive.NOTE_SUFFIX}")
        stored = {name for note in notes for name in note.read_text().splitlines()}
        names = [name for name in archive.names(self._folder) if name not in stored]
        return names if _graphs(names) - _graphs(stored) else []

    async def _store(
        self, number: int, part: Path, names: list[str], signing: SigningKey | None
    ) -> None:
        """Stores an archive of *names*, unless another worker took the number meanwhile."""

        def pack() -> bytes:
            archive.pack(self._folder, self._key, part, names=names)
            return part.read_bytes()

        data = await asyncio.to_thread(pack)
        sha256 = hashlib.sha256(data).hexdigest()
        content = f"{self._key.gpu}, torch {self._key.torch}, by a worker"
        metadata = {_SHA256: sha256, _CONTENT: content}
        if signing is not None:
            signed = {"name": self._blob(number), _SHA256: sha256}
            metadata[_SIGNATURE] = signing.sign(_PURPOSE, signed)
        blob = f"{KERNELS.folder}/{self._blob(number)}"
        if await self.retry_policy.call(
            lambda: self.blobs.create(blob, data, "application/octet-stream", metadata)
        ):
            self._settled.add(number)
            self._note(sha256, names)
            log.info(
                f"{blob} has {len(names)} files, {len(data) / 1e6:,.1f} MB, for workers"
                " with the same GPU",
                action="kernels_shared",
                bytes=len(data),
            )


def _graphs(names: Collection[str]) -> set[PurePosixPath]:
    """Folders of graphs, whose files' own names are another on every machine."""
    return {PurePosixPath(name).parent for name in names if name.startswith("fxgraph/")}
