"""What SaladCloud's API tells of container groups, their instances and the quota."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagefleet import errors


@dataclass(frozen=True, slots=True)
class Group:
    """A container group as it is; *replicas* are wanted, the counts are what there is."""

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
    def instances(self) -> int:
        """All that are on a node, or on their way to or from one."""
        return self.allocating + self.creating + self.running + self.stopping

    @property
    def on_nodes(self) -> int:
        """Those whose end can be waited for: an allocation that fails leaves no instance."""
        return self.creating + self.running + self.stopping


@dataclass(frozen=True, slots=True)
class Quota:
    """Replicas that an organization may have; those of stopped groups are used, too."""

    replicas: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.replicas - self.used)


def as_group(record: Mapping[str, Any]) -> Group:
    """Raises TransientError for an answer that is not of the API's shape."""
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
        raise errors.TransientError(f"SaladCloud's container group: {error!r}") from None


def as_quota(record: Mapping[str, Any]) -> Quota:
    """Raises TransientError for an answer that is not of the API's shape."""
    try:
        quotas = record["container_groups_quotas"]
        return Quota(
            int(quotas["container_replicas_quota"]), int(quotas["container_replicas_used"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise errors.TransientError(f"SaladCloud's quota: {error!r}") from None
