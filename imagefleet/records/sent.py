"""How many jobs one program has sent to each campaign, noted in the campaigns' records.

The sums of all its submissions are in one shard for each campaign: a program that submits a million
jobs one by one must not leave a million shards, each of which is listed and read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.records.record import RecordLog
from imagefleet.storage.protocol import BlobStore

#: Campaigns whose sums are kept: those that were sent to last.
_MAX_CAMPAIGNS = 1_000

#: The writer in the names of the shards that the client writes.
_WRITER = "client"


@dataclass(slots=True, eq=False)
class _Campaign:
    """One campaign's jobs so far; *log* counts as a filler of its own."""

    log: RecordLog
    sent: int = 0
    noted: int = 0
    writing: asyncio.Task[None] | None = None


class SentJobs:
    """The jobs of one program's submissions by campaign."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._campaigns: OrderedDict[str, _Campaign] = OrderedDict()

    def add(self, campaign: str, jobs: int) -> None:
        """Counts so many more of a campaign's jobs as sent."""
        if campaign not in self._campaigns:
            self._campaigns[campaign] = _Campaign(RecordLog(self._blobs, _WRITER))
        self._campaigns.move_to_end(campaign)
        self._campaigns[campaign].sent += jobs

    async def note(self, campaign: str) -> None:
        """Notes a campaign's sum; those who ask at the same time share a write.

        Raises TransientError if it cannot be written now (the next note has it), and SetupError if
        it may not be written.
        """
        known = self._campaigns.get(campaign)
        wanted = known.sent if known else 0
        while known and known.noted < wanted:
            if known.writing is None:
                known.writing = asyncio.create_task(self._write(campaign, known))
            # One who is cancelled must not end it: nobody would know how long the shard is.
            await asyncio.shield(known.writing)

    async def close(self) -> None:
        """Ends what nobody waits for any more."""
        tasks = [each.writing for each in self._campaigns.values() if each.writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, campaign: str, known: _Campaign) -> None:
        jobs = known.sent
        try:
            await known.log.sent(campaign, jobs)
        except errors.SetupError:
            self._campaigns.pop(campaign, None)
            raise
        finally:
            known.writing = None
        known.noted = jobs
        self._forget()

    def _forget(self) -> None:
        too_many = max(0, len(self._campaigns) - _MAX_CAMPAIGNS)
        for name, each in list(itertools.islice(self._campaigns.items(), too_many)):
            if each.noted == each.sent and each.writing is None:
                del self._campaigns[name]
