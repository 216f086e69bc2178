"""The settings of the commands that watch a fleet."""

from __future__ import annotations

from pydantic import Field

from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry.settings import TelemetrySettings


class MonitorSettings(StorageSettings):
    """Where a fleet is watched from."""

    prometheus: str | None = Field(
        default=None,
        repr=False,  # it may hold a password
        pattern=r"^https?://\S+$",
        description="The Prometheus (or VictoriaMetrics) that has the workers' metrics; a name and"
        " password may stand in its address.",
    )


class ExporterSettings(TelemetrySettings, MonitorSettings):
    """The settings of the one process that watches the queues."""

    look_seconds: float = Field(
        default=15, ge=0.1, le=3600, description="How often the exporter looks at the queues."
    )
    fleet_dollars_per_hour: float | None = Field(
        default=None,
        ge=0,
        description="Price of the whole fleet, for the dollars to empty; by default the metrics'.",
    )
    host: str = Field(
        default="127.0.0.1", description="Address of /metrics, /live and /ready; 0.0.0.0 for all."
    )
    port: int = Field(
        default=9108, ge=0, le=65_535, description="Port of /metrics; 0 takes any free one."
    )
