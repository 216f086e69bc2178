"""Settings of the service that sends webhooks."""

from __future__ import annotations

from pydantic import Field

from fleet.monitor.settings import ServiceSettings


class WebhookSettings(ServiceSettings):
    """The storage, metrics and logs of the service."""

    port: int = Field(
        default=9109, ge=0, le=65_535, description="Port of /metrics; 0 picks a free one."
    )
