"""One load: a source, the queue that it fills, and the checkpoint between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from imagefleet import errors
from imagefleet.storage.open import LOCAL_SCHEME
from imagefleet.storage.protocol import Storage
from imagefleet.submit import BulkSender, Progress
from loadgen.checkpoint import Checkpoint, CheckpointFile, resume
from loadgen.settings import LoadSettings
from loadgen.sources import Source


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one load. *confirmed* counts positions of the source, earlier runs included."""

    storage: str
    queue: str
    sent: int
    confirmed: int
    total: int | None
    finished: bool
    seconds: float
    jobs_per_second: float


class Load:
    """Fills a job queue; resumes at *checkpoint_path*, if there is one and *restart* is false.

    Raises:
        SetupError: the checkpoint belongs to another load, or cannot be read.
    """

    def __init__(
        self,
        storage: Storage,
        source: Source,
        settings: LoadSettings,
        checkpoint_path: Path | None,
        *,
        restart: bool,
    ) -> None:
        self._storage = storage
        self._source = source
        self._path = checkpoint_path
        new = Checkpoint(
            source=source.identity, storage=_absolute_url(storage), queue=storage.queue.name
        )
        self._start = resume(checkpoint_path, new) if checkpoint_path and not restart else new
        #: Positions that earlier runs have sent.
        self.confirmed = self._start.confirmed
        #: Whether earlier runs have sent everything.
        self.is_done = source.count is not None and self.confirmed >= source.count
        self._sender = BulkSender(
            storage.queue,
            source.bodies(self.confirmed),
            start=self.confirmed,
            concurrency=settings.concurrency,
            rate=settings.rate,
        )

    def check(self) -> None:
        """Checks the jobs to be sent; takes a while for a long file.

        Raises:
            SetupError: a job is not valid; names its place in the file.
        """
        if not self.is_done:
            self._source.check(self.confirmed)

    def stop(self) -> None:
        """Ends `run` once the sends in flight are done."""
        self._sender.stop()

    async def run(self, on_confirmed: Callable[[int], None]) -> Summary:
        """Sends what is left to the opened storage; calls `on_confirmed` with the positions stored.

        Raises:
            FleetError: the storage cannot be used, or a job of the source is not valid.
        """
        began = time.monotonic()
        progress = Progress(self.confirmed, 0, finished=True)
        if not self.is_done:
            progress = await self._send(on_confirmed)
        seconds = time.monotonic() - began
        return Summary(
            storage=self._storage.url,
            queue=self._storage.queue.name,
            sent=progress.sent,
            confirmed=progress.confirmed,
            total=self._source.count,
            finished=progress.finished,
            seconds=round(seconds, 3),
            jobs_per_second=round(progress.sent / max(seconds, 1e-6), 1),
        )

    async def _send(self, on_confirmed: Callable[[int], None]) -> Progress:
        if self.confirmed:
            await self._check_queue_exists()
        await self._storage.create()
        if self._path is None:
            return await self._sender.run(lambda progress: on_confirmed(progress.confirmed))
        file = CheckpointFile(self._path, self._start)

        def confirm(progress: Progress) -> None:
            file.confirm(progress.confirmed)
            on_confirmed(progress.confirmed)

        file.write()  # fails before anything is sent if the path is not writable
        try:
            return await self._sender.run(confirm)
        finally:
            file.write()

    async def _check_queue_exists(self) -> None:
        try:
            await self._storage.queue.check()
        except errors.SetupError as error:
            raise errors.SetupError(
                f"according to {self._path}, {self.confirmed:,} jobs are sent, but {error.message};"
                " --restart begins with the first job"
            ) from None


def _absolute_url(storage: Storage) -> str:
    """The storage's address, the same from every directory."""
    if not storage.url.startswith(LOCAL_SCHEME):
        return storage.url
    return LOCAL_SCHEME + str(Path(storage.url.removeprefix(LOCAL_SCHEME)).absolute())
