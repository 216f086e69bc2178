"""What a worker holds: jobs from their lease to their end, and their images in between."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from imagefleet.job.message import Job
from worker.leases import Lease


@dataclass(slots=True, eq=False)
class InFlightJob:
    """One leased message. It is settled once: acknowledged, buried, retried, dropped, handed back.

    Two stages may want to settle it at the same time (one image fails while another is stored);
    whoever calls `settle` first does it.
    """

    lease: Lease
    pulled_at: float = field(default_factory=time.monotonic)
    job: Job | None = None
    images_to_generate: int = 0
    images_to_store: int = 0
    images_written: int = 0
    ahead: bool = True  # of the engine: pulled, and not generated yet
    submitted: bool = False  # every image is at the engine's door, or further
    settled: bool = False

    @property
    def id(self) -> str:
        """The job's own id; its message's where it has none, or was not read."""
        return (self.job.id if self.job else None) or self.lease.message.id

    def settle(self) -> bool:
        """Whether the caller is the one who settles this job."""
        first = not self.settled
        self.settled = True
        return first


@dataclass(slots=True, eq=False)
class InFlightImage:
    """One image of a job on its way; *ready_at* is when it was ready for the engine."""

    owner: InFlightJob
    job: Job
    index: int
    size: tuple[int, int]
    ready_at: float = field(default_factory=time.monotonic)
