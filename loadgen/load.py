"""One load: a source, the queue that it fills, and its progress in a checkpoint file."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import AwareDatetime, BaseModel, Field, ValidationError

from imagefleet import concurrency, errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.records.record import RecordLog
from imagefleet.storage import enqueue
from imagefleet.storage.open import Storage, absolute_url
from imagefleet.storage.settings import Priority
from imagefleet.submit import BulkSender, Progress, keep_noting
from loadgen.campaigns import LoadedCampaigns, Sample
from loadgen.caption_sweep import SweepSource
from loadgen.processes import Refusals, SenderProcesses
from loadgen.settings import MOST_BATCHES, LoadSettings
from loadgen.sources import Source

#: What was sent since is sent again after a kill; replacing a file takes as long as ten sends.
POSITIONS_BETWEEN_CHECKPOINTS = 256
SECONDS_BETWEEN_CHECKPOINTS = 0.05


class Checkpoint(BaseModel, extra="forbid", frozen=True):
    """One load of one source into one queue; `confirmed` counts the positions that are stored."""

    source: str
    storage: str
    queue: str
    confirmed: int = Field(default=0, ge=0)
    sample_key: str = ""
    """Chooses the jobs that are drawn twice; random, so that a worker does not know them."""
    id: str = ""
    """Names the load across restarts, so that its jobs are counted once."""
    sent: dict[str, int] = Field(default_factory=dict)
    """The jobs at the confirmed positions, by campaign."""
    cancelled: dict[str, AwareDatetime] | None = None
    """The cancellations of before the load; later ones are of it."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The checkpoint, or None without a file; raises SetupError for any other file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.SetupError(f"{path} cannot be read: {error.strerror}") from None
        except ValidationError:
            raise errors.SetupError(
                f"{path} is not a valid checkpoint; --restart begins with the first job"
            ) from None

    def write(self, path: Path) -> None:
        """Replaces the file atomically; raises SetupError if it cannot be written."""
        # Not synced: after a power cut, the queue's last messages may be gone, too.
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            written.write_text(self.model_dump_json() + "\n", encoding="utf-8")
            written.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
            raise errors.SetupError(
                f"the checkpoint {path} cannot be written: {error.strerror};"
                " choose another path with --state FILE"
            ) from None


def default_path(source: Path, queue: str) -> Path:
    return source.with_name(f".{source.name}.{queue}.checkpoint.json")


def resume(path: Path, new: Checkpoint) -> Checkpoint:
    """The checkpoint in the file, or *new*; raises SetupError if it is of another load."""
    found = Checkpoint.read(path)
    if found is None:
        return new
    for field, difference in {
        "storage": f"a load into another storage ({found.storage})",
        "queue": f"a load into another queue ({found.queue})",
        "source": "another load: the file has changed since, or the seed or campaign is different",
    }.items():
        if getattr(found, field) != getattr(new, field):
            raise errors.SetupError(
                f"{path} is the checkpoint of {difference}, {found.confirmed:,} jobs sent;"
                " --restart discards it and begins with the first job, --state FILE keeps both"
            )
    random = {"sample_key": found.sample_key or new.sample_key, "id": found.id or new.id}
    return found.model_copy(update=random)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one load. *confirmed* counts positions of the source, earlier runs included."""

    storage: str
    queue: str
    """The queue of jobs without a model."""
    queues: Mapping[str, int]
    """Messages that were sent, by their queue: that of their job's model."""
    sent: int
    confirmed: int
    total: int | None
    finished: bool
    seconds: float
    jobs_per_second: float
    second_drawings: int
    """Messages in addition to the jobs (`--verify-share`)."""
    cancelled: Mapping[str, int]
    """Jobs that were not sent, by campaign: it was cancelled during the load."""
    refusals: int
    """How often the storage has asked to slow down."""


