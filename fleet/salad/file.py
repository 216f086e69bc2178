"""The fleet file: the configuration of a fleet on SaladCloud, without its secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    SerializationInfo,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)
from typer import Option

from cli import options
from fleet.salad import gpus
from fleet.salad.gpus import GpuClass
from imagefleet import validation, yaml_file
from imagefleet.errors import SetupError
from imagefleet.pricing import families
from imagefleet.pricing.families import Family
from imagefleet.pricing.prices import Priority
from imagefleet.redaction import WebAddress
from imagefleet.storage.settings import job_queue
from imagefleet.validation import JSONDict
from worker.files import addresses
from worker.settings import WorkerSettings

#: Bounds are those of SaladCloud's OpenAPI specification 0.9.0-alpha.17, or of its nodes where they
#: are narrower (16 CPUs, 60 GB of memory, 250 GB of disk).
API_URL = "https://api.salad.com/api/public"

_LABEL = r"^[a-z][a-z0-9-]{0,61}[a-z0-9]$"

#: A group's name has 63 characters at most, `-REVISION-NUMBER` included.
_FLEET_NAME = r"^[a-z][a-z0-9-]{0,48}[a-z0-9]$"

_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")

#: A trusted key is public.
_SECRET_NAME = re.compile(
    r"(SAS|TOKEN|(?<!TRUSTED_)KEY|PASSWORD|SECRET)$", re.IGNORECASE
)


#: Files in order of precedence: the operator's own, then the example of this repository.
DEFAULT_FILES = (Path("fleet.yaml"), Path("deploy/salad/fleet.yaml"))

File = Annotated[
    Path | None,
    Option(
        "--file",
        metavar="FILE",
        help="The fleet file [default: fleet.yaml, else deploy/salad/fleet.yaml].",
    ),
]
WaitMinutes = Annotated[
    float, Option(min=0, metavar="MINUTES", help="Longest wait for instances.")
]


@dataclass(frozen=True)
class Model:
    """One model of a fleet: *queue* is that of its jobs of normal priority."""

    name: str
    family: Family
    queue: str


class _Strict(
    BaseModel, extra="forbid", strict=True, frozen=True, hide_input_in_errors=True
):
    """A part of the fleet file, whose values have their types already."""


class SecretSource(_Strict):
    """A secret in an environment variable of the deploying machine."""

    env: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")

    def read(self) -> SecretStr:
        """The secret; raises SetupError if there is none."""
        text = os.environ.get(self.env, "").strip()
        if not text:
            raise SetupError(f"the variable {self.env} is not set")
        return SecretStr(text)

    @model_serializer
    def _as_read(self, info: SerializationInfo) -> Any:
        """Serialises to the secret that the context, a function, reads; itself without one."""
        return info.context(self) if info.context else self


_Value = str | int | float | SecretSource
_Headers = list[dict[str, str | SecretSource]]
_Provider = dict[str, str | int | SecretSource | _Headers]

#: The names of these unions' branches in pydantic's errors.
_BRANCHES = {"str", "int", "float", "SecretSource"}


class FleetFile(_Strict):
    """The content of `fleet.yaml`; deploy/salad/fleet.yaml explains each key."""

    name: str = Field(pattern=_FLEET_NAME)
    organization: str = Field(pattern=_LABEL)
    project: str = Field(pattern=_LABEL)
    api: WebAddress = API_URL
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
    # Checked by hand: pydantic's errors would name an address, which may hold a token.
    models: JSONDict | None = Field(default=None, min_length=1, max_length=50)
    environment: dict[str, _Value]
    logging: dict[str, _Provider] | None = Field(
        default=None, min_length=1, max_length=1
    )
    registry: dict[str, _Provider] | None = Field(
        default=None, min_length=1, max_length=1
    )

    def served_models(self) -> list[Model]:
        """The models of its workers, that of jobs without a model first; none if it names none."""
        given = self.environment.get("IMAGEFLEET_QUEUE")
        queue = given if isinstance(given, str) else "jobs"
        return [
            Model(name, families.find(str(family)), job_queue(queue, name))
            for text, family in (self.models or {}).items()
            for name in [name_of(text)]
        ]

    def gpu_classes(self, known: Sequence[GpuClass]) -> list[GpuClass]:
        """The GPU classes; raises SetupError for one that is unknown or too small for a model."""
        found = gpus.find(self.gpus, known)
        for gpu in found:
            for model in self.served_models():
                families.refuse_gpu(gpu.name, model.family)
        return found

    @model_validator(mode="after")
    def _check_models(self) -> FleetFile:
        if self.models is None:
            return self
        foreign = {"IMAGEFLEET_MODEL"}
        if len(self.models) > 1:
            foreign |= {"IMAGEFLEET_MODEL_SHA256", "IMAGEFLEET_CONFIG"}
        for variable in sorted(foreign & self.environment.keys()):
            raise ValueError(
                f"environment: {variable} does not go with these `models`: leave one of them out"
            )
        names = [name_of(text) for text in self.models]
        for name, family in zip(names, self.models.values(), strict=True):
            if family not in families.FAMILIES:
                known = ", ".join(families.FAMILIES)
                raise ValueError(
                    f"models: the family of {name} should be one of {known}"
                )
        if len(set(names)) < len(names):
            raise ValueError(
                "models: two of them have one name, by which jobs ask for them"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> FleetFile:
        if not _DIGEST.fullmatch(self.image):
            raise ValueError(
                "image: should end in @sha256:DIGEST, so that every node runs the same image;"
                " `docker buildx imagetools inspect IMAGE:TAG` shows a tag's digest"
            )
        if str(self.environment.get("IMAGEFLEET_STORAGE", "local:")).startswith(
            "local:"
        ):
            raise ValueError(
                "environment: IMAGEFLEET_STORAGE should be the URL of the storage account;"
                " otherwise each worker waits for jobs in a local folder"
            )
        for name, value in self.environment.items():
            _refuse_written_secret(f"environment: {name}", name, value)
        try:
            settings = options.by_setting(WorkerSettings, self.environment)
        except ValueError as error:
            raise ValueError(f"environment: {error}") from None
        for setting, value in settings.items():
            _check_setting(setting, value)
        for where, provider in (("logging", self.logging), ("registry", self.registry)):
            for fields in (provider or {}).values():
                for name, each in fields.items():
                    _refuse_written_secret(f"{where}: {name}", name, each)
        return self


def found(path: Path | None) -> Path:
    """The *path* that was given, or that of the file there is; raises SetupError without one."""
    path = path or next((each for each in DEFAULT_FILES if each.is_file()), None)
    if path is None:
        raise SetupError(
            f"neither {' nor '.join(map(str, DEFAULT_FILES))} exists: give the fleet file as --file"
        )
    return path


def read_file(path: Path | None) -> FleetFile:
    """The file at *path*, or the one there is; raises SetupError that names the wrong key."""
    path = found(path)
    content = yaml_file.read(path, "the fleet file")
    try:
        return FleetFile.model_validate(content)
    except ValidationError as error:
        raise SetupError(f"the fleet file {path}: {_reason(error)}") from None


def _reason(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_input=False)
    # Among the branches of a union, the one with our own sentence says most.
    detail = next(
        (each for each in details if each["type"] == "value_error"), details[0]
    )
    path = tuple(each for each in detail["loc"] if each not in _BRANCHES)
    if path[:1] == ("environment",) and detail["type"] == "string_type":
        what = "should be text (in quotes: 'off'), a number, or {env: VARIABLE}"
        return f"{validation.location(path)}: {what}"
    return validation.reason({**detail, "loc": path}, FleetFile.model_fields)


def name_of(text: str) -> str:
    """The name by which jobs ask for a model; raises ValueError if only a fetch would tell."""
    if "," in text or "?" in text or "*" in text:
        raise ValueError(
            "models: name each model by itself, as store:NAME.safetensors, a path in the image or"
            " an https:// address without a token; others belong in IMAGEFLEET_MODEL"
        )
    try:
        address = addresses.read_address(text, None, "")
    except SetupError as error:
        raise ValueError(f"models: {error.message}") from None
    if address is None:
        return PurePosixPath(text).name.removesuffix(".safetensors")
    if address.file_name is None and address.blob is None:
        raise ValueError("models: an address there should end in the file's name")
    return address.stem


def _check_setting(setting: str, value: _Value) -> None:
    """Refuses a value that every worker would refuse, before it reaches hundreds of nodes."""
    if setting == "signing_key":
        raise ValueError(
            "environment: IMAGEFLEET_SIGNING_KEY is not for machines of strangers: what it signs,"
            " workers draw and run"
        )
    if isinstance(value, SecretSource):
        return
    # Alone, since the whole model would also read this machine's variables.
    field: Any = WorkerSettings.model_fields[setting]
    try:
        create_model("Setting", value=(field.annotation, field)).model_validate(
            {"value": str(value)}
        )
    except ValidationError as error:
        what = validation.message(error.errors(include_url=False)[0])
        raise ValueError(f"environment: {options.variable(setting)}: {what}") from None


def _refuse_written_secret(where: str, name: str, value: object) -> None:
    if isinstance(value, str) and (
        _SECRET_NAME.search(name) or options.SECRET_VALUE.search(value)
    ):
        raise ValueError(
            f"{where}: do not write secrets into this file; refer to them as {{env: VARIABLE}}"
        )
