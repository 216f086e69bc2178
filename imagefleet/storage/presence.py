"""Which jobs the queues hold, and for how long they wait."""

from collections.abc import Collection

from imagefleet.job.message import fields_if_any, job_key
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import JobQueue, QueueDepth

#: How messages of jobs tell that a client waits.
_AWAITED = '"awaited":true'


async def present_jobs(storage: Storage) -> Collection[str] | None:
    """The keys of the awaited jobs that the queues hold, those in flight included.

    None: any may be there, since Azure shows no more than 32 messages of a queue.
    """
    queue = storage.queue
    if not (await queue.depth()).messages:
        return frozenset()
    if not queue.is_local:
        return None
    found = set()
    async for message, _ in queue.find(_AWAITED):
        fields = fields_if_any(message.body)
        found.add(job_key(fields.get("campaign"), fields.get("id")))
    return found


async def waiting_seconds(
    storage: Storage, queue: JobQueue, depth: QueueDepth, most: float
) -> float:
    """Seconds that the next job to be drawn has waited, where it may be more than *most*.

    A job that a worker has handed back, to draw it later, is no sign of a queue that is too long.
    """
    seconds = depth.oldest_age_seconds or 0.0
    if seconds <= most:
        return seconds
    async for message, is_leased in queue.find("{"):
        if not is_leased and not message.delivery_count:
            return (storage.blobs.clock.now() - message.enqueued_at).total_seconds()
    return 0.0
