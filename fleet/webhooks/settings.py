"""Settings of the service that sends webhooks."""

from __future__ import annotations

from pydantic import Field

from imagefleet.telemetry.settings import TelemetrySettings


class WebhookSettings(TelemetrySettings):
    """The storage, metrics and logs of the service."""

    host: str = Field(
        default="127.0.0.1",
        description="Address of /metrics, /live and /ready; 0.0.0.0 for all interfaces.",
    )
    port: int = Field(
        default=9109, ge=0, le=65_535, description="Port of /metrics; 0 picks a free one."
    )
