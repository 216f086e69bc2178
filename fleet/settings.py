"""Settings of the commands that monitor a fleet and of its services; adds those of all packages."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cli import options
from gateway.settings import GatewaySettings
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.redaction import WebAddress
from imagefleet.storage.azure.roles import ROLES, Role
from imagefleet.storage.settings import SignerSettings, StorageSettings
from imagefleet.telemetry.settings import ALL_FLEETS, FleetSettings, TelemetrySettings
from loadgen.settings import LoadSettings
from worker.settings import MachineSettings

_FLEET = re.compile(r"[a-z][a-z0-9-]{0,61}[a-z0-9]")


def _names(of: str, pattern: re.Pattern[str]) -> AfterValidator:
    def checked(text: str) -> str:
        if not all(map(pattern.fullmatch, text.split(","))):
            raise ValueError(f"should be names of {of}, separated by commas")
        return text

    return AfterValidator(checked)


class MonitorSettings(FleetSettings):
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
    host: str = Field(
        default="127.0.0.1",
        description="Address of /metrics, /live and /ready; 0.0.0.0 for all interfaces.",
    )
    port: int = Field(
        default=9108,
        ge=0,
        le=65_535,
        description="Port of /metrics; 0 picks a free one.",
    )


class ExporterSettings(ServiceSettings):
    sample_seconds: float = Field(
        default=15,
        ge=0.1,
        le=3600,
        description="Seconds between samples of the queue depths.",
    )
    dollars_per_hour: float | None = Field(
        default=None,
        ge=0,
        description="Price of the whole fleet in $/h that you confirmed: an alert fires above it.",
    )


class WebhookSettings(ServiceSettings):
    port: int = Field(
        default=9109,
        ge=0,
        le=65_535,
        description="Port of /metrics; 0 picks a free one.",
    )


class BrokerSettings(StorageSettings):
    organization: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9-]*$",
        description="Your organization at SaladCloud, by its name in the portal's address or by its"
        " id. Required.",
    )
    salad_fleets: Annotated[str, _names("fleets", _FLEET)] | None = Field(
        default=None,
        description="Names of the fleets, as in their fleet files, or of single container groups,"
        " separated by commas; by default the whole organization.",
    )
    policy: str = Field(
        default="broker",
        pattern=r"^[a-z0-9][a-z0-9-]{0,49}$",
        description="Stored policies of the tokens are named POLICY-NUMBER; `imagefleet keys revoke"
        " POLICY` ends all tokens at once, and nodes get new ones.",
    )
    token_hours: float = Field(
        default=2,
        ge=0.1,
        le=24,
        description="Hours that a token is valid; nodes renew theirs.",
    )
    models: Annotated[str, _names("models", SAFE_NAME)] | None = Field(
        default=None,
        description="Names of the models whose jobs the workers may take, separated by commas; by"
        " default only jobs without a model.",
    )
    chains: bool = Field(
        default=False,
        description="Tokens for jobs in several stages, whose models --models names: they allow to"
        " read images, and to add jobs to these queues.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address that it listens on; 0.0.0.0 for all interfaces.",
    )
    port: int = Field(
        default=8081, ge=0, le=65_535, description="Port; 0 picks a free one."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto",
        description="auto logs text on a terminal, and JSON lines elsewhere.",
    )

    @property
    def role(self) -> Role:
        return ROLES["worker"].for_chains() if self.chains else ROLES["worker"]

    @property
    def model_names(self) -> list[str]:
        return self.models.split(",") if self.models else []


# `main` imports this before any command.
options.PROJECT_SETTINGS.update(
    {
        MachineSettings: ("Worker", "`worker`, `files make`"),
        SignerSettings: (
            "Signatures",
            "`load`, `import`, `sweep`, `failed`, `files`",
        ),
        LoadSettings: ("Load generator", "`load`, `sweep`"),
        MonitorSettings: ("Monitoring", "`status`, `scale`"),
        ExporterSettings: ("Exporter", "`exporter`"),
        BrokerSettings: ("Broker", "`broker`"),
        GatewaySettings: ("Gateway", "`serve`"),
        WebhookSettings: ("Webhooks", "`webhooks`"),
    }
)
