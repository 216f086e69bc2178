"""Failed jobs as records in the poison queue: how one is added, selected and checked.

Anybody with a worker's token may add a record. So its job must be one that a worker of this version
takes before it is sent again, and with trusted keys it must be signed as well.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from imagefleet import errors
from imagefleet.job import chain, sizes
from imagefleet.job.change import Change
from imagefleet.job.message import (
    DEFAULT_CAMPAIGN,
    DELIVERIES_FIELD,
    Job,
    SafeId,
    fields_if_any,
    is_signed,
    message_fields,
    message_text,
    read_job,
)
from imagefleet.records.record import MAX_NAME_CHARACTERS, Record
from imagefleet.signing import SIGNATURE_FIELD, JobSigner, TrustedJobs
from imagefleet.storage import protocol
from imagefleet.storage.deliveries import Deliveries, without_deliveries
from imagefleet.storage.open import Storage
from imagefleet.storage.routing import models

#: An engine's error may list a page of tensor shapes; its first lines name the cause.
MAX_REASON_CHARACTERS = 2_000

_UNSIGNED = "it is not signed with your key"

_SAFE_ID: TypeAdapter[str] = TypeAdapter(SafeId)

#: Records in a queue are untrusted: they may name only blobs that `add` writes.
BlobName = Annotated[str, StringConstraints(pattern=r"^failed/[0-9a-f]{32}\.txt$")]


class FailedJob(Record, extra="forbid"):
    """The record of a failed job in the poison queue.

    The message that a replay sends is in `body`, or in the blob `body_blob` if it would not fit.
    """

    outcome: Literal["failed"]
    error: str = Field(default="", max_length=MAX_NAME_CHARACTERS)
    reason: str = Field(default="", max_length=sizes.MAX_MESSAGE_BYTES)
    body_blob: BlobName | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parses a message of the poison queue; None if it is not a record."""
        try:
            return cls.model_validate(json.loads(text))
        except (ValidationError, ValueError, RecursionError):
            return None

    def encode(self) -> str:
        """The message for the poison queue, in ASCII, which XML can always carry."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(fields, separators=(",", ":"), sort_keys=True)

    async def message(self, blobs: protocol.BlobStore) -> str:
        """The message that replays the job; raises JobError if it is damaged or lost."""
        if self.body is not None:
            return self.body
        # Bounded: whoever forged the record may have stored gigabytes under the name.
        limit = sizes.MAX_MESSAGE_BYTES
        stored = await blobs.read(self.body_blob, limit) if self.body_blob else None
        if stored is None:
            raise errors.JobError(
                f"the message of job {self.id} is missing: {self.body_blob}"
            )
        if _blob_name(stored) != self.body_blob:
            raise errors.JobError(
                f"{self.body_blob} is not the message of job {self.id}"
            )
        return stored.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of the poison queue; `record` is None if it is not a failed job's record."""

    message: protocol.Message
    record: FailedJob | None

    @classmethod
    def of(cls, record: Record) -> Self:
        """A failed job, by its record beside the images, as the poison queue would have it."""
        message = protocol.Message(
            record.source or record.id, record.body or "", 0, record.at
        )
        return cls(
            message,
            FailedJob(**{name: each for name, each in record if each is not None}),
        )

    @property
    def id(self) -> str:
        return self.record.id if self.record else self.message.id

    @property
    def source(self) -> str:
        """Names the failure: two entries of one source are copies.

        It covers the job, lest a record that somebody made up pass for the one to keep.
        """
        record = self.record
        if record is None or record.source is None:
            return self.message.id
        # Before the second one more images were stored, perhaps.
        body = record.body and without_deliveries(record.body)
        told = (record.source, record.id, body, record.body_blob)
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects the failed jobs that meet all of the given conditions.

    *error* is a part of the error's class or reason, ignoring case. *id* is the job's or the
    message's; what is no record of a job has its message's, and is in the campaign `default`.
    *model* is the one that the job names; jobs whose message is in a blob have none.
    """

    error: str | None = None
    campaign: str | None = None
    id: str | None = None
    model: str | None = None

    def matches(self, entry: Entry) -> bool:
        if self.id is not None and self.id not in {entry.id, entry.message.id}:
            return False
        record = entry.record
        if record is None:
            is_named = self.id is not None and self.campaign == DEFAULT_CAMPAIGN
            is_other = self.error is not None or self.model is not None
            return not is_other and (is_named or self.campaign is None)
        if self.model is not None and self.model != models.model_of(
            record.body or "{}"
        ):
            return False
        if self.campaign is not None and self.campaign != record.campaign:
            return False
        return self.error is None or (
            self.error.lower() in f"{record.error}: {record.reason}".lower()
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A selected message that stays in the queue, and why."""

    id: str
    reason: str
    is_unsigned: bool = False


