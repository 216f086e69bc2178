"""Records of failed jobs: how one is made, selected and checked.

Anybody with a worker's token may add a record. So its job must be one that a worker of this version
takes before it is sent again, and with trusted keys it must be signed as well.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, NamedTuple, Self

from pydantic import Field

from imagefleet.errors import (
    FleetError,
    InvalidMessageError,
    JobError,
    UnknownStageError,
    UntrustedJobError,
)
from imagefleet.job import chain, sizes
from imagefleet.job.change import Change
from imagefleet.job.message import (
    DELIVERIES_FIELD,
    Job,
    fields_if_any,
    is_safe_id,
    is_signed,
    message_fields,
    message_text,
    read_job,
)
from imagefleet.keeping.rule import Keep
from imagefleet.records.record import MAX_NAME_CHARACTERS, Record
from imagefleet.signing import SIGNATURE_FIELD, JobSigner, TrustedJobs
from imagefleet.storage.deliveries import Deliveries, without_deliveries
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.storage.routing import models
from imagefleet.validation import JSONDict

#: An engine's error may list a page of tensor shapes; its first lines name the cause.
MAX_REASON_CHARACTERS = 2_000

_UNSIGNED = "it is not signed with your key"


class FailedJob(Record, extra="forbid"):
    """The record of a failed job as a message of the poison queue.

    A `body` that would make the message too large is only in the record beside the images.
    """

    outcome: Literal["failed"]
    error: str = Field(default="", max_length=MAX_NAME_CHARACTERS)
    reason: str = Field(default="", max_length=sizes.MAX_MESSAGE_BYTES)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parses a message of the poison queue; None if it is not a record."""
        try:
            return cls.model_validate(json.loads(text))
        except (ValueError, RecursionError):
            return None

    def encode(self) -> str:
        """The message for the poison queue, in ASCII, which XML can always carry."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
        if sizes.fits(text):
            return text
        return self.model_copy(update={"body": None}).encode()


class Selection(NamedTuple):
    """Selects the failed jobs that meet all of the given conditions.

    *error* is a part of the error's class or reason, ignoring case. *id* is the job's or its
    message's. *model* is the one that the job names. With *keep* not those that failed, but those
    that were dropped, and that this rule may keep by their scores.
    """

    error: str | None = None
    campaign: str | None = None
    id: str | None = None
    model: str | None = None
    keep: Keep | None = None

    def matches(self, record: Record) -> bool:
        if record.outcome != ("dropped" if self.keep else "failed"):
            return False
        # A near-duplicate is stored, and nothing draws it again.
        if self.keep and not (
            record.body
            and self.keep.may_keep([image.scores for image in record.dropped])
        ):
            return False
        if self.id not in {None, record.id, record.source}:
            return False
        if self.campaign not in {None, record.campaign}:
            return False
        if self.model is not None and self.model != models.model_of(record.body or ""):
            return False
        text = f"{record.error}: {record.reason}"
        return self.error is None or self.error.lower() in text.lower()


@dataclass(frozen=True, slots=True)
class Refused:
    """A selected failed job that is not sent again, and why."""

    id: str
    reason: str


class Chosen(NamedTuple):
    """A failed job that is sent again, with its message and its job."""

    record: Record
    body: str
    job: Job


@dataclass(frozen=True, slots=True)
class Check:
    """The conditions under which a failed job is sent again, and what is changed of it."""

    trusted: TrustedJobs | None = None
    change: Change | None = None
    #: Signs what was signed anew; without it, a job whose date has passed stays.
    signer: JobSigner | None = None

    @property
    def sendable(self) -> TrustedJobs | None:
        """Trusted keys for jobs to be sent: without a signer, their date must not be past."""
        if self.trusted is None or self.signer is not None:
            return self.trusted
        return replace(self.trusted, at_any_time=False)

    def dated(self, body: str) -> str:
        """The message of a job of `sendable`, with a signature of now where it can be signed."""
        if self.signer is None:
            return body
        fields = message_fields(body)  # of a job that may be invalid
        for name in (DELIVERIES_FIELD, chain.STAGE_FIELD, SIGNATURE_FIELD):
            fields.pop(name, None)
        return message_text(fields | {SIGNATURE_FIELD: self.signer.sign(fields)})

    def job(self, record: Record) -> tuple[str, Job]:
        """The message that replays a job, and the job.

        Raises UntrustedJobError if none of the trusted keys has signed it, JobError if it is none.
        """
        body = record.body or ""
        sizes.checked_messages([body])
        if self.trusted is not None and not is_signed(body):
            raise UntrustedJobError(_UNSIGNED)
        try:
            job = read_job(body, record.source or record.id, self.sendable)
            return (
                self.change.apply(body, record.id)
                if self.change
                else (self.dated(body), job)
            )
        except UntrustedJobError as error:
            if error.is_expired:
                raise JobError(error.message) from None
            raise UntrustedJobError(_UNSIGNED) from None
        except InvalidMessageError as error:
            if self.change is not None:  # which may make it valid
                return self.change.apply(body, record.id)
            raise InvalidMessageError(
                f"its job is not valid for this version: {error.message}"
            ) from None

    def choose(self, records: Iterable[Record]) -> tuple[list[Chosen], list[Refused]]:
        """Splits failed jobs into those that can be sent again, and those that stay."""
        chosen = list[Chosen]()
        refused = list[Refused]()
        for record in records:
            try:
                chosen.append(Chosen(record, *self.job(record)))
            except JobError as error:
                refused.append(Refused(record.id, error.message))
        return chosen, refused

    def is_signed(self, record: Record) -> bool:
        """True if one of the trusted keys has signed the failed job."""
        body = record.body or ""
        try:
            read_job(body, record.source or record.id, self.trusted)
        except UntrustedJobError:
            return False
        except InvalidMessageError:
            return is_signed(body)
        return True


def failed_job(
    message: LeasedMessage,
    job: Job | None,
    error: FleetError,
    worker: str,
    at: datetime,
    *,
    reason: str | None = None,
    stored: Collection[int] = (),
) -> FailedJob:
    """The record of a job that failed, with what sends it again.

    The *reason* is by default the error's message. Sent again, it draws no image of those *stored*.
    """
    body = replayable(message, job)
    if job is not None and job.images > 1 and stored:  # which are then looked for
        body = Deliveries().write_to(body) or body
    known: JSONDict
    if job is not None:
        known = {
            name: getattr(job, name)
            for name in ("id", "campaign", "digest", "stage", "stages")
        }
    else:
        # Who has not signed a job may name any campaign, and anybody numbers a job's stage.
        is_forged = isinstance(error, UnknownStageError) or (
            isinstance(error, UntrustedJobError) and not error.is_expired
        )
        known = {} if is_forged else _named(body)
    return FailedJob(
        outcome="failed",
        **{"id": message.id} | {name: each for name, each in known.items() if each},
        error=type(error).__name__,
        reason=_truncated(reason or error.message, MAX_REASON_CHARACTERS),
        attempts=Deliveries.of(message).failed + 1,
        worker=_truncated(worker, MAX_NAME_CHARACTERS),
        at=at,
        source=job.source(message.id) if job is not None else message.id,
        body=body,
    )


def _named(body: str) -> JSONDict:
    """The id and campaign that even an invalid message gives: once mended, it is the same job."""
    fields = fields_if_any(body)
    names = (name for name in ("id", "campaign") if is_safe_id(fields.get(name)))
    return {name: fields[name] for name in names}


def replayable(message: LeasedMessage, job: Job | None) -> str:
    """The message that sends a job again."""
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


def _truncated(text: str, length: int) -> str:
    # A lone surrogate in the text of an error could not be encoded.
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= length else whole[: length - 1] + "…"
