"""Settings of `imagefleet load`."""

from pydantic import Field

from imagefleet import concurrency
from imagefleet.storage.settings import SignerSettings
from imagefleet.submit import BATCH

#: Finds a node of a hundred that draws wrong within some 20,000 images, for half a percent.
DEFAULT_VERIFY_SHARE = 0.005


#: A load makes jobs as fast as some ten processes send them.
MOST_PROCESSES = 16

#: Jobs from which several processes are worth their start, which takes a second.
_MANY_JOBS = 100_000
_MOST_BY_DEFAULT = 4

#: Jobs in flight, of all processes together: no load is further beyond its checkpoint.
MOST_IN_FLIGHT = 2_048

#: Batches that they are in on Azure, where each job is a request and one slow one holds up a batch.
_BATCHES = 8


class LoadSettings(SignerSettings):
    """Each field is a flag and an IMAGEFLEET_ variable."""

    concurrency: int = Field(
        default=BATCH,
        ge=1,
        le=512,
        description="Jobs that each process has in flight at once; after a kill, at most so many"
        " are sent again.",
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        le=MOST_PROCESSES,
        description="Processes that send; default: 1, and for 100,000 jobs or more on Azure one for"
        " each processor core but the first, 4 at most.",
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Jobs/s at most; default: no limit.",
    )
    verify_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the jobs whose first image is drawn a second time, by another worker,"
        " for `imagefleet verify`; default: 0.005, that is 0.5 % more work, and 0 with local"
        " storage.",
    )

    @property
    def second_drawings(self) -> float:
        if self.verify_share is not None:
            return self.verify_share
        return 0.0 if self.is_local else DEFAULT_VERIFY_SHARE

    def processes_for(self, jobs: int) -> int:
        """How many send so many *jobs*."""
        if self.processes is not None:
            return self.processes
        if self.is_local or jobs < _MANY_JOBS:
            return 1  # local storage has one writer at a time
        return max(1, min(_MOST_BY_DEFAULT, concurrency.cores() - 1))

    def batches_for(self, processes: int) -> tuple[int, int]:
        """The batches in flight at once, and the jobs of each."""
        # One transaction holds all of a batch in local storage, which is written one at a time.
        batches = processes * (1 if self.is_local else min(_BATCHES, self.concurrency))
        in_flight = min(processes * self.concurrency, MOST_IN_FLIGHT)
        return batches, in_flight // batches
