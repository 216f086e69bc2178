"""Settings of metrics and logs, and the name of a fleet: the label `fleet` of its metrics."""

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from imagefleet.redaction import WebAddress
from imagefleet.storage.settings import StorageSettings, local_folder

#: Stands for every fleet in queries, so that no fleet may be called so.
ALL_FLEETS = "all"

#: A name that PromQL, a regular expression or a URL need not quote, but for the dot.
_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}$"

#: The account of Azurite and of `UseDevelopmentStorage=true`.
_DEVELOPMENT_ACCOUNT = "devstoreaccount1"

_ACCOUNT_HOST = re.compile(r"([a-z0-9-]+)\.(?:[a-z0-9-]+\.)*(?:blob|queue)\.")


class FleetSettings(StorageSettings):
    """The fleet that a process belongs to or that a command asks about."""

    fleet: str | None = Field(
        default=None,
        pattern=_PATTERN,
        description="Name of the fleet, the label `fleet` of its metrics; by default STORAGE/QUEUE"
        " from the account's or the folder's name. Commands that read metrics: `all` for every"
        " fleet.",
    )

    @property
    def fleet_name(self) -> str:
        return self.fleet or fleet_name(self.storage, self.queue)


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
        default="auto",
        description="auto logs text on a terminal, and JSON lines elsewhere.",
    )

    @field_validator("fleet")
    @classmethod
    def _is_one_fleet(cls, fleet: str | None) -> str | None:
        if fleet == ALL_FLEETS:
            raise ValueError(
                f"should name one fleet: {ALL_FLEETS!r} stands for every fleet"
            )
        return fleet

    @model_validator(mode="after")
    def _is_one_login(self) -> Self:
        if (
            self.push_token is not None
            and urlsplit(self.push_url or "").username is not None
        ):
            raise ValueError(
                "give --push-token or user:password@ in --push-url, not both"
            )
        return self


def fleet_name(storage: str, queue: str) -> str:
    """`STORAGE/QUEUE`, with the account or folder of any address; it holds no secret."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", _storage(storage.strip())).strip("-.")
    return f"{name[:64] or 'storage'}/{queue}"


def _storage(address: str) -> str:
    folder = local_folder(address)
    if folder is not None:
        return folder.resolve().name
    parts = (part.partition("=") for part in address.split(";"))
    given = {name.strip().lower(): value.strip() for name, _, value in parts}
    if account := given.get("accountname"):
        return account.lower()
    if given.get("usedevelopmentstorage", "").lower() == "true":
        return _DEVELOPMENT_ACCOUNT
    endpoint = given.get("blobendpoint") or given.get("queueendpoint")
    try:
        url = urlsplit(endpoint or address)
        host = (url.hostname or "").lower()
    except ValueError:
        return ""
    if found := _ACCOUNT_HOST.match(host):
        return found[1]
    # Emulators have the account in the path; a path elsewhere may be anything.
    return (endpoint and url.path.strip("/").partition("/")[0]) or host
