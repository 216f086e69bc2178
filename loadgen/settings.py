"""Settings of `imagefleet load`."""

from pydantic import Field

from imagefleet.storage import bundle
from imagefleet.storage.bundle import MAX_JOBS
from imagefleet.storage.settings import SignerSettings
from imagefleet.submit import BATCH

#: Finds a node of a hundred that draws wrong within some 20,000 images, for half a percent.
DEFAULT_VERIFY_SHARE = 0.005


#: Batches that jobs in flight are in on Azure, where each job is a request and one slow one holds
#: up its batch.
_BATCHES = 8


class LoadSettings(SignerSettings):
    """Each field is a flag and an IMAGEFLEET_ variable."""

    concurrency: int = Field(
        default=BATCH,
        ge=1,
        le=512,
        description="Jobs in flight at once.",
    )
    bundle: int | None = Field(
        default=None,
        ge=1,
        le=MAX_JOBS,
        description="Jobs of a message at most, whose images are one pack, and 30 s of a slow"
        " card's work; 1: each by itself; default: 1 for each 500 jobs, up to 64.",
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

    def bundle_jobs(self, count: int) -> int:
        """Jobs of a message at most, of *count* that are sent."""
        return bundle.jobs_per_bundle(count) if self.bundle is None else self.bundle

    @property
    def batches(self) -> tuple[int, int]:
        """The batches in flight at once, and the jobs of each."""
        # One transaction holds all of a batch in local storage, which is written one at a time.
        batches = 1 if self.is_local else min(_BATCHES, self.concurrency)
        return batches, self.concurrency // batches
