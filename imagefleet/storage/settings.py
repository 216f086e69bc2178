"""Where jobs wait and where images go: the settings that every command shares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

#: Azure's rule for queues and containers, less the room for `-poison`.
_AZURE_NAME = re.compile(r"(?=.{3,56}$)[a-z0-9](-?[a-z0-9])*")


def _azure_name(name: str) -> str:
    if not _AZURE_NAME.fullmatch(name):
        raise ValueError("should be 3 to 56 lower-case letters, digits and single hyphens")
    return name


AzureName = Annotated[str, AfterValidator(_azure_name)]

POISON_SUFFIX = "-poison"

#: Settings that are gone, and what happens in their place: a warning, until the next release.
REMOVED_SETTINGS: dict[str, str] = {
    "push_format": "metrics are pushed as text to VictoriaMetrics or vmagent, which forwards them"
    " by remote write (-remoteWrite.url)",
}

#: What has a SAS token of its own: the job queue, the poison queue and the container.
Resource = Literal["queue", "poison", "blob"]


class StorageSettings(BaseSettings):
    """Each field is a flag and a variable: `queue` is `--queue` and `IMAGEFLEET_QUEUE`."""

    model_config = SettingsConfigDict(
        env_prefix="IMAGEFLEET_", env_ignore_empty=True, extra="forbid", hide_input_in_errors=True
    )

    storage: str = Field(
        default="local:./imagefleet-data",
        repr=False,  # a connection string holds the account's key
        description="Home of jobs and images: local:FOLDER for one machine, or Azure's connection"
        " string or account URL (https://ACCOUNT.blob.core.windows.net).",
    )
    queue: AzureName = Field(
        default="jobs",
        description="The job queue's name; failed jobs go to NAME-poison beside it.",
    )
    container: AzureName = Field(
        default="images", description="The blob container that the images go to."
    )
    queue_sas: SecretStr | None = Field(
        default=None, description="SAS token for the job queue, where the address carries no key."
    )
    poison_sas: SecretStr | None = Field(
        default=None, description="SAS token for the poison queue, where it is another one."
    )
    blob_sas: SecretStr | None = Field(
        default=None, description="SAS token for the container, where it is another one."
    )

    sas_file: Path | None = Field(
        default=None,
        description="JSON file with the SAS tokens (queue, poison, blob) in place of these; read"
        " again when it changes, so that tokens are renewed without a restart.",
    )
    broker_url: str | None = Field(
        default=None,
        pattern=r"^https://[^\s@]+$",
        description="A service that gives a worker on SaladCloud its SAS tokens, for the proof of"
        " identity that the node has, and gives new ones before they end.",
    )

    @property
    def poison_queue(self) -> str:
        return self.queue + POISON_SUFFIX