class Load:
    """Fills a job queue; resumes at *checkpoint_path*, unless *restart*, or raises SetupError."""

    def __init__(
        self,
        storage: Storage,
        source: Source | SweepSource,
        settings: LoadSettings,
        checkpoint_path: Path | None,
        *,
        restart: bool,
        on_notice: Callable[[str], None] = lambda _: None,
        priority: Priority = "normal",
        models: Collection[str] = (),
        refusals: Refusals | None = None,
        shards: int | None = None,
    ) -> None:
        """*on_notice* is told what to show; *models* are what workers have from elsewhere."""
        self._storage = storage
        self._queue = storage.queues[priority]
        self._shards = shards
        self._source = source
        self._path = checkpoint_path
        new = Checkpoint(
            source=source.identity,
            storage=absolute_url(storage),
            queue=self._queue.name,
            sample_key=secrets.token_hex(16),
            id=secrets.token_hex(8),
        )
        self._start = resume(checkpoint_path, new) if checkpoint_path and not restart else new
        #: Positions that earlier runs have sent.
        self.confirmed = self._written = self._start.confirmed
        self._written_at = 0.0
        #: Whether earlier runs have sent everything.
        self.is_done = source.count is not None and self.confirmed >= source.count
        self._on_notice = on_notice
        self._unreadable: list[str] = []
        self._is_said = False
        self._cancelled = CancelledCampaigns(
            storage.files, storage.queue.name, self._unreadable.append
        )
        self._campaigns = LoadedCampaigns(
            self._cancelled,
            RecordLog(storage.blobs, "load"),
            self._start.id,
            on_notice,
            self._start.cancelled or {},
            Counter(self._start.sent),
        )
        self.refusals = refusals or Refusals()
        left = None if source.count is None else source.count - self.confirmed
        count = settings.processes_for(left)
        self._processes = (
            SenderProcesses(settings, priority, count, self.refusals) if count > 1 else None
        )
        signer = settings.keys().signer(storage.scope)
        sample = Sample(settings.second_drawings, self._start.sample_key, signer)
        send = self._processes.send if self._processes else None
        self._to = enqueue.JobSender(storage, priority, elsewhere=models, send=send)
        self._sender = BulkSender(
            self._to,
            self._campaigns.wanted(
                source.bodies(self.confirmed),
                self.confirmed,
                getattr(source, "campaign", None),
                source.count,
            ),
            start=self.confirmed,
            concurrency=min(settings.concurrency * count, MOST_BATCHES),
            rate=settings.rate,
            second_drawing=sample.second_drawing,
        )

    def check(self) -> None:
        """Raises SetupError for invalid jobs, with their places; slow for a long file."""
        if not self.is_done:
            self._source.check(self.confirmed)

    def stop(self) -> None:
        self._sender.stop()

    async def run(self, on_confirmed: Callable[[int], None]) -> Summary:
        """Sends what is left, or raises FleetError; *on_confirmed* gets the positions stored."""
        began = time.monotonic()
        progress = Progress(self.confirmed, 0, finished=True)
        try:
            if self._shards is not None:
                await self._storage.create()
                await self._storage.models.set_shards(self._shards)
                self._on_notice(f"shards that jobs are sent to from now on: {self._shards}")
            if not self.is_done:
                progress = await self._send(on_confirmed)
        except errors.FleetError:
            await self._campaigns.note()
            raise
        await self._campaigns.note()
        seconds = time.monotonic() - began
        return Summary(
            storage=self._storage.url,
            queue=self._queue.name,
            queues=dict(self._to.sent_to.most_common()),
            sent=progress.sent,
            confirmed=progress.confirmed,
            total=self._source.count,
            finished=progress.finished,
            seconds=round(seconds, 3),
            jobs_per_second=round(progress.sent / max(seconds, 1e-6), 1),
            second_drawings=progress.second_drawings,
            cancelled=dict(self._campaigns.left_out),
            refusals=self.refusals.count,
        )

    async def _send(self, on_confirmed: Callable[[int], None]) -> Progress:
        try:
            if self.confirmed:
                await self._queue.check()
        except errors.SetupError as error:
            raise errors.SetupError(
                f"according to {self._path}, {self.confirmed:,} jobs are sent, but {error.message};"
                " --restart begins with the first job"
            ) from None
        await self._storage.create()
        await self._cancelled.refresh()
        if self._start.cancelled is None:
            known = dict(self._cancelled.times)
            self._start = self._start.model_copy(update={"cancelled": known})
            self._campaigns.known = known

        def confirm(progress: Progress) -> None:
            self._campaigns.confirm(progress.confirmed)
            # Not before something is sent: what cannot be sent has an error of its own.
            if self._unreadable and not self._is_said:
                self._is_said = True
                self._on_notice(f"cancelled campaigns are not noticed: {self._unreadable[0]}")
            self._unreadable.clear()
            if (
                progress.confirmed - self._written >= POSITIONS_BETWEEN_CHECKPOINTS
                or time.monotonic() - self._written_at >= SECONDS_BETWEEN_CHECKPOINTS
            ):
                self._write_checkpoint(progress.confirmed)
            on_confirmed(progress.confirmed)

        # Fails before anything is sent, if the path is not writable.
        self._write_checkpoint(self.confirmed)
        watching = self._cancelled.watch(lambda: True)
        async with (
            concurrency.beside(watching, keep_noting(self._campaigns.note)),
            self._processes or contextlib.nullcontext(),
        ):
            try:
                return await self._sender.run(confirm)
            finally:
                self._write_checkpoint(self._sender.progress.confirmed)

    def _write_checkpoint(self, confirmed: int) -> None:
        if self._path is not None:
            changes = {"confirmed": confirmed, "sent": dict(self._campaigns.sent)}
            self._start.model_copy(update=changes).write(self._path)
            self._written, self._written_at = confirmed, time.monotonic()
