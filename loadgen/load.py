"""One load: a source, the queue that it fills, and its progress in a checkpoint file."""

import contextlib
import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

from pydantic import AwareDatetime, BaseModel, Field

from imagefleet import concurrency, errors, validation
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.message import job_key
from imagefleet.records.ledger import Ledgers, job_of
from imagefleet.storage import enqueue
from imagefleet.storage.open import Storage, absolute_url
from imagefleet.storage.settings import Priority
from imagefleet.submit import BulkSender, Progress, keep_noting
from loadgen.campaigns import FileJobs, LoadedCampaigns, Sample, jobs_of, shown
from loadgen.caption_sweep import SweepSource
from loadgen.file_source import FileSource
from loadgen.settings import LoadSettings
from loadgen.sources import Source

#: Ids of changed jobs that are named.
_NAMED = 3

#: Changed jobs that are replaced together.
_REPLACED_AT_ONCE = 32

#: Called with the storage, the messages that take the place of others, and by name *only_check*.
Replace = Callable[..., Awaitable[None]]


class Checkpoint(BaseModel, extra="forbid", frozen=True):
    """One load of one source into one queue."""

    confirmed: int = Field(default=0, ge=0)
    """Positions of which all messages are stored."""
    noted: int = Field(default=0, ge=0)
    """Positions of which all jobs are in the ledgers."""
    source: str
    ids: str = ""
    """Basis of the ids of jobs: the identity of the source, or of its content at the first load."""
    storage: str
    queue: str
    sample_key: str = ""
    """Chooses the jobs that are drawn twice; random, so that a worker does not know them."""
    cancelled: dict[str, AwareDatetime] | None = None
    """The cancellations of before the load; later ones are of it."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The checkpoint, or None without a file; raises SetupError for any other file."""
        otherwise = "is not a valid checkpoint; --restart begins with the first job"
        return validation.read_file(cls, path, otherwise)

    def write(self, path: Path) -> None:
        """Replaces the file atomically; raises SetupError if it cannot be written."""
        # Not synced: after a power cut, the queue's last messages may be gone, too.
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            counts = _counts(self.confirmed, self.noted)
            rest = self.model_dump_json(exclude={"confirmed", "noted"})
            written.write_bytes(counts + rest.removeprefix("{").encode() + b"\n")
            written.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
            raise _unwritable(path, error) from None


def _counts(confirmed: int, noted: int) -> bytes:
    """First bytes of a checkpoint's JSON, of the same length whatever the counts."""
    return f'{{"confirmed":{confirmed:20},"noted":{noted:20},'.encode()


def _unwritable(path: Path, error: OSError) -> errors.SetupError:
    return errors.SetupError(
        f"the checkpoint {path} cannot be written: {error.strerror};"
        " choose another path with --state FILE"
    )


class Refusals:
    """Counts requests that the storage was too busy for; they are made again, more slowly."""

    def __init__(self) -> None:
        self.count = 0
        self.policy = dataclasses.replace(concurrency.PATIENT, on_retry=self._note)

    def _note(self, error: errors.TransientError) -> None:
        self.count += isinstance(error, errors.BusyError)
        concurrency.log_retry(error)


def default_path(source: Path, queue: str) -> Path:
    return source.with_name(f".{source.name}.{queue}.checkpoint.json")


