"""Notes jobs as sent, for tests that have no use for their messages."""

import itertools
from collections.abc import Iterable
from datetime import UTC, datetime

from imagefleet.records.ledger import Ledger, entry_of
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage


async def note(
    storage: Storage,
    campaign: str,
    jobs: int,
    first: int = 0,
    *,
    ids: Iterable[str] = (),
) -> None:
    """Notes that so many jobs were sent: *ids*, the others by names from number *first* on."""
    ledger = Ledger(storage, campaign)
    others = (f"sent-{number}" for number in itertools.count(first))
    for job_id in itertools.islice(itertools.chain(ids, others), jobs):
        ledger.pending += entry_of(job_id, "0" * 64)
    await ledger.note()


async def begin(storage: Storage, campaign: str, jobs: int) -> None:
    """The same, and one of them is completed."""
    await note(storage, campaign, jobs, ids=["done"])
    done = {"id": "done", "digest": "0" * 64, "blob": f"{campaign}/done.png"}
    record = Record(
        outcome="completed", campaign=campaign, at=datetime.now(UTC), **done
    )
    await RecordLog(storage.blobs, "w1").add([record])
