"""Container groups and the quota, as SaladCloud's API returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagefleet import errors


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


@dataclass(frozen=True, slots=True)
class Quota:
    """The replicas that an organization may have; those of stopped groups count as used."""

    replicas: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.replicas - self.used)


def as_group(record: Mapping[str, Any]) -> Group:
    """Raises TransientError if the answer does not have the expected fields."""
    try:
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
    except (KeyError, TypeError, ValueError) as error:
        raise errors.TransientError(f"invalid container group from SaladCloud: {error!r}") from None


def as_quota(record: Mapping[str, Any]) -> Quota:
    """Raises TransientError if the answer does not have the expected fields."""
    try:
        quotas = record["container_groups_quotas"]
        return Quota(
            int(quotas["container_replicas_quota"]), int(quotas["container_replicas_used"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise errors.TransientError(f"invalid quota from SaladCloud: {error!r}") from None
