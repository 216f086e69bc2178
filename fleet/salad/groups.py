"""Container groups: rendered from a fleet file, and as SaladCloud's API returns them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import SecretStr

from fleet.salad.file import FleetFile, Probe, SecretSource
from fleet.salad.gpus import GpuClass, PriceRange, replica_price
from imagefleet import errors

#: SaladCloud's limit per container group.
MAX_REPLICAS = 500

#: SaladCloud's limit for the value of an environment variable, in characters; empty is refused.
MAX_VALUE = 1000

MASKED = "(secret)"

_REVISION_DIGITS = 8

_Kind = TypeVar("_Kind")

#: Reads the secret of a source; a dry run substitutes missing ones.
ReadSecret = Callable[[SecretSource], SecretStr]


@dataclass(frozen=True, slots=True)
class Group:
    """A container group: the *replicas* requested, and its instances by state."""

    name: str
    status: str
    replicas: int
    allocating: int
    creating: int
    running: int
    stopping: int
    image: str
    priority: str
    gpu_ids: Sequence[str]
    environment: Mapping[str, str] | None

    @property
    def is_stopped(self) -> bool:
        return self.status == "stopped"

    @property
    def on_nodes(self) -> int:
        """Instances to wait for in a drain; a failed allocation leaves none."""
        return self.creating + self.running + self.stopping

    def price(self, known: Sequence[GpuClass]) -> PriceRange | None:
        """The price of one replica, or None if that of a class is unknown."""
        classes = [each for each in known if each.id in self.gpu_ids]
        prices_known = all(self.priority in each.dollars_per_hour for each in classes)
        if not prices_known or len(classes) < len(self.gpu_ids) or not classes:
            return None
        return replica_price(classes, self.priority)


@dataclass(frozen=True, slots=True)
class Quota:
    """The replicas that an organization may have; those of stopped groups count as used."""

    replicas: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.replicas - self.used)


def as_group(record: Mapping[str, Any]) -> Group:
    container, state = record["container"], record["current_state"]
    counts = state["instance_status_counts"]
    return Group(
        name=str(record["name"]),
        status=str(state["status"]),
        replicas=int(record["replicas"]),
        allocating=int(counts["allocating_count"]),
        creating=int(counts["creating_count"]),
        running=int(counts["running_count"]),
        stopping=int(counts["stopping_count"]),
        image=str(container["image"]),
        priority=str(record.get("priority") or container.get("priority") or "high"),
        gpu_ids=tuple(container["resources"].get("gpu_classes") or ()),
        environment=container.get("environment_variables"),
    )


def as_quota(record: Mapping[str, Any]) -> Quota:
    quotas = record["container_groups_quotas"]
    return Quota(int(quotas["container_replicas_quota"]), int(quotas["container_replicas_used"]))


def parse_name(fleet: str, name: str) -> tuple[str, int] | None:
    """The revision and the number of a group's name; None if the group is not one of *fleet*.

    The revision changes with everything that restarts workers.
    """
    found = re.fullmatch(rf"{re.escape(fleet)}-([0-9a-f]{{{_REVISION_DIGITS}}})-([1-9]\d*)", name)
    return (found[1], int(found[2])) if found else None


def split(replicas: int, groups: int = 1) -> list[int]:
    """Replicas per group, spread evenly over *groups* or more if needed."""
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
    """The request bodies that create the fleet's groups; secrets stay SecretStr.

    *existing* groups of the same revision stay in use, also for fewer replicas.

    Raises:
        SetupError: a secret is missing, or a variable's value is too long.
    """
    template = _template(file, gpus, read_secret)
    text = json.dumps(reveal(template), sort_keys=True)
    revision = hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]
    names = filter(None, (parse_name(file.name, each) for each in existing))
    groups = max((number for of, number in names if of == revision), default=1)
    return [
        {"name": f"{file.name}-{revision}-{number}", "replicas": share, **template}
        for number, share in enumerate(split(replicas or file.replicas, groups), start=1)
    ]


def reveal(value: Any, seen: list[str] | None = None) -> Any:
    """*value* with its secrets in plain text, which are also appended to *seen*."""

    def plain(secret: SecretStr) -> str:
        text = secret.get_secret_value()
        if seen is not None:
            seen.append(text)
        return text

    return _replace(value, SecretStr, plain)


def mask(value: Any) -> Any:
    """*value* with its secrets masked."""
    return _replace(value, SecretStr, lambda _: MASKED)


def _replace(value: Any, kind: type[_Kind], replacement: Callable[[_Kind], object]) -> Any:
    """*value* with each *kind* in its mappings and lists replaced."""
    if isinstance(value, kind):
        return replacement(value)
    if isinstance(value, Mapping):
        return {name: _replace(each, kind, replacement) for name, each in value.items()}
    if isinstance(value, list):
        return [_replace(each, kind, replacement) for each in value]
    return value


def _template(file: FleetFile, gpus: Sequence[GpuClass], read_secret: ReadSecret) -> dict[str, Any]:
    """A request body without name and replicas."""
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
        container["logging"] = _replace(file.logging, SecretSource, read_secret)
    if file.registry:
        container["registry_authentication"] = _replace(file.registry, SecretSource, read_secret)
    template: dict[str, Any] = {
        "autostart_policy": True,
        # A worker exits only if its node is to be replaced or it was asked to stop.
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
    if file.models:
        variables["IMAGEFLEET_MODEL"] = names = ",".join(file.models)
        _check_value("IMAGEFLEET_MODEL", names)
    for name, value in file.environment.items():
        variables[name] = read_secret(value) if isinstance(value, SecretSource) else str(value)
        _check_value(name, reveal(variables[name]))
    return variables


def _check_value(name: str, value: str) -> None:
    if "\n" in value:
        raise errors.SetupError(f"environment: {name} has several lines; SaladCloud allows one")
    if not 1 <= len(value) <= MAX_VALUE:
        raise errors.SetupError(
            f"environment: {name} has {len(value):,} characters; SaladCloud allows 1 to"
            f" {MAX_VALUE:,}. Set the account, the queue and the SAS tokens separately"
            " (IMAGEFLEET_STORAGE, IMAGEFLEET_QUEUE, IMAGEFLEET_SAS ...)"
        )
    if "accountkey=" in value.lower():
        raise errors.SetupError(
            f"environment: {name} contains the storage account's key, which grants full access;"
            " nodes are other people's computers: use SAS tokens (`imagefleet keys` makes them)"
        )


def _probe(probe: Probe) -> dict[str, Any]:
    times = probe.model_dump(exclude={"command"})
    return {"exec": {"command": probe.command}, **times}
