"""One load, whole: a source, the queue that it fills, and the checkpoint between them."""

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
from loadgen.sources import Source


@dataclass(frozen=True, slots=True)
class Summary:
    """What one load did. *confirmed* counts positions of the source, earlier runs included."""

    storage: str
    queue: str
    sent: int
    confirmed: int
    total: int | None
    finished: bool
    seconds: float
    jobs_per_second: float


class Load:
    """Fills the job queue of *home*, going on where the checkpoint at *place* says.

    Raises:
        SetupError: the checkpoint is about another load, or cannot be read.
    """

    def __init__(
        self,
        storage: Storage,
        source: Source,
        *,
        place: Path | None,
        restart: bool,
        concurrency: int,
        rate: float | None,
    ) -> None:
        self._storage = storage
        self._source = source
        self._place = place
        wanted = Checkpoint(
            source=source.identity, storage=_whereabouts(storage), queue=storage.queue.name
        )
        self._begun = wanted if place is None or restart else resume(place, wanted)
        self._sender = BulkSender(
            storage.queue,
            source.bodies(self.confirmed),
            start=self.confirmed,
            concurrency=concurrency,
            rate=rate,
        )

    @property
    def confirmed(self) -> int:
        """Positions that earlier runs have sent."""
        return self._begun.confirmed

    @property
    def is_done(self) -> bool:
        """Whether earlier runs have sent everything."""
        return self._source.count is not None and self.confirmed >= self._source.count

    def check(self) -> None:
        """Looks for invalid jobs among those to be sent; takes a while for a long file.

        Raises:
            SetupError: naming the place in the file.
        """
        if not self.is_done:
            self._source.check(self.confirmed)

    def stop(self) -> None:
        """Ends `run` as soon as the sends in flight are done."""
        self._sender.stop()

    async def run(self, on_confirmed: Callable[[int], None]) -> Summary:
        """Sends what is left; the home is open. `on_confirmed` hears of the positions stored.

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
            await self._check_that_the_queue_still_is_there()
        await self._storage.create()
        kept = CheckpointFile(self._place, self._begun) if self._place else None
        if kept is None:
            return await self._sender.run(lambda progress: on_confirmed(progress.confirmed))

        def confirm(progress: Progress) -> None:
            kept.confirm(progress.confirmed)
            on_confirmed(progress.confirmed)

        kept.write()  # a place that cannot be written to shows before anything is sent
        try:
            return await self._sender.run(confirm)
        finally:
            kept.write()

    async def _check_that_the_queue_still_is_there(self) -> None:
        try:
            await self._storage.queue.check()
        except errors.SetupError as error:
            raise errors.SetupError(
                f"{self._place} says that {self.confirmed:,} jobs are sent, but {error.message};"
                " --restart begins with the first job"
            ) from None


def _whereabouts(storage: Storage) -> str:
    """The home's address, the same from every directory."""
    if not storage.url.startswith(LOCAL_SCHEME):
        return storage.url
    return LOCAL_SCHEME + str(Path(storage.url.removeprefix(LOCAL_SCHEME)).absolute())
