"""Which records of the poison queue may become jobs again: anybody with a worker's token adds some.

A record's job must be one that a worker of this version takes. With trusted keys it must be signed
as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.job.message import Job, is_signed, read_job
from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from imagefleet.storage.dead_letter import Entry
from imagefleet.storage.dead_letter_change import Change

_UNSIGNED = "it is not signed with your key"


@dataclass(frozen=True, slots=True)
class Check:
    """What a failed job must be to be sent again, and what is changed before.

    *takes_invalid*: workers may be newer.
    """

    trusted: TrustedKeys | None = None
    takes_invalid: bool = False
    change: Change | None = None

    async def job(self, entry: Entry, blobs: protocol.BlobStore) -> tuple[str, Job | None]:
        """The message that replays a job, and the job: None if it is invalid, and taken anyway.

        Raises:
            UntrustedJobError: none of the trusted keys has signed it; JobError: it is no job.
        """
        if entry.record is None:
            raise errors.JobError("it is not a record of a failed job")
        body = await entry.record.message(blobs)
        sizes.checked_messages([body])
        if self.trusted is not None and not is_signed(body):
            raise errors.UntrustedJobError(_UNSIGNED)
        try:
            job = read_job(body, entry.message.id, self.trusted)
            return self.change.apply(body, entry.id) if self.change else (body, job)
        except errors.UntrustedJobError:
            raise errors.UntrustedJobError(_UNSIGNED) from None
        except errors.InvalidMessageError as error:
            if self.change is not None:  # which may make it valid
                return self.change.apply(body, entry.id)
            if self.takes_invalid:  # but signed: that is checked first
                return body, None
            raise errors.InvalidMessageError(
                f"its job is not valid for this version: {error.message}"
            ) from None

    async def is_signed(self, entry: Entry, blobs: protocol.BlobStore) -> bool:
        """Whether one of the trusted keys has signed the job in a message of the poison queue."""
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
