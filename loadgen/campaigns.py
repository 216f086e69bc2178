"""What a load sends: no jobs of cancelled campaigns, and some jobs twice, to be compared."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from imagefleet import errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job import sizes
from imagefleet.job.chain import THEN_FIELD
from imagefleet.job.message import (
    COMPARABLE_STEPS,
    DEFAULT_CAMPAIGN,
    DIGEST_FIELD,
    message_fields,
)
from imagefleet.records.record import RecordLog
from imagefleet.signing import SIGNATURE_FIELD, JobSigner

#: Campaigns of one load whose jobs are counted: each has a record of its own.
MAX_CAMPAIGNS = 1_000


@dataclass(slots=True, eq=False)
class LoadedCampaigns:
    """Leaves out the jobs of cancelled campaigns, and counts the others once they are stored."""

    cancelled: CancelledCampaigns
    records: RecordLog
    load_id: str
    notice: Callable[[str], None]
    known: Mapping[str, datetime]
    """The cancellations of before this load, which are none of its own."""
    sent: Counter[str]
    """Jobs sent by campaign, earlier runs of this load included."""
    left_out: Counter[str] = field(default_factory=Counter, init=False)
    _in_flight: deque[str | None] = field(default_factory=deque, init=False)
    """The campaigns of the positions from `_confirmed` on; None: with no job that is to be sent."""
    _confirmed: int = field(default=0, init=False)
    _noted: dict[str, int] = field(default_factory=dict, init=False)
    _is_refused: bool = field(default=False, init=False)
    _has_too_many: bool = field(default=False, init=False)

    def is_cancelled(self, campaign: str) -> bool:
        """Whether it was cancelled since this load began."""
        cancelled_at = self.cancelled.times.get(campaign)
        return cancelled_at is not None and cancelled_at != self.known.get(campaign)

    def wanted(
        self, bodies: Iterable[str | None], start: int, only: str | None, total: int | None
    ) -> Iterator[str | None]:
        """*bodies* from position *start* on, with None for those of cancelled campaigns.

        *only* is the campaign of all, if there is one: nothing follows. None is a job sent before.
        """
        self._confirmed = start
        for position, body in enumerate(bodies, start):
            campaign = only
            if campaign is None and body is not None:
                campaign = message_fields(body).get("campaign") or DEFAULT_CAMPAIGN
            if campaign is not None and self.is_cancelled(campaign):
                if campaign not in self.left_out:
                    self.notice(f"campaign {campaign} was cancelled: no more of its jobs are sent")
                if only and total is not None:
                    self.left_out[campaign] = total - position
                    return
                self.left_out[campaign] += 1
                body = campaign = None  # noqa: PLW2901 - the position stays
            self._in_flight.append(campaign)
            yield body

    def confirm(self, confirmed: int) -> None:
        """The positions below *confirmed* are stored."""
        while self._in_flight and self._confirmed < confirmed:
            self._confirmed += 1
            campaign = self._in_flight.popleft()
            if campaign is None:
                continue
            if campaign in self.sent or len(self.sent) < MAX_CAMPAIGNS:
                self.sent[campaign] += 1
            elif not self._has_too_many:
                self._has_too_many = True
                self.notice(
                    f"these are jobs of more than {MAX_CAMPAIGNS:,} campaigns: how many are sent is"
                    " not recorded for the others"
                )

    async def note(self) -> None:
        """Notes how many jobs are sent; where that fails, the load goes on."""
        for campaign, jobs in list(self.sent.items()):
            if self._is_refused or self._noted.get(campaign) == jobs:
                continue
            try:
                await self.records.sent(campaign, jobs, self.load_id)
            except (errors.SetupError, errors.TransientError) as error:
                self._is_refused = isinstance(error, errors.SetupError)
                self.notice(
                    "how many jobs are sent is not recorded, so `imagefleet status` does not"
                    f" know it: {error.message}"
                )
            else:
                self._noted[campaign] = jobs


class Sample:
    """Chooses a share of the messages: the same ones again, by a key that no worker knows."""

    def __init__(self, share: float, key: str, signer: JobSigner | None = None) -> None:
        self._below = round(share * 2**64)
        own_key = key.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
        self._hash = hashlib.blake2b(key=own_key, digest_size=8)
        self._signer = signer

    def second_drawing(self, body: str) -> str | None:
        """The message for the second drawing of a job of `Job.to_message`; None: not chosen."""
        hashed = self._hash.copy()
        # A load that resumes signs its jobs with another date.
        unsigned = body.partition(f',"{SIGNATURE_FIELD}":')[0]
        hashed.update(unsigned.encode(errors="surrogatepass"))
        if int.from_bytes(hashed.digest()) >= self._below:
            return None
        fields = json.loads(body)
        is_signed = fields.pop(SIGNATURE_FIELD, None) is not None
        if fields.get("verify") or fields.get("steps", COMPARABLE_STEPS) < COMPARABLE_STEPS:
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
