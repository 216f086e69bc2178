"""New results as they come, until the campaign's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from fleet import console
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage

#: Seconds between two polls, each of which is a listing and a read for each shard that has grown.
SECONDS = 5.0

#: Polls without a result after which a campaign without pending jobs has ended: its filler may
#: be slower than the workers. One that has not ended is counted again after twice as many: on Azure
#: that is a read of each shard.
_QUIET_POLLS = 3


async def follow(
    storage: Storage, follower: reader.Follower, campaign: str, outcomes: Collection[str]
) -> AsyncIterator[list[Record]]:
    """New results, polled for; an image comes twice where two workers drew it.

    Ends with the campaign, where its filler has noted how many jobs it has sent.
    """
    quiet, count_at = 0, _QUIET_POLLS
    while True:
        try:
            if records := await follower.poll():
                quiet, count_at = 0, _QUIET_POLLS
            elif (quiet := quiet + 1) >= count_at:
                count_at = 2 * quiet
                if (await reader.counts(storage, campaign)).pending == 0:
                    return
        except errors.TransientError as error:
            console.print_warning(f"trying again: {error.message}")
            records = []
        yield [record for record in records if record.outcome in outcomes]
        if not records:
            await asyncio.sleep(SECONDS)
