"""The tree of errors; the class decides what happens to the job.

FleetError
├── JobError        the job can never succeed        -> poison queue at once
├── TransientError  a later attempt may succeed      -> retried; poison queue after the last one
├── LeaseLost       another worker has the message   -> dropped, never acknowledged
├── JobCancelled    its campaign was cancelled       -> acknowledged with a record
├── NodeError       this machine cannot do its work  -> jobs handed back, exit, reallocation
└── SetupError      the operator has to act          -> one line on the terminal, exit code 2

The docstring of a class is its default message.
"""

import errno
import inspect

#: `OSError.errno` of a write that failed for want of space.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class FleetError(Exception):
    """Something went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.getdoc(type(self)))

    @property
    def message(self) -> str:
        return str(self.args[0])


class JobError(FleetError):
    """The job can never succeed."""


class InvalidMessageError(JobError):
    """The message is not a valid job."""


class UnknownStageError(InvalidMessageError):
    """The message asks for a stage of a job whose stage before is not stored."""


class UntrustedJobError(JobError):
    """The job is not signed with the trusted key."""

    #: It is, and for this fleet and queue, but its date has passed.
    is_expired = False


class MissingFileError(JobError):
    """The job names a LoRA, an embedding or a model that does not exist."""


class UnusableFileError(JobError):
    """The job names a LoRA, an embedding or a model that cannot be used."""


class NameTakenError(JobError):
    """The name of the job's image is taken by another job."""


class MisfitError(JobError):
    """The file stored under an image's name is not the one that its record describes."""


class TransientError(FleetError):
    """The storage or the engine failed temporarily."""

    #: The request may have been carried out, because only its reply was lost.
    outcome_is_unknown = False

    #: Seconds that the server asks to wait before the next attempt, if it does.
    after_seconds: float | None = None


class NoAccessError(TransientError):
    """The credentials of the storage have expired; waiting for new ones."""


class UnsettledFileError(TransientError):
    """A file is being written; the job waits until it is whole."""


class BusyError(TransientError):
    """The storage asks to slow down: it has done nothing."""


class StorageFullError(TransientError):
    """The disk of the storage is full; waiting for space."""


class LeaseLost(FleetError):  # noqa: N818 - the established term
    """The lease on the message is lost: another worker may have it."""


class JobCancelled(FleetError):  # noqa: N818 - no error of anybody
    """The campaign of the job was cancelled."""


class NodeError(FleetError):
    """This machine cannot do its work."""


class SetupError(FleetError):
    """A setting, a credential or a resource is missing or wrong."""


class MissingResourceError(SetupError):
    """A queue or container does not exist, or there is no token for it."""


class NoTokenError(MissingResourceError):
    """There is no SAS token for the resource."""
