"""A worker's process in the records of all campaigns, and what of its time each of them has."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from imagefleet.records import catalog, dedupe, ledger
from imagefleet.records.catalog import Damaged, StoredShard
from imagefleet.records.decisions import is_sent
from imagefleet.records.log import writer_name, writer_of
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage.open import Storage

#: A worker's name and start time.
WorkerKey = tuple[str, str]

#: Bytes of records, some 100,000, up to which a process's time is shared by the second; that of
#: more by the minute, so that memory depends on hours.
_FEW_BYTES = 16 * 2**20
_MINUTE = 60


_EVER = datetime.max.replace(tzinfo=UTC)

#: By how much the times in records and those of shards may differ.
_CLOCKS = timedelta(minutes=5)


class OwnTime(NamedTuple):
    """What one campaign has of a process that draws for several: seconds, and of its start-up."""

    seconds: float
    start_up_seconds: float


@dataclass(slots=True)
class _Times:
    """When a process stored or dropped images of one campaign and of all.

    The time since its last image is shared by the campaigns of those that it ends next: so their
    parts add up to its time.
    """

    began_at: datetime
    start_up_seconds: float
    own: Counter[int] = field(default_factory=Counter)
    of_all: Counter[int] = field(default_factory=Counter)
    last_at: dict[int, float] = field(default_factory=dict)
    is_shared: bool = False

    def add(self, record: Record, step: int, *, is_own: bool) -> None:
        busy = timedelta(seconds=(record.seconds or 0) + self.start_up_seconds)
        self.began_at = min(self.began_at, record.at - busy)
        at = record.at.timestamp()
        span = int(at) // step
        self.last_at[span] = max(at, self.last_at.get(span, at))
        self.of_all[span] += 1
        self.own[span] += is_own
        self.is_shared = self.is_shared or not is_own

    def share(self) -> OwnTime:
        seconds = start_up = 0.0
        before = self.began_at.timestamp()
        for number, (span, at) in enumerate(sorted(self.last_at.items())):
            part = self.own[span] / self.of_all[span]
            seconds += (at - before) * part
            before = at
            if not number:
                start_up = min(seconds, self.start_up_seconds * part)
        return OwnTime(seconds, start_up)


def worker_key(record: Record) -> WorkerKey:
    # A container that restarts on the same machine keeps its name, but not its start time.
    started_at = record.started_at.isoformat() if record.started_at else ""
    return printable(record.worker), started_at


async def own_times(
    storage: Storage,
    campaign: str,
    processes: Mapping[WorkerKey, datetime],
    is_proven: Callable[[Record], bool],
) -> dict[WorkerKey, OwnTime]:
    """What *campaign* has of the time of those *processes* that drew for others, too.

    *processes*: when each of them has begun, at the latest. One listing of all shards, and a read
    of those that these processes have written.
    """
    writers = {writer_name(name) for name, _ in processes}
    began_at = min(
        (
            datetime.fromisoformat(started_at) if started_at else known
            for (_, started_at), known in processes.items()
        ),
        default=_EVER,
    )
    every = [
        each
        for each in await catalog.shards_of(storage, None)
        if catalog.began_at(each) > began_at - _CLOCKS
    ]
    shards = [
        each
        for each in catalog.of_kind(every, "images", "jobs")
        if writer_of(each.blob.name) in writers
    ]
    if {each.campaign for each in shards} <= {campaign}:
        return {}
    step = 1 if catalog.size_bytes(shards) <= _FEW_BYTES else _MINUTE
    times: dict[WorkerKey, _Times] = {}

    def add(record: Record) -> bool:
        """Adds a record to its process's times; False if none of *processes* has drawn for it."""
        key = worker_key(record)
        is_drawn = record.outcome in {"completed", "dropped"}
        if key not in processes or not is_drawn or not is_proven(record):
            return False
        found = times.setdefault(key, _Times(record.at, record.start_up_seconds))
        found.add(record, step, is_own=record.campaign == campaign)
        return True

    async for record in _sent(storage, shards, campaign):
        add(record)
    # What a process drew last before it was killed is in the records of who found it.
    until = {key: max(found.last_at.values()) for key, found in times.items()}
    seen: set[str] = set()
    async for record in _sent(storage, catalog.of_kind(every, "again"), campaign):
        is_later = record.at.timestamp() > until.get(worker_key(record), 0)
        if not is_later or (name := dedupe.drawing(record)) in seen:
            continue
        if add(record):
            seen.add(name)
    return {key: found.share() for key, found in times.items() if found.is_shared}


async def _sent(
    storage: Storage, shards: Sequence[StoredShard], needed: str
) -> AsyncGenerator[Record]:
    """The records of jobs that were sent; of the campaign *needed* all, if it has no ledger.

    Whoever may store images may make up other campaigns, but no ledgers.
    """
    for campaign in sorted({each.campaign for each in shards}):
        known = await ledger.known(storage, campaign)
        if known is None and campaign != needed:
            continue
        of_campaign = [each for each in shards if each.campaign == campaign]
        async for part in catalog.records(of_campaign, Damaged()):
            for record in part:
                if known is None or is_sent(record, known):
                    yield record
