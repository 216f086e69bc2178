"""Settings of `imagefleet load`."""

from __future__ import annotations

from pydantic import Field

from imagefleet.storage.settings import SignerSettings


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
