"""The one settings file of a fleet on SaladCloud, with its secrets named and never written."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)

from fleet import options
from imagefleet import errors
from imagefleet.pricing.prices import Priority
from worker.settings import WorkerSettings

#: The bounds in this file are those of SaladCloud's OpenAPI specification, version 0.9.0-alpha.17,
#: and of its nodes where they are narrower (16 CPUs, 60 GB of memory, 250 GB of disk).
API_URL = "https://api.salad.com/api/public"

_LABEL = r"^[a-z][a-z0-9-]{0,61}[a-z0-9]$"

#: Leaves room in the 63 characters of a group's name for `-REVISION-NUMBER`.
_FLEET_NAME = r"^[a-z][a-z0-9-]{0,48}[a-z0-9]$"

_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")

_SECRET_NAME = re.compile(r"(SAS|TOKEN|KEY|PASSWORD|SECRET)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"accountkey=|sharedaccesssignature=|\bsig=|//[^/\s]+@", re.IGNORECASE)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class SecretSource(_Strict):
    """Where a secret comes from: a variable of the machine that deploys, or a file there."""

    env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    file: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_of_them(self) -> SecretSource:
        if (self.env is None) == (self.file is None):
            raise ValueError("a secret is {env: VARIABLE} or {file: PATH}")
        return self

    def read(self, folder: Path) -> SecretStr:
        """The secret; a file's path starts at *folder*.

        Raises:
            SetupError: the variable is not set, or the file cannot be read.
        """
        if self.env is not None:
            value = os.environ.get(self.env, "").strip()
            if not value:
                raise errors.SetupError(f"the variable {self.env} is not set")
            return SecretStr(value)
        path = folder / Path(str(self.file)).expanduser()
        try:
            value = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise errors.SetupError(f"the secret in {path} cannot be read: {error}") from None
        if not value:
            raise errors.SetupError(f"the secret in {path} is empty")
        return SecretStr(value)


class Probe(_Strict):
    """A command in the container, how often it runs, and how often it may fail."""

    command: list[Annotated[str, Field(min_length=1, max_length=2048)]] = Field(
        min_length=1, max_length=100
    )
    initial_delay_seconds: int = Field(default=0, ge=0, le=1200)
    period_seconds: int = Field(default=30, ge=1, le=120)
    timeout_seconds: int = Field(default=10, ge=1, le=60)
    success_threshold: int = Field(default=1, ge=1, le=10)
    failure_threshold: int = Field(default=3, ge=1, le=20)


#: 20 failures are the most that the API takes: with the delay, 21 minutes for model and compiler.
STARTUP = Probe(
    command=["imagefleet", "health", "started"],
    initial_delay_seconds=60,
    period_seconds=60,
    failure_threshold=20,
)
LIVENESS = Probe(command=["imagefleet", "health", "live"])

_Value = str | int | float | SecretSource
_Provider = dict[str, str | int | SecretSource | list[dict[str, str | SecretSource]]]

#: What pydantic calls the branches of these two in its errors.
_BRANCHES = {"str", "int", "float", "SecretSource", "function-after[_one_of_them(), SecretSource]"}


class FleetFile(_Strict):
    """What `fleet.yaml` says; deploy/salad/fleet.yaml explains each entry."""

    name: str = Field(pattern=_FLEET_NAME)
    organization: str = Field(pattern=_LABEL)
    project: str = Field(pattern=_LABEL)
    api: str = Field(default=API_URL, pattern=r"^https?://\S+$")
    api_key: SecretSource = SecretSource(env="SALAD_API_KEY")
    image: str = Field(max_length=1024)
    replicas: int = Field(ge=1, le=50_000)
    gpus: list[str] = Field(min_length=1, max_length=100)
    priority: Priority = "batch"
    cpu: int = Field(default=4, ge=1, le=16)
    memory_megabytes: int = Field(default=8192, ge=1024, le=61_440)
    shared_memory_megabytes: int = Field(default=1024, ge=64, le=61_440)
    disk_gigabytes: int = Field(default=20, ge=1, le=250)
    countries: list[Annotated[str, Field(pattern=r"^[a-z]{2}$")]] | None = Field(
        default=None, min_length=1
    )
    image_caching: bool = True
    command: list[Annotated[str, Field(min_length=1, max_length=1000)]] | None = None
    environment: dict[str, _Value]
    startup_probe: Probe = STARTUP
    liveness_probe: Probe = LIVENESS
    logging: dict[str, _Provider] | None = Field(default=None, min_length=1, max_length=1)
    registry: dict[str, _Provider] | None = Field(default=None, min_length=1, max_length=1)

    @model_validator(mode="after")
    def _check(self) -> FleetFile:
        if not _DIGEST.fullmatch(self.image):
            raise ValueError(
                "image: should end in @sha256:DIGEST, so that every node runs the same one, today"
                " and tomorrow; `docker buildx imagetools inspect IMAGE:TAG` tells a tag's digest"
            )
        if str(self.environment.get("IMAGEFLEET_STORAGE", "local:")).startswith("local:"):
            raise ValueError(
                "environment: IMAGEFLEET_STORAGE should be the storage account's address; without"
                " it, each worker waits for jobs in a folder of its own"
            )
        for name, value in self.environment.items():
            _check_variable(name, value)
        for where, provider in (("logging", self.logging), ("registry", self.registry)):
            for fields in (provider or {}).values():
                for name, each in fields.items():
                    _refuse_written_secret(f"{where}: {name}", name, each)
        return self


def read_file(path: Path) -> FleetFile:
    """Raises SetupError, in a sentence that names the entry, for what is no such file."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return FleetFile.model_validate(content)
    except OSError as error:
        raise errors.SetupError(
            f"the settings file {path}: {error.strerror or error}; deploy/salad/fleet.yaml is one"
            " to begin with"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise errors.SetupError(f"the settings file {path} is no YAML: {error}") from None
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        # Of a union's branches, the one with a sentence of ours says what was meant.
        detail = next((each for each in details if each["type"] == "value_error"), details[0])
        raise errors.SetupError(f"the settings file {path}: {_complaint(detail)}") from None


def _complaint(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    # A union's branches are pydantic's words, not the file's.
    where = ".".join(str(each) for each in detail["loc"] if each not in _BRANCHES)
    if where.startswith("environment.") and detail["type"] == "string_type":
        message = "should be text (in quotes: 'off'), a number, {env: VARIABLE} or {file: PATH}"
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        close = difflib.get_close_matches(where, FleetFile.model_fields, n=1)
        return f"{where}: no such entry" + (f"; did you mean {close[0]}?" if close else "")
    return f"{where}: {message}" if where else message


def _check_variable(name: str, value: _Value) -> None:
    """A setting that no worker would take must not reach 750 nodes: each would exit at once."""
    _refuse_written_secret(f"environment: {name}", name, value)
    if not name.upper().startswith(options.PREFIX):
        return
    fields = {options.variable(each): field for each, field in WorkerSettings.model_fields.items()}
    if name not in fields:
        close = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {close[0]}?" if close else "imagefleet worker --help lists them"
        raise ValueError(f"environment: {name} is no setting of a worker: {hint}")
    if isinstance(value, SecretSource):
        return
    # A whole model would read this machine's variables, too.
    field: Any = fields[name]
    try:
        create_model("Setting", value=(field.annotation, field)).model_validate(
            {"value": str(value)}
        )
    except ValidationError as error:
        message = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ValueError(f"environment: {name}: {message}") from None


def _refuse_written_secret(where: str, name: str, value: object) -> None:
    if isinstance(value, str) and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
        raise ValueError(
            f"{where}: a secret is not written into this file; name where it is, as"
            " {env: VARIABLE} or {file: PATH}"
        )


#: Gives the secret of a source; a dry run has one that makes do without.
ReadSecret = Callable[[SecretSource], SecretStr]
