"""Container groups: rendered from a fleet file, and as SaladCloud's API returns them."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, BeforeValidator, Field, SecretStr

from fleet.salad.file import FleetFile, SecretSource
from fleet.salad.gpus import GpuClass, PriceRange, replica_price
from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict

#: SaladCloud's limit per container group.
MAX_REPLICAS = 500

#: SaladCloud's limit for the value of an environment variable, in characters; empty is refused.
MAX_VALUE = 1000

MASKED = "(secret)"

_REVISION_DIGITS = 8

_COUNTS = ("current_state", "instance_status_counts")


def _at(*path: str, **terms: Any) -> Any:
    return Field(validation_alias=AliasPath(*path), **terms)


class _Answer(BaseModel, frozen=True, populate_by_name=True, hide_input_in_errors=True):
    """Fields of an answer of the API, by where they stand in it."""


class Group(_Answer):
    """A container group: the *replicas* requested, and its instances by state."""

    name: str
    status: str = _at("current_state", "status")
    replicas: int
    allocating: int = _at(*_COUNTS, "allocating_count")
    creating: int = _at(*_COUNTS, "creating_count")
    running: int = _at(*_COUNTS, "running_count")
    stopping: int = _at(*_COUNTS, "stopping_count")
    priority: Annotated[str, BeforeValidator(lambda given: given or "high")] = "high"
    gpu_ids: Annotated[list[str], BeforeValidator(lambda given: given or [])] = _at(
        "container", "resources", "gpu_classes", default=[]
    )

    #: When SaladCloud scales the group by itself.
    schedules: Annotated[
        list[str],
        BeforeValidator(lambda given: [each["schedule"] for each in given or []]),
    ] = _at("scaling-actions", default=[])

    @property
    def is_stopped(self) -> bool:
        return self.status == "stopped"

    @property
    def live_replicas(self) -> int:
        """Replicas that run or are to run."""
        return 0 if self.is_stopped else self.replicas

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


Groups = Sequence[Group]

#: Replicas by the names of groups.
Replicas = Mapping[str, int]


class Quota(_Answer):
    """The replicas that an organization may have; those of stopped groups count as used."""

    replicas: int = _at("container_groups_quotas", "container_replicas_quota")
    used: int = _at("container_groups_quotas", "container_replicas_used")

    @property
    def free(self) -> int:
        return max(0, self.replicas - self.used)

    def room(self, groups: Iterable[Group]) -> int:
        """Replicas that the quota leaves to *groups* beside those of others."""
        return self.replicas - self.used + sum(group.replicas for group in groups)


def parse_name(fleet: str, name: str) -> tuple[str, int] | None:
    """The revision and the number of a group's name; None if the group is not one of *fleet*.

    The revision changes with everything that restarts workers.
    """
    found = re.fullmatch(
        rf"{re.escape(fleet)}-([0-9a-f]{{{_REVISION_DIGITS}}})-([1-9]\d*)", name
    )
    return (found[1], int(found[2])) if found else None


def is_rolling(groups: Groups) -> bool:
    """True while groups of several revisions exist."""
    return len({group.name.rpartition("-")[0] for group in groups}) > 1


def split(replicas: int, now: Sequence[int] = (0,)) -> list[int]:
    """Replicas of as many groups as *now*, or more if needed: even, but all stay that can."""
    fewest_groups = math.ceil(replicas / MAX_REPLICAS)
    spread = [*now, *[0] * (fewest_groups - len(now))]
    for _ in range(replicas - sum(spread)):
        spread[spread.index(min(spread))] += 1
    for _ in range(sum(spread) - replicas):
        spread[-1 - spread[::-1].index(max(spread))] -= 1
    return spread


def resplit(shares: Replicas, replicas: int) -> dict[str, int]:
    """Splits *replicas* over the groups of *shares*, their replicas now, as `split` does."""
    return dict(zip(shares, split(replicas, list(shares.values())), strict=True))


def render(
    file: FleetFile,
    gpus: Sequence[GpuClass],
    replicas: int | None = None,
    existing: Iterable[Group] = (),
    read_secret: Callable[[SecretSource], SecretStr] = SecretSource.read,
) -> list[JSONDict]:
    """The request bodies that create the fleet's groups; secrets stay SecretStr.

    *existing* groups of the same revision stay in use, also for fewer replicas. Raises SetupError
    if a secret is missing, or a variable's value is too long.
    """
    template = _template(file, gpus, read_secret)
    text = json.dumps(template, sort_keys=True, default=SecretStr.get_secret_value)
    revision = hashlib.sha256(text.encode()).hexdigest()[:_REVISION_DIGITS]
    now = {}
    for group in existing:
        of_revision, number = parse_name(file.name, group.name) or ("", 0)
        if of_revision == revision:
            now[number] = group.live_replicas
    shares = [now.get(number, 0) for number in range(1, max(now, default=1) + 1)]
    return [
        {"name": f"{file.name}-{revision}-{number}", "replicas": share, **template}
        for number, share in enumerate(
            split(replicas or file.replicas, shares), start=1
        )
        if share or number in now
    ]


def plain(
    body: Any, read: Callable[[SecretStr], str] = SecretStr.get_secret_value
) -> Any:
    """*body* as JSON has it, with its secrets as *read* shows them."""
    return json.loads(json.dumps(body, default=read))


def _template(
    file: FleetFile,
    gpus: Sequence[GpuClass],
    read_secret: Callable[[SecretSource], SecretStr],
) -> JSONDict:
    """A request body without name and replicas."""
    given = file.model_dump(context=read_secret, exclude={"api_key"})
    environment: dict[str, str | SecretStr] = {"IMAGEFLEET_PRIORITY": file.priority}
    if file.models:
        environment["IMAGEFLEET_MODEL"] = ",".join(file.models)
    environment |= {
        name: value if isinstance(value, SecretStr) else str(value)
        for name, value in given["environment"].items()
    }
    for name, value in environment.items():
        _check_value(name, plain(value))
    container = {
        "image": file.image,
        "priority": file.priority,
        "image_caching": file.image_caching,
        "resources": {
            "cpu": file.cpu,
            "memory": file.memory_megabytes,
            "gpu_classes": [gpu.id for gpu in gpus],
            "shm_size": file.shared_memory_megabytes,
            "storage_amount": file.disk_gigabytes * 2**30,
        },
        "environment_variables": environment,
        "command": file.command or None,
        "logging": given["logging"],
        "registry_authentication": given["registry"],
    }
    return _without_none(
        {
            "autostart_policy": True,
            # A worker exits only if its node is to be replaced or it was asked to stop.
            "restart_policy": "always",
            "container": _without_none(container),
            # The API allows 20 failures: with the delay, 21 minutes to load and compile the model.
            "startup_probe": _probe("started", delay=60, period=60, failures=20),
            "liveness_probe": _probe("live", delay=0, period=30, failures=3),
            "country_codes": file.countries,
        }
    )


def _without_none(fields: JSONDict) -> JSONDict:
    return {name: value for name, value in fields.items() if value is not None}


def _check_value(name: str, value: str) -> None:
    if "\n" in value:
        raise SetupError(
            f"environment: {name} has several lines; SaladCloud allows one"
        )
    if not 1 <= len(value) <= MAX_VALUE:
        raise SetupError(
            f"environment: {name} has {len(value):,} characters; SaladCloud allows 1 to"
            f" {MAX_VALUE:,}. Set the account, the queue and the SAS tokens separately"
            " (IMAGEFLEET_STORAGE, IMAGEFLEET_QUEUE, IMAGEFLEET_SAS ...); for shorter tokens, use a"
            " shorter name of --policy, or a broker"
        )
    if "accountkey=" in value.lower():
        raise SetupError(
            f"environment: {name} contains the storage account's key, which grants full access;"
            " nodes are other people's computers: use SAS tokens (`imagefleet keys` makes them)"
        )


def _probe(state: str, *, delay: int, period: int, failures: int) -> JSONDict:
    return {
        "exec": {"command": ["imagefleet", "health", state]},
        "initial_delay_seconds": delay,
        "period_seconds": period,
        "timeout_seconds": 10,
        "success_threshold": 1,
        "failure_threshold": failures,
    }
