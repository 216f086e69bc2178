"""What a load can be told: each field is a flag and an IMAGEFLEET_ variable."""

from __future__ import annotations

from pydantic import Field

from imagefleet.storage.settings import StorageSettings


class LoadSettings(StorageSettings):
    """The settings of one filling of a queue."""

    concurrency: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Batches of 100 jobs in flight at once; a load that is killed sends again what"
        " was in flight.",
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Jobs/s at most; as fast as it goes without it.",
    )
