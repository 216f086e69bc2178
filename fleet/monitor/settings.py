"""Settings of the commands that monitor a fleet."""

from __future__ import annotations

from pydantic import Field

from imagefleet.redaction import WebAddress
from imagefleet.telemetry.settings import ALL_FLEETS, FleetSettings, TelemetrySettings


class MonitorSettings(FleetSettings):
    """Sources of a fleet's state: its storage and its metrics."""

    prometheus: WebAddress | None = Field(
        default=None,
        repr=False,  # it may hold a password
        description="URL of the Prometheus or VictoriaMetrics with the workers' metrics; it may"
        " contain user:password@.",
    )

    @property
    def queried_fleet(self) -> str | None:
        """The fleet whose metrics are read; None: every fleet's."""
        return None if self.fleet == ALL_FLEETS else self.fleet_name


class ServiceSettings(TelemetrySettings):
    """The storage, metrics and logs of a long-running service."""

    host: str = Field(
        default="127.0.0.1",
        description="Address of /metrics, /live and /ready; 0.0.0.0 for all interfaces.",
    )
    port: int = Field(
        default=9108, ge=0, le=65_535, description="Port of /metrics; 0 picks a free one."
    )


class ExporterSettings(ServiceSettings, MonitorSettings):
    """Settings of the queue exporter."""

    sample_seconds: float = Field(
        default=15,
        ge=0.1,
        le=3600,
        description="Seconds between samples of the queue depths.",
    )
    dollars_per_hour: float | None = Field(
        default=None,
        ge=0,
        description="Price of the whole fleet in $/h, for the cost to empty the queue; by default"
        " from the workers' metrics.",
    )
