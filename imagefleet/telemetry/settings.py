"""Settings of metrics and logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from imagefleet.storage.settings import StorageSettings


class TelemetrySettings(StorageSettings):
    """Metrics and logs of a long-running process: a worker or the exporter."""

    push_url: str | None = Field(
        default=None,
        repr=False,  # it may hold a password
        pattern=r"^https?://\S+$",
        description="Where metrics are pushed: the import address of VictoriaMetrics or vmagent,"
        " https://HOST/api/v1/import/prometheus.",
    )
    push_token: SecretStr | None = Field(
        default=None,
        description="Bearer token for --push-url, unless the address holds user:password@.",
    )
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto logs text on a terminal, and JSON lines elsewhere."
    )
