"""The campaigns of a load: how many jobs of each are sent, and which were cancelled meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from imagefleet import errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.job.message import DEFAULT_CAMPAIGN, message_fields
from imagefleet.records.record import RecordLog

#: Campaigns of one load whose jobs are counted: each has a record of its own.
MAX_CAMPAIGNS = 1_000


@dataclass(slots=True)
class _Run:
    """Positions in a row with jobs of one campaign; None: without a job that is to be sent."""

    campaign: str | None
    start: int
    end: int


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
    """Jobs that were not sent, since their campaigns were cancelled."""
    _runs: deque[_Run] = field(default_factory=deque, init=False)
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

        *only* is the campaign of all of them, if they have only one: nothing follows then. A
        position without a body is a job of it that was sent before.
        """
        position = start
        for body in bodies:
            campaign = only or (None if body is None else _campaign_of(body))
            if campaign is not None and self.is_cancelled(campaign):
                if campaign not in self.left_out:
                    self.notice(f"campaign {campaign} was cancelled: no more of its jobs are sent")
                if only and total is not None:
                    self.left_out[campaign] = total - position
                    return
                self.left_out[campaign] += 1
                body = campaign = None  # noqa: PLW2901 - the position stays
            self._add(campaign, position)
            position += 1
            yield body

    def confirm(self, confirmed: int) -> None:
        """The positions below *confirmed* are stored."""
        while self._runs and self._runs[0].start < confirmed:
            run = self._runs[0]
            end = min(run.end, confirmed)
            if run.campaign is not None:
                self._count(run.campaign, end - run.start)
            run.start = end
            if run.start == run.end:
                self._runs.popleft()

    async def note(self) -> None:
        """Notes how many jobs are sent; where that fails, the load goes on."""
        for campaign, jobs in list(self.sent.items()):
            if self._is_refused or self._noted.get(campaign) == jobs:
                continue
            try:
                await self.records.sent(campaign, jobs, self.load_id)
            except errors.SetupError as error:
                self._is_refused = True
                self.notice(
                    "how many jobs are sent is not recorded, so `imagefleet status` does not"
                    f" know it: {error.message}"
                )
            except errors.TransientError as error:
                self.notice(f"how many jobs are sent cannot be recorded now: {error.message}")
            else:
                self._noted[campaign] = jobs

    def _add(self, campaign: str | None, position: int) -> None:
        if self._runs and self._runs[-1].campaign == campaign:
            self._runs[-1].end = position + 1
        else:
            self._runs.append(_Run(campaign, position, position + 1))

    def _count(self, campaign: str, jobs: int) -> None:
        if campaign in self.sent or len(self.sent) < MAX_CAMPAIGNS:
            self.sent[campaign] += jobs
        elif not self._has_too_many:
            self._has_too_many = True
            self.notice(
                f"these are jobs of more than {MAX_CAMPAIGNS:,} campaigns: how many are sent is not"
                " recorded for the others"
            )


def _campaign_of(body: str) -> str:
    return message_fields(body).get("campaign") or DEFAULT_CAMPAIGN
