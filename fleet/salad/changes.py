"""Plans the steps from a fleet's container groups to the wanted ones.

No step has more replicas, or a higher price, than the groups before the change or those after it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.salad import groups as salad_groups
from fleet.salad.groups import Group, Quota
from imagefleet import errors

#: Old groups are drained in this many steps, each only once the new replicas before it run.
DRAIN_STEPS = 4


@dataclass(frozen=True, slots=True)
class Changes:
    """Groups to create or resize, with their replicas, to start, and old ones to delete.

    *steps* has the replicas of every group after each step. *new_replicas* start in all, and
    *least_replicas* stay throughout.
    """

    create: Mapping[str, int]
    resize: Mapping[str, int]
    start: Sequence[str]
    delete: Sequence[str]
    new_replicas: int
    least_replicas: int
    steps: Sequence[Mapping[str, int]]

    def __bool__(self) -> bool:
        return bool(self.create or self.resize or self.start or self.delete)


def applied(
    bodies: Sequence[Mapping[str, Any]],
    existing: Sequence[Group],
    quota: Quota,
    dollars: Mapping[str, float],
) -> Changes:
    """Changes from the *existing* groups to *bodies*; SetupError if one was changed elsewhere.

    *dollars* are $/h of one replica of each group, 0 where the price is unknown.
    """
    for body in bodies:
        for group in existing:
            if group.name == body["name"]:
                _refuse_drift(body, group)

    def cost(replicas: Mapping[str, int]) -> float:
        return sum(count * dollars[name] for name, count in replicas.items())

    wanted = {body["name"]: body["replicas"] for body in bodies}
    live = {group.name: group.live_replicas for group in existing}
    # Those that do not run give way first.
    running = {
        group.name: min(group.live_replicas, group.running) for group in existing
    }
    old = {name: count for name, count in running.items() if name not in wanted}
    new = {name: live.get(name, 0) for name in wanted}
    old_total, total = sum(old.values()), sum(wanted.values())
    most = max(total, min(sum(live.values()), quota.room(existing)))
    most_dollars = max(cost(live), cost(wanted))
    each = cost(wanted) / total
    steps: list[Mapping[str, int]] = []
    for quarters in reversed(range(DRAIN_STEPS + 1)) if old_total else [0]:
        old = _resplit(old, old_total * quarters // DRAIN_STEPS)
        fit = most - sum(old.values())
        if each:
            fit = min(
                fit, math.floor((most_dollars - cost(old)) / each + 1e-6)
            )  # rounding
        new = _resplit(new, min(total, max(sum(new.values()), fit)))
        if {**old, **new} not in steps[-1:]:
            steps.append({**old, **new})
    return _changes(wanted, existing, steps)


def resized(groups: Sequence[Group], replicas: int) -> Changes:
    """Changes that give *groups* so many *replicas* in all, and touch nothing else."""
    wanted = _resplit({group.name: group.live_replicas for group in groups}, replicas)
    return _changes(wanted, groups, [wanted])


def refuse_over_quota(plan: Changes, existing: Sequence[Group], quota: Quota) -> None:
    """Raises SetupError if the quota does not allow the replicas of *plan*."""
    wanted = sum(plan.steps[-1].values())
    room = quota.room(existing)
    if plan.new_replicas and wanted > room:
        raise errors.SetupError(
            f"SaladCloud's quota is {quota.replicas:,} replicas, and other groups use"
            f" {quota.replicas - room:,} (stopped ones count): {wanted:,} do not fit. Request a"
            " larger quota in the portal, or delete groups that you do not need"
        )


def is_rolling(groups: Sequence[Group]) -> bool:
    """True while groups of several revisions exist."""
    return len({group.name.rpartition("-")[0] for group in groups}) > 1


def _changes(
    wanted: Mapping[str, int],
    existing: Sequence[Group],
    steps: Sequence[Mapping[str, int]],
) -> Changes:
    kept = [group for group in existing if group.name in wanted]
    live = {group.name: group.live_replicas for group in existing}
    kept_by_step = [
        sum(min(count, before.get(name, 0)) for name, count in after.items())
        for before, after in itertools.pairwise([live, *steps])
    ]
    return Changes(
        create={name: count for name, count in wanted.items() if name not in live},
        resize={
            group.name: wanted[group.name]
            for group in kept
            if group.replicas != wanted[group.name]
        },
        start=[group.name for group in kept if group.is_stopped and wanted[group.name]],
        delete=[group.name for group in existing if group.name not in wanted],
        new_replicas=sum(
            max(0, count - live.get(name, 0)) for name, count in wanted.items()
        ),
        least_replicas=min(kept_by_step),
        steps=steps,
    )


def _resplit(shares: Mapping[str, int], replicas: int) -> dict[str, int]:
    return dict(
        zip(shares, salad_groups.split(replicas, list(shares.values())), strict=True)
    )


def _refuse_drift(body: Mapping[str, Any], group: Group) -> None:
    container = body["container"]
    variables = container["environment_variables"]
    pairs = {
        # The API may return the registry's full name; the digest stays.
        "image": (
            container["image"].rpartition("@")[2],
            group.image.rpartition("@")[2],
        ),
        "priority": (container["priority"], group.priority),
        "GPU classes": (set(container["resources"]["gpu_classes"]), set(group.gpu_ids)),
        # Names only: the API need not return values as they were sent.
        "environment": (
            set(variables),
            set(variables if group.environment is None else group.environment),
        ),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise errors.SetupError(
                f"{group.name} was changed elsewhere ({what}): change it back in the portal, or"
                " delete the group there and apply again"
            )
