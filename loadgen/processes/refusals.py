"""How often a storage has asked to slow down."""

from __future__ import annotations

import dataclasses

from imagefleet import errors, retry


class Refusals:
    """Counts requests that the storage was too busy for; they are made again, more slowly."""

    def __init__(self) -> None:
        self.count = 0
        #: The retry policy of the storage that is filled.
        self.policy = dataclasses.replace(retry.PATIENT, on_retry=self._note)

    def take(self) -> int:
        """The number of refusals since the last call."""
        taken, self.count = self.count, 0
        return taken

    def _note(self, error: errors.TransientError) -> None:
        self.count += isinstance(error, errors.BusyError)
        retry.log_retry(error)
