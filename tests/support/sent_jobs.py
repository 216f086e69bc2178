"""Notes jobs as sent, for tests that have no use for their messages."""

from __future__ import annotations

from imagefleet.records.sent import Ledger, entry_of
from imagefleet.storage.open import Storage


async def note(storage: Storage, campaign: str, jobs: int, first: int = 0) -> None:
    """Notes that so many jobs were sent, with ids of their own from number *first* on."""
    ledger = Ledger(storage, campaign)
    for number in range(first, first + jobs):
        ledger.pending += entry_of(f"sent-{number}", "0" * 64)
    await ledger.note()
