"""Reads failed jobs: by their records, or by the messages of the poison queue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagefleet import errors
from imagefleet.aio import Fleet
from imagefleet.job.message import (
    DEFAULT_CAMPAIGN,
    DELIVERIES_FIELD,
    FAILURE_FIELD,
    SIGNATURE_FIELD,
    job_key,
    message_fields,
)
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Entry, Selection
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobStore

#: The reason given for a message that is in the poison queue by mistake.
NO_RECORD = "not a record of a failed job"

#: The fields of a failure that are shown.
SHOWN = {"id", "campaign", "error", "reason", "attempts", "worker", "at", "stage", "source"}

#: Kinds of failures that are counted apart: a reason may name what no other job has.
MOST_KINDS = 1000

#: Jobs whose images are looked for at the same time.
_LOOKED_UP = 32


@dataclass(slots=True)
class Listing:
    """The failed jobs counted by error, and the first of them."""

    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    others: int = 0
    """Failed jobs of further kinds, beyond those that are counted apart."""
    jobs: list[dict[str, Any]] = field(default_factory=list)
    unrecorded: int = 0
    """Messages of the poison queue that were not counted, about; 0 where these were."""

    @property
    def count(self) -> int:
        return self.errors.total() + self.others

    def add(self, kind: tuple[str, str]) -> None:
        """Counts a failed job."""
        if kind in self.errors or len(self.errors) < MOST_KINDS:
            self.errors[kind] += 1
        else:
            self.others += 1

    def as_record(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "errors": [
                {"error": error, "reason": reason, "count": count}
                for (error, reason), count in self.errors.most_common()
            ],
            "other_errors": self.others,
            "jobs": self.jobs,
            "unrecorded": self.unrecorded,
        }


def entries(fleet: Fleet, selection: Selection, *, from_queue: bool) -> AsyncIterator[Entry]:
    """The selected failed jobs."""
    if from_queue:
        return dead_letter_queue.browse(fleet.storage, selection)
    return dead_letter_queue.recorded(fleet.storage, selection)


async def listing(fleet: Fleet, selection: Selection, limit: int, *, from_queue: bool) -> Listing:
    """Counts the selected failed jobs, and describes the first of them."""
    found = Listing()
    shown: list[Entry] = []
    check = fleet.checks_signatures() if fleet.keys.trusted else None
    async for entry in entries(fleet, selection, from_queue=from_queue):
        record = entry.record
        found.add((record.error, record.reason) if record else (NO_RECORD, ""))
        if len(found.jobs) < limit:
            shown.append(entry)
            found.jobs.append(facts(entry))
            if check is not None:
                found.jobs[-1]["signed"] = await check.is_signed(entry, fleet.storage.blobs)
    for start in range(0, len(shown), _LOOKED_UP):
        some = shown[start : start + _LOOKED_UP]
        done = await dead_letter_queue.are_completed(fleet.storage, some)
        for job, is_completed in zip(found.jobs[start:], done, strict=False):
            job["completed_since"] = is_completed
    if not from_queue:
        found.unrecorded = await dead_letter_queue.unrecorded(fleet.storage)
    return found


async def find(fleet: Fleet, selection: Selection, *, from_queue: bool) -> list[dict[str, Any]]:
    """The selected failed jobs, each with its message; raises SetupError if there is none."""
    blobs = fleet.storage.blobs
    found = [
        {**facts(entry), "job": await _job(entry, blobs)}
        async for entry in entries(fleet, selection, from_queue=from_queue)
    ]
    if not found:
        hint = ""
        if not from_queue and (count := await dead_letter_queue.unrecorded(fleet.storage)):
            hint = f"; {count:,} messages there have no record: add --from-queue to look at them"
        raise errors.SetupError(no_such_job(selection, fleet.storage) + hint)
    return found


def no_such_job(selection: Selection, storage: Storage) -> str:
    job = job_key(selection.campaign, selection.id)
    return f"no failed job {job!r} in {storage.poison.name}; `imagefleet failed` lists those there"


def facts(entry: Entry) -> dict[str, Any]:
    """A failed job without its message."""
    if entry.record is None:
        known = {"id": entry.message.id, "error": NO_RECORD}
    else:
        shown = SHOWN if entry.record.stages > 1 else SHOWN - {"stage"}
        known = entry.record.model_dump(mode="json", include=shown, exclude_none=True)
    return {**known, "message_id": entry.message.id}


async def exported(entry: Entry, blobs: BlobStore) -> dict[str, Any]:
    """A whole job to load, with why it failed; raises JobError if its message is lost or bad."""
    if entry.record is None:
        raise errors.JobError(f"it is {NO_RECORD}")
    try:
        fields = message_fields(await entry.record.message(blobs))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise errors.JobError("its message is no job in JSON")
    # A signature is of the fields as they were: a load signs the mended job.
    for name in (DELIVERIES_FIELD, SIGNATURE_FIELD, FAILURE_FIELD):
        fields.pop(name, None)
    named = {"id": entry.id}
    if entry.record.campaign != DEFAULT_CAMPAIGN:
        named["campaign"] = entry.record.campaign
    shown = SHOWN - {"id", "campaign", "stage"}
    reasons = entry.record.model_dump(mode="json", include=shown, exclude_none=True)
    # A job without an id took its message's: it stays the same job.
    given = {name: each for name, each in fields.items() if each is not None or name not in named}
    return named | given | {FAILURE_FIELD: reasons}


def sources_of(path: Path) -> frozenset[str]:
    """The failures of the jobs in a file that `imagefleet failed --export` has written.

    Raises:
        SetupError: it cannot be read, or has none.
    """
    try:
        with path.open("rb") as lines:
            sources = frozenset(source for source in map(_source, lines) if source is not None)
    except OSError as error:
        raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None
    if not sources:
        raise errors.SetupError(
            f"{path} has no failed jobs: give a file that `imagefleet failed --export` has written"
        )
    return sources


def _source(line: bytes) -> str | None:
    try:
        source = json.loads(line)[FAILURE_FIELD]["source"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return source if isinstance(source, str) else None


async def _job(entry: Entry, blobs: BlobStore) -> object:
    """The job's fields, or its message where that is not JSON."""
    body = entry.message.body
    if entry.record is not None:
        try:
            body = await entry.record.message(blobs)
        except errors.JobError as error:
            return f"({error.message})"
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body
