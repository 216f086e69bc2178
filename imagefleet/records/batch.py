"""A batch of jobs: what is sent and noted of it, and what becomes of each job."""

import contextlib
import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping

from imagefleet import validation
from imagefleet.errors import FleetError, JobError, NameTakenError, SetupError
from imagefleet.job import sizes
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, fields_if_any, job_key
from imagefleet.records import reader
from imagefleet.records.catalog import Positions
from imagefleet.records.follower import Follower
from imagefleet.records.ledger import Ledgers, entry_of, id_hash
from imagefleet.records.outcomes import JobFacts
from imagefleet.records.record import Record
from imagefleet.signing import JobSigner
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import log

#: A job, and the message that it failed with.
_Failure = tuple[str, str | None]


class Submission:
    """Jobs on their way to the queue, and where their campaigns' records ended before."""

    def __init__(self, storage: Storage, ledgers: Ledgers) -> None:
        """*ledgers* are those of all submissions of the program."""
        #: The jobs by `JobFacts.key`; their `blobs` are the images to wait for.
        self.jobs: dict[str, JobFacts] = {}
        self._storage = storage
        self._token = uuid.uuid4().hex[:12]
        #: Positions to read results from, by campaign; none where ids may be old.
        self.positions: dict[str, Positions] = {}
        self._campaigns: set[str] = set()
        self._with_own_ids: set[str] = set()
        self._ledgers = ledgers
        self._counted = 0  # of the jobs
        self._refused: set[str] = set()

    def messages(
        self, jobs: Iterable[Job], campaign: str | None, signer: JobSigner | None = None
    ) -> Iterator[str]:
        """The jobs' messages; adds each job to `jobs`. Raises JobError for two with one id."""
        for number, given in enumerate(jobs, start=1):
            job = given.identified(f"{self._token}-{number:06}", campaign)
            if job.verify:
                raise JobError(
                    f"job {job_key(job.campaign, job.id)} is a second drawing (verify), which has"
                    " no result to wait for"
                )
            last = job.at_stage(job.stages)
            facts = JobFacts(
                str(job.id),
                job.campaign or DEFAULT_CAMPAIGN,
                seed=last.seed,
                digest=job.digest,
                blobs=tuple(
                    last.blob_name(index) for index in range(last.kept_at_most)
                ),
                metadata=last.metadata,
                is_judged=last.keep is not None,
            )
            if facts.key in self.jobs:
                first = list(self.jobs).index(facts.key) + 1
                raise JobError(
                    f"two jobs have the id {facts.key}: numbers {first} and {number}"
                )
            with validation.as_error(JobError, f"job {facts.key}: "):
                (body,) = sizes.checked_messages([job.to_message(signer)])
            self.jobs[facts.key] = facts
            self._campaigns.add(facts.campaign)
            if given.id:
                self._with_own_ids.add(facts.campaign)
            yield body

    async def check(self) -> None:
        """Raises NameTakenError for an id that was sent before with another content."""
        read = {name: self._ledgers.of(name) for name in self._with_own_ids}
        try:
            for ledger in read.values():
                await ledger.read()
        except SetupError:
            return  # credentials that only add jobs: a worker says so, and the job fails
        for job in self.jobs.values():
            known = read.get(job.campaign)
            entry = _entry(job)
            if known is not None and known.compare(entry) == "changed":
                before = known.digest_of(entry) or b""
                raise NameTakenError(
                    f"job {job.key} is not the one that was sent with this id before: its digest is"
                    f" {str(job.digest)[:16]}, and that one's {before.hex()}; nothing was sent:"
                    " give it another id"
                )

    async def before_send(self) -> None:
        """Notes where the campaigns' records end; a listing for each."""
        for campaign in self._campaigns:
            found = {}
            # Credentials that only add jobs: whoever asks for results is told so.
            with contextlib.suppress(SetupError):
                found = await reader.end(self._storage, campaign)
            if campaign in self._with_own_ids:
                found = {
                    name: at
                    for name, at in found.items()
                    if name.endswith(".jobs.jsonl.gz")
                }
            self.positions[campaign] = found

    async def note_sent(self, count: int) -> None:
        """Notes in the campaigns' ledgers that the first *count* jobs are in the queue."""
        for job in itertools.islice(self.jobs.values(), self._counted, count):
            self._ledgers.of(job.campaign).pending += _entry(job)
        self._counted = max(self._counted, count)
        for campaign in self._campaigns - self._refused:
            try:
                await self._ledgers.of(campaign).note()
            except FleetError as error:
                if isinstance(error, SetupError):
                    self._refused.add(campaign)
                    self._ledgers.of(campaign).pending.clear()
                log.warning(
                    f"the counts of {campaign} lack jobs that were sent: {error.message}",
                    action="sent_not_recorded",
                    campaign=campaign,
                )


