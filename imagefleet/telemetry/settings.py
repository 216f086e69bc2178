"""How a long-running process reports what it does: the settings of metrics and logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from imagefleet.storage.settings import StorageSettings

PushFormat = Literal["text", "remote-write"]


class TelemetrySettings(StorageSettings):
    """How a process that runs by itself tells what it does: a worker, or the exporter."""

    push_url: str | None = Field(
        default=None,
        repr=False,  # it may hold a password
        pattern=r"^https?://\S+$",
        description="Where the metrics are pushed: VictoriaMetrics' or vmagent's import address,"
        " https://HOST/api/v1/import/prometheus, or one for remote write.",
    )
    push_format: PushFormat = Field(
        default="text",
        description="text for an import address; remote-write for a Prometheus or a service that"
        " takes nothing else (needs imagefleet[remote-write]).",
    )
    push_token: SecretStr | None = Field(
        default=None, description="Bearer token for it; or put user:password@ into the address."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto is text on a terminal and JSON lines elsewhere."
    )
