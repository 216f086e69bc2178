"""The pack stage: stores what the jobs of a bundle have become in packs, then ends the bundle.

A bundle's first part has a name that follows from the bundle alone, so whoever draws the bundle
again finds that name taken. A taken name says nothing of what it holds: it is read, and what it
lacks is the next part. Jobs that have failed or were cancelled are in a part like images, so each
job ends once. Records come after the part, then failures go to poison, and last the message is
deleted. What is left of a bundle goes back with the whole message, which never gets shorter.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from imagefleet import concurrency
from imagefleet.errors import FleetError, LeaseLost, TransientError, UnusableFileError
from imagefleet.files import pack
from imagefleet.records.record import Record
from imagefleet.storage import bundle as bundles
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.deliveries import without_deliveries
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import priority_of
from imagefleet.telemetry.logs import log
from worker.jobs.in_flight import Bundle, InFlightJob
from worker.leases import Lease, LeaseKeeper
from worker.metrics import CostMeter, Outcome, WorkerMetrics
from worker.stages.record import PendingRecords, RecordStage, proven, with_proof

#: Packs in flight: one of 13 MB takes seconds from far away. With those that wait, the memory that
#: an outage fills before it holds up the engine.
PACKS = 6
WAITING = 2

#: A part is stored before it has more bytes: some are left for its records.
PART_BYTES = pack.MAX_PACK_BYTES - 4 * 2**20

#: Bytes of an image's headers and figures in a part, and how often it holds its job's text.
_HEADERS = 8192
_RECORDS = 3

#: Seconds until a message that could not be moved to its model's queue is delivered again.
NOT_MOVED_SECONDS = 300.0

#: After one of these a message is delivered again, or was.
FAULTS = (LeaseLost, TransientError)
Fault = LeaseLost | TransientError

Call = Callable[[], Awaitable[None]]


def entries_of(lease: Lease) -> list[InFlightJob]:
    """The jobs of a leased bundle; one that is cut or damaged is a single job, which fails."""
    read = bundles.read(lease.message.body)
    if not read.messages:
        return [InFlightJob(lease)]
    bundle = Bundle(lease, read.name, read.campaign, read.problem)
    for job_id, message in zip(read.ids, read.messages, strict=True):
        bundle.members[InFlightJob(lease, bundle=bundle, body=message)] = job_id
    return list(bundle.members)


@dataclass(eq=False)
class BundleStage:
    """Gathers how the jobs of bundles end; stores parts, and ends the bundles."""

    storage: Storage
    keeper: LeaseKeeper
    metrics: WorkerMetrics
    cost: CostMeter
    worker: str
    retry_policy: concurrency.RetryPolicy
    pending: RecordStage
    on_ended: Callable[[InFlightJob, Outcome], None]
    model_name: str = ""
    on_upload_failed: Callable[[], None] = lambda: None
    _queue: asyncio.Queue[Bundle] = field(
        default_factory=partial(asyncio.Queue, WAITING)
    )

    async def ended(
        self,
        entry: InFlightJob,
        outcome: Outcome,
        record: Record | None = None,
        delay_seconds: float = 0.0,
    ) -> bool:
        """Notes that a job of a bundle has ended here, with the *record* of one without image.

        Waits while too many packs are in flight. False for a job of its own.
        """
        bundle = entry.bundle
        if bundle is None:
            return False
        bundle.ends[entry] = outcome
        bundle.delay_seconds = max(bundle.delay_seconds, delay_seconds)
        if record is not None:
            self._end_without_image(bundle, entry, record)
        bundle.progress.set()
        is_last = len(bundle.ends) == len(bundle.members)
        if is_last or entry.is_suspect or _size(bundle.images) > PART_BYTES:
            await self._queue.put(bundle)
        return True

    def _end_without_image(
        self, bundle: Bundle, entry: InFlightJob, record: Record
    ) -> None:
        is_named = (record.campaign, record.id) == (bundle.campaign, entry.id)
        if is_named and bundle.problem is None:
            bundle.without[entry] = record
            return
        if record.id == bundle.lease.message.id:  # of a stranger, who may name any job
            number = list(bundle.members).index(entry)
            record = record.model_copy(update={"id": f"{record.id}.{number}"})
        bundle.refused[entry] = record

    async def look_up(self, entry: InFlightJob) -> None:
        """Notes whether earlier deliveries have ended a job of a bundle."""
        bundle = entry.bundle
        if bundle is None or bundle.problem is not None:
            return
        async with bundle.lock:
            while not bundle.is_read:
                bundle.is_read = not await self._read_part(bundle)
        if bundle.stored(entry) is not None:
            entry.stored.add(0)

    async def stored(self, entry: InFlightJob) -> None:
        """Returns once a job's end is in a part, or could not be stored."""
        bundle = entry.bundle
        while bundle is not None and (
            entry not in bundle.ends
            or entry in bundle.images
            or entry in bundle.without
        ):
            bundle.progress.clear()
            await bundle.progress.wait()

    async def run(self) -> NoReturn:
        while True:
            bundle = await self._queue.get()
            async with bundle.lock:
                await self._store(bundle)
            if len(bundle.ends) == len(bundle.members) and not bundle.is_closed:
                bundle.is_closed = True
                await self._close(bundle)

    async def _store(self, bundle: Bundle) -> None:
        """Stores what is in no part yet; what the storage does not take is left."""
        try:
            while bundle.images or bundle.without:
                await self._store_part(bundle)
        except (TransientError, ValueError) as error:
            log.warning(
                f"what is drawn of the bundle {bundle.name} is not stored: {error}",
                action="pack_not_stored",
            )
            for _ in bundle.images:
                self.cost.lost("failed")
            bundle.images.clear()
            bundle.without.clear()
        bundle.progress.set()

    async def _store_part(self, bundle: Bundle) -> None:
        members: dict[InFlightJob, pack.Member] = {}
        for entry, member in bundle.images.items():
            if members and _size({**members, entry: member}) > PART_BYTES:
                break
            members[entry] = member
        without = dict(bundle.without)
        name = pack.name_of(bundle.campaign, bundle.name, bundle.parts + 1)
        packed = await asyncio.to_thread(
            pack.write,
            name,
            list(members.values()),
            list(without.values()),
            prove=partial(proven, prover=self.storage.prover),
        )
        if not await self._create(bundle, name, packed.data):
            if not await self._read_part(bundle):
                raise TransientError(f"{name} was there, and is gone")
            return
        bundle.parts += 1
        for record in (*packed.records, *without.values()):
            bundle.found[record.id, record.digest] = record
            bundle.own.add((record.id, record.digest))
        for entry in members:
            del bundle.images[entry]
            entry.image_written(self.metrics, self.model_name)
        for entry in without:
            del bundle.without[entry]

    async def _create(self, bundle: Bundle, name: str, data: bytes) -> bool:
        """False if the name is taken, or perhaps: by this very part, where a reply was lost."""
        doubt = asyncio.Event()
        sha256 = await asyncio.to_thread(hashlib.sha256, data)
        stated = {
            "campaign": bundle.campaign,
            "worker": self.worker.encode("ascii", "replace").decode(),
            "sha256": sha256.hexdigest(),
        }
        metadata = with_proof(self.storage.prover, name, stated)

        async def create() -> bool:
            try:
                return await self.storage.packs.create(
                    name, data, "application/x-tar", metadata, on_doubt=doubt.set
                )
            except FleetError:
                self.on_upload_failed()
                raise

        with self.metrics.stage_seconds["upload"].time():
            written = await self.retry_policy.call(create)
        return written and not doubt.is_set()

    async def _read_part(self, bundle: Bundle) -> bool:
        """Takes in the next part, whoever has written it; False if there is none."""
        name = pack.name_of(bundle.campaign, bundle.name, bundle.parts + 1)
        read = partial(self.storage.packs.read, name, pack.MAX_PACK_BYTES)
        try:
            data = await self.retry_policy.call(read)
        except UnusableFileError:  # a stranger's
            data = b""
        if data is None:
            return False
        bundle.parts += 1
        found = await asyncio.to_thread(pack.read, name, data)
        # Of other messages, of a load that began anew say, images count alone.
        message = bundle.lease.message.id
        ends = [record for record in found.ends if record.source == message]
        for record in (*found.records, *ends):
            bundle.found.setdefault((record.id, record.digest), record)
        for entry in bundle.members:
            if bundle.stored(entry) is None:
                continue
            bundle.without.pop(entry, None)
            if bundle.images.pop(entry, None) is not None:
                self.cost.lost("duplicate")
        return True

    async def _close(self, bundle: Bundle) -> None:
        """Records the ends of its jobs, then ends the message, or hands back what is left."""
        again: list[Record] = []
        records = list(bundle.refused.values())
        left = []
        for entry in bundle.members:
            record = bundle.stored(entry)
            if record is None:
                if entry not in bundle.refused:
                    left.append(entry)
            elif (record.id, record.digest) in bundle.own:
                records.append(record)
            else:
                again.append(record)
        finish = partial(self._finish, bundle, left, [*records, *again])
        pending = PendingRecords(records, again, finish, len(bundle.members))
        await self.pending.add(pending)

    async def _finish(
        self,
        bundle: Bundle,
        left: list[InFlightJob],
        records: list[Record],
        fault: Fault | None,
    ) -> None:
        failed = [
            FailedJob.model_validate(each.model_dump())
            for each in records
            if each.outcome == "failed" and not left
        ]
        call = partial(self._hand_back, bundle) if left else None
        is_ended = await self.end(bundle.lease, fault, failed, call)
        for entry in bundle.members:
            outcome = self._outcome(bundle, entry) if is_ended else "lost"
            self.on_ended(entry, outcome)

    async def end(
        self,
        lease: Lease,
        fault: Fault | None,
        failed: Sequence[FailedJob] = (),
        call: Call | None = None,
    ) -> bool:
        """Sends *failed* jobs to poison, then does *call*, or deletes the message they came in.

        False if that fails, or a *fault* has kept the records from storage: it comes again.
        """

        async def send() -> None:
            async with lease.lock:
                lease.check()
                await self.storage.poison.send(each.encode() for each in failed)

        try:
            if fault is not None:
                raise fault
            if failed:
                await self.retry_policy.call(send)
            acknowledge = partial(self.keeper.acknowledge, lease)
            await (call() if call else self.retry_policy.call(acknowledge))
        except FAULTS as error:
            if isinstance(error, TransientError):
                log.warning(
                    f"the message {lease.message.id} will be delivered again: {error}",
                    action="job_abandoned",
                )
            self.keeper.drop(lease)
            return False
        for each in failed:
            self.metrics.failed_jobs.labels(each.error).inc()
        return True

    def _outcome(self, bundle: Bundle, entry: InFlightJob) -> Outcome:
        record = bundle.stored(entry)
        outcome = bundle.ends[entry]
        if record is None:
            return "handed_back" if outcome in {"completed", "lost"} else outcome
        if record.outcome != "completed":
            known: dict[str, Outcome] = {"failed": "failed", "dropped": "dropped"}
            return known.get(record.outcome, "cancelled")
        is_own = (record.id, record.digest) in bundle.own
        return "completed" if is_own else "duplicate"

    async def move(self, lease: Lease, body: str) -> None:
        """Sends a message to the queue of its model; raises FleetError."""

        async def send() -> None:
            lease.check()
            await self.storage.models.send([body], priority_of(lease.message.queue))

        await self.retry_policy.call(send)

    async def _hand_back(self, bundle: Bundle) -> None:
        """Hands back what is left; a bundle of another model goes to the queue of its model."""
        lease = bundle.lease
        if set(bundle.ends.values()) == {"moved"}:
            try:
                await self.move(lease, without_deliveries(lease.message.body))
            except FAULTS:
                raise
            except FleetError as error:
                log.warning(
                    f"the bundle {bundle.name} stays in the queue {lease.message.queue}:"
                    f" {error.message}",
                    action="job_not_moved",
                )
                bundle.delay_seconds = NOT_MOVED_SECONDS
                bundle.ends.update(dict.fromkeys(bundle.ends, "handed_back"))
            else:
                await self.retry_policy.call(partial(self.keeper.acknowledge, lease))
                return
        failed = "retried" in bundle.ends.values()
        await self.release(lease, bundle.delay_seconds, failed=failed)

    async def release(
        self, lease: Lease, delay_seconds: float, *, failed: bool
    ) -> None:
        """Hands a message back, as `LeaseKeeper.release`."""
        release = partial(self.keeper.release, lease, delay_seconds, failed=failed)
        await self.retry_policy.call(release)


def _size(images: Mapping[InFlightJob, pack.Member]) -> int:
    """About the bytes of a part with these images."""
    return sum(
        len(member.data) + _RECORDS * len(entry.body) + _HEADERS
        for entry, member in images.items()
    )
