"""Settings of `imagefleet load`."""

from __future__ import annotations

from pydantic import Field

from imagefleet.storage.open import LOCAL_SCHEME
from imagefleet.storage.settings import SignerSettings

#: Of a fleet on other people's computers: it finds a node of a hundred that draws wrong within
#: about 20,000 images, and costs half a percent.
DEFAULT_VERIFY_SHARE = 0.005


class LoadSettings(SignerSettings):
    """Each field is a flag and an IMAGEFLEET_ variable."""

    concurrency: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Batches of 32 jobs in flight at once; after a kill, those in flight are sent"
        " again.",
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
        """The share that is drawn a second time."""
        if self.verify_share is not None:
            return self.verify_share
        is_local = self.storage.strip().startswith(LOCAL_SCHEME)
        return 0.0 if is_local else DEFAULT_VERIFY_SHARE
