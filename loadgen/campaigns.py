"""Chooses the jobs that a load sends: none of cancelled campaigns, some twice for comparison."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import SetupError, TransientError
from imagefleet.job import sizes
from imagefleet.job.chain import THEN_FIELD
from imagefleet.job.message import (
    COMPARABLE_STEPS,
    DIGEST_FIELD,
    job_key,
)
from imagefleet.records.ledger import (
    HASH_BYTES,
    Compared,
    Ledgers,
    SentJob,
    job_of,
)
from imagefleet.signing import SIGNATURE_FIELD, JobSigner
from imagefleet.storage.open import Storage
from loadgen.file_source import MendedMessage
from loadgen.sources import JobSource


def shown(found: Counter[Compared]) -> str:
    return f"{found['changed']:,} changed, {found['new']:,} new, {found['as_before']:,} as before"


async def changes_of(storage: Storage, source: JobSource) -> Counter[Compared]:
    """Counts the jobs of a source that are new, changed or as sent before.

    Reads all of it, unless its campaign is new.
    """
    ledgers = Ledgers(storage)
    only = source.campaign
    if source.count and only and await ledgers.of(only).is_new():
        return Counter({"new": source.count})
    counts = Counter[Compared]()
    for body in source.bodies():
        if body is None or isinstance(body, MendedMessage):
            continue
        job = job_of(body)
        ledger = ledgers.of(job.campaign)
        if not ledger.is_read:
            await ledger.read()
        counts[ledger.compare(job.entry)] += 1
    return counts


@dataclass(eq=False)
class LoadedCampaigns:
    """Leaves out the jobs that were sent before, and notes the others once they are sent."""

    cancelled: CancelledCampaigns
    ledgers: Ledgers
    notice: Callable[[str], None]
    #: The campaign of all jobs, whose ids are then the source's own: none is there twice.
    only: str | None
    sends_again: bool
    #: True if a job whose id was sent with another content is left out; else it ends the load.
    skips_changed: bool
    position: int = 0

    def __post_init__(self) -> None:
        self.counts = Counter[Compared]()
        #: The cancellations of before this load, which are none of its own.
        self.known: Mapping[str, datetime] = {}
        self._is_compared = True
        #: The jobs at the positions from `_confirmed` on; None: with none that is to be noted.
        self._in_flight = deque[SentJob | None]()
        self._confirmed = 0
        self._is_refused = False

    def is_cancelled(self, campaign: str) -> bool:
        """True if it was cancelled since this load began."""
        cancelled_at = self.cancelled.times.get(campaign)
        return cancelled_at is not None and cancelled_at != self.known.get(campaign)

    async def begin(self) -> None:
        self.known = dict(self.cancelled.times)
        if self.only is not None:
            try:
                self._is_compared = not await self.ledgers.of(self.only).is_new()
            except SetupError as error:
                self._refuse(error)

    async def choose(self, body: str | None) -> str | None:
        """The next message; None if it is not sent.

        Raises SetupError for a campaign that was cancelled since the load began, and for an id that
        was sent with another content.
        """
        job = None if body is None else job_of(body)
        if job is not None and self.is_cancelled(job.campaign):
            raise SetupError(
                f"campaign {job.campaign} was cancelled: no more jobs are sent; the same command"
                " sends the others"
            )
        if job is not None and not job.entry:
            job = None  # a second drawing is not noted
        if job and body:
            if not self._is_compared:
                self.counts["new"] += 1
            elif not await self._is_sent(job, body):
                body = job = None
        self._in_flight.append(job)
        self.position += 1
        return body

    async def _is_sent(self, job: SentJob, body: str) -> bool:
        ledger = self.ledgers.of(job.campaign)
        if not ledger.is_read:
            try:
                await ledger.read()
            except SetupError as error:
                self._refuse(error)
        found = ledger.compare(job.entry)
        # A failed job that was mended is sent whatever was sent before.
        if isinstance(body, MendedMessage):
            found = "new"
        self.counts[found] += 1
        if found == "changed" and not self.skips_changed:
            raise SetupError(
                f"the job {job_key(job.campaign, job.id)}, number {self.position + 1}, was sent"
                " before with another content; those before it are sent. Give it another id, or"
                " leave such jobs out with --new-only"
            )
        if found == "changed" or (found == "as_before" and not self.sends_again):
            return False
        if self.only is None:
            ledger.claimed[job.entry[:HASH_BYTES]] = job.entry[HASH_BYTES:]
        return True

    def confirm(self, confirmed: int) -> None:
        """The positions below *confirmed* are stored."""
        while self._in_flight and self._confirmed < confirmed:
            self._confirmed += 1
            if (job := self._in_flight.popleft()) is not None and not self._is_refused:
                self.ledgers.of(job.campaign).pending += job.entry

    async def note(self) -> None:
        """Notes which jobs are sent; where that fails, the load goes on."""
        if self._is_refused:
            return
        try:
            await self.ledgers.note()
        except SetupError as error:
            self._refuse(error)
        except TransientError as error:
            self.notice(f"which jobs are sent is not noted yet: {error.message}")

    def _refuse(self, error: SetupError) -> None:
        self._is_refused = True
        self._is_compared = False
        self.notice(
            "which jobs are sent is not recorded, so `imagefleet status` does not know it, and jobs"
            f" that were sent before are sent again: {error.message}"
        )


class Sample:
    """Chooses a share of the messages: the same ones again, by a key that no worker knows."""

    def __init__(self, share: float, key: str, signer: JobSigner | None = None) -> None:
        self._below = round(share * 2**64)
        self._hash = hashlib.blake2b(
            key=key.encode()[: hashlib.blake2b.MAX_KEY_SIZE], digest_size=8
        )
        self._signer = signer

    def second_drawing(self, body: str) -> str | None:
        """The message for the second drawing of a job of `Job.to_message`; None: not chosen."""
        if not self._below:
            return None
        hashed = self._hash.copy()
        # A load that resumes signs its jobs with another date.
        unsigned = body.partition(f',"{SIGNATURE_FIELD}":')[0]
        hashed.update(unsigned.encode(errors="surrogatepass"))
        if int.from_bytes(hashed.digest()) >= self._below:
            return None
        fields = json.loads(body)
        is_signed = fields.pop(SIGNATURE_FIELD, None) is not None
        # The first image that is drawn may be dropped, or stored by another number.
        if (
            fields.get("verify")
            or fields.get("keep")
            or fields.get("steps", COMPARABLE_STEPS) < COMPARABLE_STEPS
        ):
            return None
        fields["verify"] = True
        for name in (THEN_FIELD, DIGEST_FIELD):
            fields.pop(name, None)
        if self._signer is not None:
            fields[SIGNATURE_FIELD] = self._signer.sign(fields)
        elif is_signed:  # with somebody else's key
            return None
        message = json.dumps(fields, separators=(",", ":"))
        return message if sizes.fits(message) else None
