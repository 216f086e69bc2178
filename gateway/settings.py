"""Settings of the gateway."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from imagefleet.storage.settings import SignerSettings
from imagefleet.telemetry.settings import TelemetrySettings


def _each(value: object) -> object:
    """The values of a list that is separated by commas, origins without a slash at the end."""
    if not isinstance(value, str):
        return value
    return tuple(each.strip().rstrip("/") for each in value.split(","))


def _by_name(value: object) -> object:
    """The values of NAME=VALUE, separated by commas."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",")]
    if not all(name.strip() and to.strip() for name, _, to in pairs):
        raise ValueError("should be NAME=MODEL")
    return {name.strip(): to.strip() for name, _, to in pairs}


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
    worker_seconds: float = Field(
        default=300,
        ge=1,
        le=86_400,
        description="Seconds that a request waits while no worker is there for it; longer where a"
        " scaler starts the first.",
    )
    styles_file: Path | None = Field(
        default=None,
        description="Styles that payloads of A1111's API name: its styles.csv.",
    )
    native_size: bool = Field(
        default=False,
        description="Images without a size are as large as their checkpoint's, and not 512x512"
        " as A1111's.",
    )
    cors_allow_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_each)] = (
        Field(
            default=(),
            description="Origin of web pages that may use it, as https://example.com, or * for all"
            " without saved credentials; repeatable (in the variable separated by commas).",
            json_schema_extra={"repeatable": True},
        )
    )
    model_alias: Annotated[Mapping[str, str], NoDecode, BeforeValidator(_by_name)] = (
        Field(
            default_factory=dict,
            description="A model under another name, as dall-e-3=dreamshaper-8; repeatable (in the"
            " variable separated by commas).",
            json_schema_extra={"repeatable": True},
        )
    )
    model: str | None = Field(
        default=None,
        description="Checkpoint of a worker in the same process, whose other settings are its"
        " variables. By default workers are elsewhere.",
    )
