"""Finds where a sweep goes on, after a run that was killed, or one on another machine."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from imagefleet import concurrency
from imagefleet.job.message import Job, fields_if_any
from imagefleet.records import sent, sweep
from imagefleet.storage import enqueue
from imagefleet.storage.open import Storage, absolute_url, open_storage
from imagefleet.storage.settings import Priority, StorageSettings
from loadgen.caption_sweep import SweepSource
from loadgen.load import Checkpoint
from loadgen.settings import MOST_IN_FLIGHT

#: Images that are looked for at the same time.
_LOOKED_FOR_AT_ONCE = 16


def checkpoint_path(source: SweepSource, queue: str) -> Path:
    """The checkpoint beside the file of captions; each sweep of it has one of its own."""
    return source.path.with_name(f".{source.path.name}.{queue}.{source.identity[:12]}.sweep.json")


async def prepare(
    settings: StorageSettings,
    source: SweepSource,
    path: Path,
    priority: Priority,
    models: Collection[str] = (),
    *,
    restart: bool = False,
) -> set[str]:
    """Notes the sweep in the storage; writes a checkpoint to *path* if it was sent from elsewhere.

    Returns the ids of jobs beyond the checkpoint that were sent as well: their messages are in the
    queue, as far as the storage shows that, or their images are stored. *models* are what workers
    have from elsewhere than the storage. With *restart* nothing counts as sent. Raises SetupError
    for a campaign that is another sweep, JobError for a model that no worker can have.
    """
    async with open_storage(settings) as storage:
        await storage.create()
        # A name that is mistyped must not be the campaign's for ever.
        stages = (stage for job in source.first_jobs() for stage in job.stages_left())
        names = {stage.model for stage in stages if stage.model}
        await enqueue.JobSender(storage, priority, elsewhere=models).check(names)
        is_new = await sweep.write(storage, source.sweep)
        if restart:
            return set()
        checkpoint = Checkpoint.read(path)
        if checkpoint is None:
            noted = min(await sent.counts(storage, source.campaign) or 0, source.count)
            checkpoint = Checkpoint(
                source=source.identity,
                storage=absolute_url(storage),
                queue=storage.queues[priority].name,
                confirmed=noted,
                noted=noted,
            )
            checkpoint.write(path)
        is_other = checkpoint.source != source.identity  # which `Load` refuses
        if is_new or is_other or checkpoint.confirmed >= source.count:
            return set()
        return await _sent_beyond(storage, source, checkpoint.confirmed)


async def _sent_beyond(storage: Storage, source: SweepSource, start: int) -> set[str]:
    # The queue first: a job that is drawn in between is found by its image.
    queued = await _queued(storage, source, start)
    found: set[str] = set()
    ledger = sent.Ledger(storage, source.campaign)
    await ledger.read()
    jobs = source.jobs(start)
    # Where one of so many jobs was sent, the next ones may have been, too.
    while window := list(itertools.islice(jobs, MOST_IN_FLIGHT)):
        known = {str(job.id) for job in window} & queued
        known |= await _drawn(storage, [job for job in window if job.id not in known])
        if not known:
            break
        found |= known
        for job in window:
            if job.id in known:
                ledger.pending += sent.entry_of(str(job.id), job.digest)
    await ledger.note()
    return found


async def _queued(storage: Storage, source: SweepSource, start: int) -> set[str]:
    """The ids of the sweep's messages, of the captions from position *start* on."""
    if not storage.queue.finds_all or not (await storage.queue.depth()).messages:
        return set()
    first_caption = start // len(source.sweep.groups)
    found = set()
    async for queued in storage.queue.find(source.campaign):
        fields = fields_if_any(queued.message.body)
        number = sweep.caption_number(job_id := str(fields.get("id")))
        is_ours = fields.get("campaign") == source.campaign
        if is_ours and number is not None and number >= first_caption:
            found.add(job_id)
    return found


async def _drawn(storage: Storage, jobs: Sequence[Job]) -> set[str]:
    """The ids of those whose images are stored."""
    found: set[str] = set()

    async def look(job: Job) -> None:
        if await storage.blobs.exists(job.blob_name(0)):
            found.add(str(job.id))

    await concurrency.for_each(jobs, look, _LOOKED_FOR_AT_ONCE)
    return found