class Watch:
    """Finds the ends of many jobs in the records of their campaigns.

    Jobs of the campaigns in *positions* may be added to `waiting` at any time before they are sent.
    """

    def __init__(
        self,
        storage: Storage,
        jobs: Iterable[JobFacts],
        positions: Mapping[str, Positions],
    ) -> None:
        self.found: list[JobFacts] = []
        self.waiting = {job.key: job for job in jobs}
        #: There may be more to read at once.
        self.is_behind = True
        self._followers = [
            Follower(storage, campaign, positions.get(campaign), own=self.waiting)
            for campaign in {
                *positions,
                *(job.campaign for job in self.waiting.values()),
            }
        ]
        self._storage = storage
        self._ledgers = Ledgers(storage)
        self._others: list[Record] = []  # of jobs of the same names
        self._images: dict[
            str, dict[str, Record]
        ] = {}  # by name, of jobs that lack others
        self._ended: dict[_Failure, Record] = {}
        self._replayed: set[_Failure] = set()

    async def poll(self) -> None:
        """Moves jobs from `waiting` to `found`: a listing, and a read for each grown shard."""
        self.is_behind = False
        for follower in self._followers:
            for record in await follower.poll():
                self.is_behind = True
                if (job := self.waiting.get(record.key)) is None:
                    continue
                if record.outcome == "replayed" or record.digest in {None, job.digest}:
                    self._take(record)
                else:
                    self._others.append(record)
        for record in await self._in_their_place():
            self._take(record)
        if not self.is_behind:
            # The shards are in no order: only now is known which of the failures were replayed.
            for failure, record in list(self._ended.items()):
                is_over = failure in self._replayed or record.key not in self.waiting
                if not is_over and await self._still_waits(record):
                    continue
                del self._ended[failure]
                if not is_over:
                    job = self.waiting.pop(record.key)
                    images = self._images.pop(job.key, {})
                    self.found.append(job.ended(record, images.values()))

    async def _still_waits(self, record: Record) -> bool:
        """True if a job that has failed, as somebody says, has a message that waits for a worker.

        Whoever stores images can write that. A worker's message is leased until it ends; on Azure
        the first messages of a queue are seen alone.
        """
        if record.outcome != "failed":
            return False
        with contextlib.suppress(SetupError):  # credentials that only add jobs
            async for message, is_leased in self._storage.queue.find(record.id):
                fields = fields_if_any(message.body) or {}
                named = fields.get("id"), fields.get("campaign") or DEFAULT_CAMPAIGN
                is_this = named == (record.id, record.campaign)
                if is_this and not (is_leased or fields.get("verify")):
                    return True
        return False

    async def _in_their_place(self) -> list[Record]:
        """Records of other jobs of the same names, if an operator has sent these since."""
        others = self._others
        self._others = []
        ledgers = {each.campaign: self._ledgers.of(each.campaign) for each in others}
        for ledger in ledgers.values():
            with contextlib.suppress(SetupError):
                await ledger.read()
        return [
            each
            for each in others
            if each.key in self.waiting
            and _entry(each) == ledgers[each.campaign].known.entry(id_hash(each.id))
        ]

    def _take(self, record: Record) -> None:
        if (job := self.waiting.get(record.key)) is None:
            return
        failure = record.key, record.source
        if record.outcome == "replayed":
            self._replayed.add(failure)
        elif record.is_end:
            self._ended[failure] = record
        elif record.blob in job.blobs:  # records are untrusted
            images = self._images.setdefault(job.key, {})
            images[str(record.blob)] = record
            wanted = len(job.blobs)
            if job.is_judged:
                wanted = min(wanted, record.images)
            if len(images) == wanted:
                del self._images[job.key], self.waiting[job.key]
                self.found.append(job.completed(images.values()))


def _entry(job: JobFacts | Record) -> bytes:
    return entry_of(job.id, str(job.digest))
