"""Plans the steps from a fleet's container groups to the wanted ones.

No step has more replicas, or a higher price, than the groups before the change or those after it,
nor more than the quota allows, which may have been lowered.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.salad import groups as salad_groups
from fleet.salad.groups import Groups, Quota, Replicas
from imagefleet.errors import SetupError
from imagefleet.validation import JSONObject

#: New groups take the place of old ones in this many steps, each only once the new replicas of the
#: step before it run.
STEPS = 4


@dataclass(frozen=True)
class Changes:
    """Groups to create or resize, with their replicas, to start, and old ones to delete.

    *steps* has the replicas of every group after each step. *new_replicas* start in all, and
    *least_replicas* stay throughout.
    """

    create: Replicas
    resize: Replicas
    start: Sequence[str]
    delete: Sequence[str]
    new_replicas: int
    least_replicas: int
    steps: Sequence[Replicas]

    def __bool__(self) -> bool:
        return bool(self.create or self.resize or self.start or self.delete)


def applied(bodies: Sequence[JSONObject], existing: Groups, room: int) -> Changes:
    """Changes from the *existing* groups to *bodies*, by their names, which have the revision.

    *room*: the replicas that the quota leaves to all of them.
    """
    wanted = {body["name"]: body["replicas"] for body in bodies}
    steps = _steps(wanted, existing, room)
    live = {group.name: group.live_replicas for group in existing}
    kept_by_step = [
        sum(min(count, before.get(name, 0)) for name, count in after.items())
        for before, after in itertools.pairwise([live, *steps])
    ]
    kept = [group for group in existing if group.name in wanted]
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


def _steps(wanted: Replicas, existing: Groups, room: int) -> list[Replicas]:
    """Replicas after each step: old ones give way to the same share of the new ones.

    So no step has more replicas, or a higher price, than the first or the last, nor more than have
    *room*.
    """
    new = dict.fromkeys(wanted, 0)
    old = {}
    live = 0
    for group in existing:
        if group.name in wanted:
            new[group.name] = group.live_replicas
        else:
            old[group.name] = min(group.live_replicas, group.running)
            live += group.live_replicas
    running = sum(old.values())
    total = sum(wanted.values())
    steps: list[Replicas] = []
    for left in reversed(range(STEPS)) if running else [0]:
        share = total * (STEPS - left) // STEPS
        new = salad_groups.resplit(new, min(total, max(sum(new.values()), share)))
        # Those that do not run give way first.
        most = max(0, room - sum(new.values()))
        old = salad_groups.resplit(old, min(running, live * left // STEPS, most))
        if {**old, **new} not in steps[-1:]:
            steps.append({**old, **new})
    return steps


def refuse_over_quota(plan: Changes, room: int, quota: Quota) -> None:
    """Raises SetupError if the *room* that the quota leaves is too small for *plan*."""
    wanted = sum(plan.steps[-1].values())
    if plan.new_replicas and wanted > room:
        raise SetupError(
            f"SaladCloud's quota is {quota.replicas:,} replicas, and other groups use"
            f" {quota.replicas - room:,} (stopped ones count): {wanted:,} do not fit. Request a"
            " larger quota in the portal, or delete groups that you do not need"
        )
