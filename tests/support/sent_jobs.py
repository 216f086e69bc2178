"""Notes jobs as sent, for tests that have no use for their messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from imagefleet.records.sent import Ledger, entry_of
from imagefleet.storage.open import Storage


async def note(
    storage: Storage, campaign: str, jobs: int, first: int = 0, *, ids: Iterable[str] = ()
) -> None:
    """Notes that so many jobs were sent: *ids*, the others by names from number *first* on."""
    ledger = Ledger(storage, campaign)
    others = (f"sent-{number}" for number in itertools.count(first))
    for job_id in itertools.islice(itertools.chain(ids, others), jobs):
        ledger.pending += entry_of(job_id, "0" * 64)
    await ledger.note()
