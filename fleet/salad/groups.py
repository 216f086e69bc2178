"""A fleet's settings as the container groups that SaladCloud's API takes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from fleet.salad.file import FleetFile, Probe, ReadSecret, SecretSource
from fleet.salad.gpus import GpuClass
from imagefleet import errors

#: SaladCloud's limit of one container group.
MAX_REPLICAS = 500

#: SaladCloud's limit of an environment variable's value, in characters; an empty one is refused.
MAX_VALUE = 1000

MASKED = "(secret)"

_REVISION_DIGITS = 8


@dataclass(frozen=True, slots=True)
class GroupName:
    """NAME-REVISION-NUMBER: what makes a node start anew makes a second set of groups."""

    fleet: str
    revision: str
    number: int

    def __str__(self) -> str:
        return f"{self.fleet}-{self.revision}-{self.number}"


def parse_name(fleet: str, name: str) -> GroupName | None:
    """What a group's name says, where it is one of *fleet*'s."""
    found = re.fullmatch(rf"{re.escape(fleet)}-([0-9a-f]{{{_REVISION_DIGITS}}})-([1-9]\d*)", name)
    return GroupName(fleet, found[1], int(found[2])) if found else None


def split(replicas: int, groups: int = 1) -> list[int]:
    """Replicas of each group: as even as can be, over *groups* or as many as are needed."""
    count = max(groups, -(-replicas // MAX_REPLICAS))
    each, more = divmod(replicas, count)
    return [each + (number < more) for number in range(count)]


def render(
    file: FleetFile,
    gpus: Sequence[GpuClass],
    read_secret: ReadSecret,
    replicas: int | None = None,
    existing: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The bodies of the calls that create the fleet's groups; secrets stay SecretStr in them.

    *existing* groups of the same revision keep a share, so that fewer replicas empty none.

    Raises:
        SetupError: a secret is missing, or a variable's value is too long.
    """
    template = _template(file, gpus, read_secret)
    revision = _revision(template)
    names = [parse_name(file.name, each) for each in existing]
    groups = max((each.number for each in names if each and each.revision == revision), default=1)
    return [
        {"name": str(GroupName(file.name, revision, number)), "replicas": share, **template}
        for number, share in enumerate(split(replicas or file.replicas, groups), start=1)
    ]


def reveal(value: Any, seen: list[str] | None = None) -> Any:
    """The same with its secrets in it, for the API's ears alone; *seen* is told each of them."""

    def open_up(secret: SecretStr) -> str:
        text = secret.get_secret_value()
        if seen is not None:
            seen.append(text)
        return text

    return _replace(value, open_up)


def mask(value: Any) -> Any:
    """The same, fit for a terminal."""
    return _replace(value, lambda _: MASKED)


def _replace(value: Any, words: Callable[[SecretStr], str]) -> Any:
    match value:
        case SecretStr():
            return words(value)
        case Mapping():
            return {name: _replace(each, words) for name, each in value.items()}
        case list():
            return [_replace(each, words) for each in value]
        case _:
            return value


def _template(file: FleetFile, gpus: Sequence[GpuClass], read_secret: ReadSecret) -> dict[str, Any]:
    """A group without its name and replicas."""
    container: dict[str, Any] = {
        "image": file.image,
        "priority": file.priority,
        "image_caching": file.image_caching,
        "resources": {
            "cpu": file.cpu,
            "memory": file.memory_megabytes,
            "gpu_classes": [each.id for each in gpus],
            "shm_size": file.shared_memory_megabytes,
            "storage_amount": file.disk_gigabytes * 2**30,
        },
        "environment_variables": _environment(file, read_secret),
    }
    if file.command:
        container["command"] = file.command
    if file.logging:
        container["logging"] = _resolved(file.logging, read_secret)
    if file.registry:
        container["registry_authentication"] = _resolved(file.registry, read_secret)
    template: dict[str, Any] = {
        "autostart_policy": True,
        # A worker ends of itself only where its node is to be replaced or it was told to.
        "restart_policy": "always",
        "container": container,
        "startup_probe": _probe(file.startup_probe),
        "liveness_probe": _probe(file.liveness_probe),
    }
    if file.countries:
        template["country_codes"] = file.countries
    return template


def _environment(file: FleetFile, read_secret: ReadSecret) -> dict[str, str | SecretStr]:
    variables: dict[str, str | SecretStr] = {"IMAGEFLEET_PRIORITY": file.priority}
    for name, value in file.environment.items():
        variables[name] = read_secret(value) if isinstance(value, SecretSource) else str(value)
        _check_value(name, reveal(variables[name]))
    return variables


def _check_value(name: str, value: str) -> None:
    if "\n" in value:
        raise errors.SetupError(f"environment: {name} has several lines; SaladCloud takes one")
    if not 1 <= len(value) <= MAX_VALUE:
        raise errors.SetupError(
            f"environment: {name} has {len(value):,} characters; SaladCloud takes 1 to"
            f" {MAX_VALUE:,}. Give the account, the queue and each SAS token apart"
            " (IMAGEFLEET_STORAGE, IMAGEFLEET_QUEUE, IMAGEFLEET_QUEUE_SAS ...)"
        )
    if "accountkey=" in value.lower():
        raise errors.SetupError(
            f"environment: {name} holds the storage account's key, which opens everything; nodes"
            " are other people's computers: give SAS tokens (`imagefleet keys` makes them)"
        )


def _resolved(value: Any, read_secret: ReadSecret) -> Any:
    match value:
        case SecretSource():
            return read_secret(value)
        case Mapping():
            return {name: _resolved(each, read_secret) for name, each in value.items()}
        case list():
            return [_resolved(each, read_secret) for each in value]
        case _:
            return value


def _probe(probe: Probe) -> dict[str, Any]:
    times = probe.model_dump(exclude={"command"})
    return {"exec": {"command": probe.command}, **times}


def _revision(template: Mapping[str, Any]) -> str:
    text = json.dumps(reveal(template), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]
