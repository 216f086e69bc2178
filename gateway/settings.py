"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field

from imagefleet.storage.settings import SignerSettings
from imagefleet.telemetry.settings import TelemetrySettings


class GatewaySettings(TelemetrySettings, SignerSettings):
    """Settings of a gateway: its address, its clients, and the worker that it starts."""

    host: str = Field(
        default="127.0.0.1",
        description="Address that it listens on; others than this machine's need --clients.",
    )
    port: int = Field(
        default=7860, ge=0, le=65_535, description="Port; 0 picks a free one."
    )
    clients: Path | None = Field(
        default=None,
        description="YAML file of keys, each with a campaign; by default this machine's programs.",
    )
    wait_seconds: float = Field(
        default=600,
        ge=1,
        le=86_400,
        description="Seconds that a request waits for its images.",
    )
    model: str | None = Field(
        default=None,
        description="Checkpoint of a worker in the same process, whose other settings are its"
        " variables. By default workers are elsewhere.",
    )