def resume(path: Path, new: Checkpoint, *, may_change: bool = False) -> Checkpoint:
    """The checkpoint in the file, or *new*; raises SetupError if it is of another load.

    A source that *may_change* begins anew with the ids that it had.
    """
    found = Checkpoint.read(path)
    if found is None:
        return new
    for field, difference in {
        "storage": f"a load into another storage ({found.storage})",
        "queue": f"a load into another queue ({found.queue})",
        "source": "another load: the file has changed since, or the seed or campaign is different",
    }.items():
        if getattr(found, field) == getattr(new, field):
            continue
        if field != "source" or not may_change:
            raise errors.SetupError(
                f"{path} is the checkpoint of {difference}, jobs sent: {found.confirmed:,};"
                " --restart discards it and begins with the first job, --state FILE keeps both"
            )
    kept = {
        "sample_key": found.sample_key or new.sample_key,
        "ids": found.ids or found.source,
    }
    return (found if found.source == new.source else new).model_copy(update=kept)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one load. *confirmed* counts positions of the source, earlier runs included."""

    storage: str
    queue: str
    """The queue of jobs without a model."""
    queues: Mapping[str, int]
    """Messages that were sent, by their queue: that of their job's model."""
    sent: int
    new: int
    changed: int
    as_before: int
    """Jobs that were sent before; they are sent again with `--restart` alone."""
    confirmed: int
    total: int
    finished: bool
    seconds: float
    jobs_per_second: float
    second_drawings: int
    """Messages in addition to the jobs (`--verify-share`)."""
    cancelled: Mapping[str, int]
    """Jobs that were not sent, by campaign: it was cancelled during the load."""
    refusals: int
    """Number of times that the storage has asked to slow down."""


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
        new_only: bool = False,
        replace: Replace | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
        priority: Priority = "normal",
        models: Collection[str] = (),
        refusals: Refusals | None = None,
    ) -> None:
        """*on_notice*: called with notices. *models*: those that workers have from elsewhere.

        Jobs that were sent with another content are refused; *new_only* leaves them out, and
        *replace* sends them.
        """
        self._storage = storage
        self._queue = storage.queues[priority]
        self._source = source
        self._path = checkpoint_path
        new = Checkpoint(
            source=source.identity,
            ids=source.identity,
            storage=absolute_url(storage),
            queue=self._queue.name,
            sample_key=secrets.token_hex(16),
        )
        self._start = new
        if checkpoint_path:
            may_change = isinstance(source, FileSource)
            if not restart:
                self._start = resume(checkpoint_path, new, may_change=may_change)
            elif may_change:
                with contextlib.suppress(
                    errors.SetupError
                ):  # --restart takes any file's place
                    if found := Checkpoint.read(checkpoint_path):
                        self._start = new.model_copy(
                            update={"ids": found.ids or new.ids}
                        )
        if isinstance(source, FileSource):
            source.ids = self._start.ids
        #: Positions that earlier runs have sent.
        self.confirmed = self._start.confirmed
        self._file: FileIO | None = None
        #: Whether earlier runs have sent everything.
        self.is_done = self.confirmed >= source.count
        self._on_notice = on_notice
        self._replace, self._new_only = replace, new_only
        self._jobs: FileJobs | None = None
        self._replaced = 0
        self._is_compared = False
        self._unreadable: list[str] = []
        self._is_said = False
        self._cancelled = CancelledCampaigns(
            storage.files, storage.queue.name, self._unreadable.append
        )
        self._ledgers = Ledgers(storage)
        self._campaigns = LoadedCampaigns(
            self._cancelled,
            self._ledgers,
            on_notice,
            self._start.cancelled or {},
            only=getattr(source, "campaign", None),
            total=source.count,
            sends_again=restart,
            skips_changed=new_only,
        )
        self.refusals = refusals or Refusals()
        signer = settings.keys().signer(storage.scope)
        sample = Sample(settings.second_drawings, self._start.sample_key, signer)
        self._to = enqueue.JobSender(storage, priority, elsewhere=models)
        batches, jobs = settings.batches
        self._sender = BulkSender(
            self._to.send,
            source.bodies(self.confirmed),
            start=self.confirmed,
            concurrency=batches,
            batch=jobs,
            rate=settings.rate,
            choose=self._campaigns.choose,
            second_drawing=sample.second_drawing,
        )

    def check(self) -> None:
        """Raises SetupError for invalid jobs, with their places; slow for a long file."""
        if self.is_done:
            return
        if isinstance(self._source, FileSource):
            self._jobs = jobs_of(self._source, self.confirmed)
        else:
            self._source.check(self.confirmed)

    def stop(self) -> None:
        self._sender.stop()

    async def run(self, on_confirmed: Callable[[int], None]) -> Summary:
        """Sends what is left, or raises FleetError; *on_confirmed* gets the positions stored."""
        began = time.monotonic()
        progress = Progress(self.confirmed, 0, finished=True)
        try:
            if not self.is_done:
                progress = await self._send(on_confirmed)
        finally:
            await self._campaigns.note()
            self._write_checkpoint()
            if self._file is not None:
                self._file.close()
        seconds = time.monotonic() - began
        found = self._campaigns.counts
        found.update(changed=self._replaced, as_before=-self._replaced)
        if not self._is_compared and (found["changed"] or found["as_before"]):
            self._on_notice(shown(found))
        return Summary(
            storage=self._storage.url,
            queue=self._queue.name,
            queues=dict(
                sorted(self._to.sent_to.items(), key=lambda each: (-each[1], each[0]))
            ),
            sent=progress.sent + self._replaced,
            new=found["new"],
            changed=found["changed"],
            as_before=found["as_before"],
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
                self._on_notice(
                    f"cancelled campaigns are not noticed: {self._unreadable[0]}"
                )
            self._unreadable.clear()
            self._write_checkpoint()
            on_confirmed(progress.confirmed)

        if self._jobs is not None:
            await self._compare(self._jobs)
            self._jobs = None
        if self._path is not None:
            # Fails before anything is sent, if the path is not writable.
            self._start.write(self._path)
            self._file = self._path.open("r+b", buffering=0)
        noted = min(self._start.noted, self.confirmed)
        sent = itertools.islice(self._source.bodies(noted), self.confirmed - noted)
        await self._campaigns.begin(sent, noted, self.confirmed)
        watching = self._cancelled.watch()
        async with concurrency.beside(watching, keep_noting(self._campaigns.note)):
            return await self._sender.run(confirm)

    async def _compare(self, jobs: FileJobs) -> None:
        """Tells what was sent before; replaces what has changed, or raises SetupError."""
        changed: list[int] = []
        try:
            found = await jobs.compared(self._ledgers, changed)
        except errors.SetupError:
            return  # which is said where they are noted
        self._is_compared = True
        if found["changed"] or found["as_before"]:
            self._on_notice(shown(found))
        if self._new_only or not changed:
            return
        if self._replace is None:
            named = [job_key(*job_of(body)[:2]) for body in self._at(changed[:_NAMED])]
            more = ", ..." if len(changed) > _NAMED else ""
            were = "was" if len(changed) == 1 else "were"
            raise errors.SetupError(
                f"{len(changed):,} of the jobs {were} sent before with another content:"
                f" {', '.join(named)}{more}; nothing was sent. Give them other ids; or send only"
                " the others with --new-only, or have these drawn again with --replace"
            )
        starts = range(0, len(changed), _REPLACED_AT_ONCE)
        for only_check, start in itertools.product((True, False), starts):
            bodies = list(self._at(changed[start : start + _REPLACED_AT_ONCE]))
            await self._replace(self._storage, bodies, only_check=only_check)
            if not only_check:
                for job in map(job_of, bodies):
                    self._ledgers.of(job.campaign).pending += job.entry
                await self._ledgers.note()
                self._replaced += len(bodies)

    def _at(self, positions: list[int]) -> Iterator[str]:
        """The messages at these positions, which are in order."""
        bodies = self._source.bodies(positions[0])
        wanted = set(positions)
        for position, body in enumerate(bodies, positions[0]):
            if position in wanted and body is not None:
                yield body
            if position >= positions[-1]:
                return

    def _write_checkpoint(self) -> None:
        """Overwrites the counts, in microseconds; a kill leaves those of before or these."""
        if self._path is None or self._file is None:
            return
        try:
            self._file.seek(0)
            self._file.write(
                _counts(self._sender.progress.confirmed, self._campaigns.noted)
            )
        except OSError as error:
            raise _unwritable(self._path, error) from None
