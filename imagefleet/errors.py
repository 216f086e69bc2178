"""One tree of errors; the class decides what happens to the job.

FleetError
├── JobError        the job can never succeed        -> poison queue at once
├── TransientError  it may succeed another time      -> retried, poison after the last attempt
├── LeaseLost       another worker has the message   -> dropped, never acknowledged
├── NodeError       this machine cannot do its work  -> everything handed back, exit, replace me
└── SetupError      the operator has to act          -> one line on the terminal, exit code 2
"""

from __future__ import annotations

import inspect


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


class MissingFileError(JobError):
    """The job names a LoRA or a model that does not exist."""


class UnusableFileError(JobError):
    """The job names a LoRA or a model that does not fit."""


class TransientError(FleetError):
    """The storage or the engine failed in a way that may pass."""


class NoAccessError(TransientError):
    """The storage's credentials have run out, and new ones are awaited."""


class LeaseLost(FleetError):  # noqa: N818 - the term of the field, and of the design
    """The lease on the message is lost: another worker may have it."""


class NodeError(FleetError):
    """This machine cannot do its work."""


class SetupError(FleetError):
    """A setting, a credential or a resource is missing or wrong."""
