"""Failed jobs: what is kept of a job that cannot succeed, and how it gets to the poison queue."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError

from imagefleet import errors
from imagefleet.job.message import Job
from imagefleet.storage import protocol

#: An engine's error may carry a page of shapes; its first lines say what was wrong.
MAX_REASON_CHARACTERS = 2_000

_MAX_NAME_CHARACTERS = 200

#: A record comes out of a queue, so from a stranger: it names no blob but those that `bury` wrote.
BlobName = Annotated[str, StringConstraints(pattern=r"^failed/[0-9a-f]{32}\.txt$")]


class FailedJob(BaseModel):
    """One failed job as it lies in the poison queue.

    The message that a replay sends is in one of three places: `body` as it is, `packed_body`
    (zlib, base64) where it would not fit, `body_blob` where it does not fit even so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    id: str
    campaign: str | None = None
    error: str
    reason: str
    attempts: int
    worker: str
    failed_at: AwareDatetime
    body: str | None = None
    packed_body: str | None = None
    body_blob: BlobName | None = None

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Reads a message of the poison queue; None where it is no failed job's record."""
        try:
            return cls.model_validate(json.loads(text))
        except (ValidationError, ValueError, RecursionError):
            return None

    def encode(self) -> str:
        """The message for the poison queue: ASCII, so that neither XML nor UTF-8 can refuse it."""
        return json.dumps(
            self.model_dump(mode="json", exclude_none=True), separators=(",", ":"), sort_keys=True
        )

    async def message(self, blobs: protocol.BlobStore) -> str:
        """The message that brings the job back into its queue.

        Raises:
            JobError: the record does not give it back.
        """
        if self.body is not None:
            return self.body
        if self.packed_body is not None:
            return _unpack(self.packed_body)
        stored = await blobs.read(self.body_blob) if self.body_blob else None
        if stored is None:
            raise errors.JobError(f"the message of job {self.id} is gone: {self.body_blob}")
        return stored.decode(errors="replace")


async def add(
    storage: protocol.Storage,
    message: protocol.LeasedMessage,
    job: Job | None,
    error: errors.FleetError,
    worker: str,
) -> None:
    """Moves a job to the poison queue: added there first, then deleted from the job queue.

    A kill between the two leaves the job in both queues; it fails once more and is never lost.

    Raises:
        LeaseLost: the record is added, but another worker has the message by now.
    """
    body = _replayable(message, job)
    record = FailedJob(
        id=(job and job.id) or message.id,
        campaign=job.campaign if job else None,
        error=type(error).__name__,
        reason=_clipped(error.message, MAX_REASON_CHARACTERS),
        attempts=message.delivery_count,
        worker=_clipped(worker, _MAX_NAME_CHARACTERS),
        failed_at=datetime.now(UTC),
        body=body,
    )
    await storage.poison.send([await _fitted(record, body, storage.blobs)])
    await storage.queue.delete(message)


def _replayable(message: protocol.LeasedMessage, job: Job | None) -> str:
    if job is None:
        return message.body
    body = job.to_message()
    # The id and seed that the job was given may lift a message that was full over the limit.
    return body if protocol.message_bytes(body) <= protocol.MAX_MESSAGE_BYTES else message.body


async def _fitted(record: FailedJob, body: str, blobs: protocol.BlobStore) -> str:
    packed = base64.b64encode(zlib.compress(body.encode(), 9)).decode()
    for fitting in (record, record.model_copy(update={"body": None, "packed_body": packed})):
        text = fitting.encode()
        if protocol.message_bytes(text) <= protocol.MAX_MESSAGE_BYTES:
            return text
    # Only what is no prompt at all packs so badly. The name follows from the content, so a blob
    # that is there already is the right one.
    data = body.encode()
    name = f"failed/{hashlib.blake2b(data, digest_size=16).hexdigest()}.txt"
    await blobs.create(name, data, "text/plain; charset=utf-8", {})
    return record.model_copy(update={"body": None, "body_blob": name}).encode()


def _unpack(packed: str) -> str:
    try:
        # Bounded: 48 KiB may be made to unfold to 48 MiB.
        data = zlib.decompressobj().decompress(
            base64.b64decode(packed, validate=True), protocol.MAX_MESSAGE_BYTES
        )
        return data.decode()
    except (binascii.Error, zlib.error, ValueError) as error:
        raise errors.JobError(f"the record's packed message is damaged: {error}") from None


def _clipped(text: str, length: int) -> str:
    # Half a surrogate pair in an error's text is text that no record could carry.
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= length else whole[: length - 1] + "…"
