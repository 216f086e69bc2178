"""Settings of metrics and logs."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from imagefleet.redaction import WebAddress
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import fleet as fleet_names


class FleetSettings(StorageSettings):
    """The fleet that a process belongs to or that a command asks about."""

    fleet: str | None = Field(
        default=None,
        pattern=fleet_names.PATTERN,
        description="Name of the fleet, the label `fleet` of its metrics; by default STORAGE/QUEUE"
        " from the account's or the folder's name. Commands that read metrics: `all` for every"
        " fleet.",
    )

    @property
    def fleet_name(self) -> str:
        return self.fleet or fleet_names.derived(self.storage, self.queue)


class TelemetrySettings(FleetSettings):
    """Metrics and logs of a long-running process: a worker or the exporter."""

    push_url: WebAddress | None = Field(
        default=None,
        repr=False,  # it may hold a password
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

    @field_validator("fleet")
    @classmethod
    def _is_one_fleet(cls, fleet: str | None) -> str | None:
        if fleet == fleet_names.ALL:
            raise ValueError(f"should name one fleet: {fleet_names.ALL!r} stands for every fleet")
        return fleet

    @model_validator(mode="after")
    def _is_one_login(self) -> Self:
        if self.push_token is not None and urlsplit(self.push_url or "").username is not None:
            raise ValueError("give --push-token or user:password@ in --push-url, not both")
        return self