class Chosen(NamedTuple):
    """A failed job that is moved; where it is replayed, with its message and its job."""

    entry: Entry
    body: str = ""
    job: Job | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The conditions under which a failed job is sent again, and what is changed of it."""

    trusted: TrustedJobs | None = None
    change: Change | None = None
    signer: JobSigner | None = None
    """Signs what was signed anew; without it, a job whose date has passed stays."""

    @property
    def sendable(self) -> TrustedJobs | None:
        """Trusted keys for jobs to be sent: without a signer, their date must not be past."""
        if self.trusted is None or self.signer is not None:
            return self.trusted
        return dataclasses.replace(self.trusted, at_any_time=False)

    def dated(self, body: str) -> str:
        """The message of a job of `sendable`, with a signature of now where it can be signed."""
        if self.signer is None:
            return body
        fields = message_fields(body)  # of a job that may be invalid
        for name in (DELIVERIES_FIELD, chain.STAGE_FIELD, SIGNATURE_FIELD):
            fields.pop(name, None)
        return message_text(fields | {SIGNATURE_FIELD: self.signer.sign(fields)})

    async def job(self, entry: Entry, blobs: protocol.BlobStore) -> tuple[str, Job]:
        """The message that replays a job, and the job.

        Raises UntrustedJobError if none of the trusted keys has signed it, JobError if it is none.
        """
        if entry.record is None:
            raise errors.JobError("it is not a record of a failed job")
        body = await entry.record.message(blobs)
        sizes.checked_messages([body])
        if self.trusted is not None and not is_signed(body):
            raise errors.UntrustedJobError(_UNSIGNED)
        try:
            job = read_job(body, entry.message.id, self.sendable)
            return (
                self.change.apply(body, entry.id)
                if self.change
                else (self.dated(body), job)
            )
        except errors.UntrustedJobError as error:
            if error.is_expired:
                raise errors.JobError(error.message) from None
            raise errors.UntrustedJobError(_UNSIGNED) from None
        except errors.InvalidMessageError as error:
            if self.change is not None:  # which may make it valid
                return self.change.apply(body, entry.id)
            raise errors.InvalidMessageError(
                f"its job is not valid for this version: {error.message}"
            ) from None

    async def choose(
        self, storage: Storage, entries: list[Entry], _selection: Selection
    ) -> tuple[list[Chosen], list[Refused]]:
        """Splits entries into those that can be sent again, and those that stay."""
        chosen, refused = list[Chosen](), list[Refused]()
        for entry in entries:
            try:
                chosen.append(Chosen(entry, *await self.job(entry, storage.blobs)))
            except errors.JobError as error:
                is_unsigned = isinstance(error, errors.UntrustedJobError)
                refused.append(Refused(entry.id, error.message, is_unsigned))
        return chosen, refused

    async def is_signed(self, entry: Entry, blobs: protocol.BlobStore) -> bool:
        """True if one of the trusted keys has signed the job in a message of the poison queue."""
        body = entry.message.body
        try:
            if entry.record is not None:
                body = await entry.record.message(blobs)
            read_job(body, entry.message.id, self.trusted)
        except errors.UntrustedJobError:
            return False
        except errors.InvalidMessageError:
            return is_signed(body)
        except errors.JobError:  # its message is lost or damaged
            return False
        return True


async def add(
    storage: Storage,
    message: protocol.LeasedMessage,
    job: Job | None,
    error: errors.FleetError,
    worker: str,
    *,
    reason: str | None = None,
    stored: Collection[int] = (),
) -> FailedJob:
    """Adds a job's record to the poison queue; its message is the caller's to delete afterwards.

    The *reason* is by default the error's message. Sent again, it draws no image of those *stored*.

    A crash between the two leaves the job in both queues: it fails once more and is not lost.
    """
    body = _replayable(message, job)
    if job is not None and job.images > 1 and stored:  # which are then looked for
        body = Deliveries().write_to(body) or body
    known: dict[str, Any]
    if job is not None:
        known = {"id": job.id, "campaign": job.campaign, "digest": job.digest}
        known |= {"stage": job.stage, "stages": job.stages}
    else:
        # Who has not signed a job may name any campaign, and anybody numbers a job's stage.
        is_forged = isinstance(error, errors.UntrustedJobError) and not error.is_expired
        is_forged = is_forged or isinstance(error, errors.UnknownStageError)
        known = {} if is_forged else _named(body)
    record = FailedJob(
        outcome="failed",
        **{"id": message.id} | {name: each for name, each in known.items() if each},
        error=type(error).__name__,
        reason=_truncated(reason or error.message, MAX_REASON_CHARACTERS),
        attempts=Deliveries.of(message).failed + 1,
        worker=_truncated(worker, MAX_NAME_CHARACTERS),
        at=storage.blobs.clock.now(),
        source=job.source(message.id) if job is not None else message.id,
        body=body,
    )
    await storage.poison.send([await _encode_to_fit(record, body, storage.blobs)])
    return record


def _named(body: str) -> dict[str, Any]:
    """The id and campaign that even an invalid message gives: once mended, it is the same job."""
    fields = fields_if_any(body)
    known = {}
    for name in ("id", "campaign"):
        with contextlib.suppress(ValidationError):
            known[name] = _SAFE_ID.validate_python(fields.get(name), strict=True)
    return known


def _replayable(message: protocol.LeasedMessage, job: Job | None) -> str:
    if job is None or is_signed(
        message.body
    ):  # a signature is of the fields as they were sent
        body = without_deliveries(message.body)
        if job is None or job.place is None:
            return body
        return message_text(fields_if_any(body) | {chain.STAGE_FIELD: job.stage_field})
    body = job.to_message()
    # The job's generated id and seed may make a full message too large.
    return body if sizes.fits(body) else message.body


async def _encode_to_fit(
    record: FailedJob, body: str, blobs: protocol.BlobStore
) -> str:
    if sizes.fits(text := record.encode()):
        return text
    data = body.encode()
    # The name is a hash of the content, so an existing blob is the right one.
    name = _blob_name(data)
    await blobs.create(name, data, "text/plain; charset=utf-8", {})
    return record.model_copy(update={"body": None, "body_blob": name}).encode()


def _blob_name(message: bytes) -> str:
    return f"failed/{hashlib.blake2b(message, digest_size=16).hexdigest()}.txt"


def _truncated(text: str, length: int) -> str:
    # A lone surrogate in the text of an error could not be encoded.
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= length else whole[: length - 1] + "…"
