"""A fleet's container groups on SaladCloud, brought from how they are to how they should be.

Each step looks at what is there first, so that a command that ended half-way is run again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet import console
from fleet.salad import groups as salad_groups
from fleet.salad.records import Group, Quota
from imagefleet import errors

if TYPE_CHECKING:
    from fleet.salad.api import SaladApi  # only those who ask a server wait for aiohttp to load

#: Instances come and go in minutes; one call each time.
POLL_SECONDS = 10.0

#: An old set of groups ends in so many steps, and each may show that the new one is not ready.
DRAIN_STEPS = 4

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs: groups to create, to resize and to start, and those of older revisions."""

    create: Sequence[Mapping[str, Any]]
    resize: Mapping[str, int]
    start: Sequence[str]
    old: Sequence[Group]
    more_replicas: int

    def __bool__(self) -> bool:
        return bool(self.create or self.resize or self.start or self.old)


def changes(bodies: Sequence[Mapping[str, Any]], existing: Sequence[Group]) -> Changes:
    """What is to be done to have *bodies* where there is *existing*.

    Raises:
        SetupError: a group of this revision was changed by other hands.
    """
    there = {group.name: group for group in existing}
    for body in bodies:
        if body["name"] in there:
            _refuse_drift(body, there[body["name"]])
    names = {body["name"] for body in bodies}
    kept = [there[name] for name in names if name in there]
    wanted = {body["name"]: int(body["replicas"]) for body in bodies}
    return Changes(
        create=[body for body in bodies if body["name"] not in there],
        resize={
            each.name: wanted[each.name] for each in kept if each.replicas != wanted[each.name]
        },
        start=sorted(each.name for each in kept if each.is_stopped),
        old=[group for group in existing if group.name not in names],
        more_replicas=sum(wanted.values()) - sum(group.replicas for group in kept),
    )


def refuse_over_quota(more_replicas: int, quota: Quota) -> None:
    """Raises SetupError, with all the numbers, where the organization may not have so many."""
    if more_replicas > quota.free:
        raise errors.SetupError(
            f"SaladCloud's quota is {quota.replicas:,} replicas, and {quota.used:,} are taken"
            f" (those of stopped groups count): {more_replicas:,} more do not fit. Ask for more in"
            " the portal, delete groups that are not needed, or take fewer --replicas"
        )


def is_rolling(groups: Sequence[Group]) -> bool:
    """Whether a second revision stands beside the first."""
    return len({group.name.rpartition("-")[0] for group in groups}) > 1


def refuse_unscalable(groups: Sequence[Group], replicas: int) -> None:
    """Raises SetupError where *groups* are not one set that can hold *replicas*."""
    if not groups:
        raise errors.SetupError("there are no groups to scale: `imagefleet deploy salad apply`")
    if is_rolling(groups):
        raise errors.SetupError(
            "groups of several revisions stand: a rolling change is not done; `apply` goes on"
        )
    if replicas > len(groups) * salad_groups.MAX_REPLICAS:
        raise errors.SetupError(
            f"{len(groups)} groups of {salad_groups.MAX_REPLICAS} replicas cannot hold"
            f" {replicas:,}: `imagefleet deploy salad apply --replicas {replicas}` creates more"
        )


class Deployment:
    """The container groups of one fleet; *tell* is told of each step, in words."""

    def __init__(self, api: SaladApi, fleet: str, tell: Tell) -> None:
        self.api = api
        self.fleet = fleet
        self._tell = tell

    async def groups(self) -> list[Group]:
        """The fleet's own, whatever their revision."""
        found = [
            (name.revision, name.number, group)
            for group in await self.api.groups()
            if (name := salad_groups.parse_name(self.fleet, group.name))
        ]
        return [group for *_, group in sorted(found, key=lambda each: each[:2])]

    async def carry_out(self, plan: Changes) -> None:
        """All but what is to be done with the groups of older revisions."""
        for body in plan.create:
            await self.api.create(body)
            self._tell(f"created {body['name']}: {console.counted(body['replicas'], 'replica')}")
        for name, replicas in plan.resize.items():
            await self.resize(name, replicas)
        for name in plan.start:
            await self.api.start(name)
            self._tell(f"started {name}")

    async def resize(self, name: str, replicas: int) -> None:
        await self.api.scale(name, replicas)
        self._tell(f"{name}: {console.counted(replicas, 'replica')} from now on")

    async def scale(self, replicas: int, groups: Sequence[Group]) -> None:
        """*replicas* spread over *groups*, which are started where they stand still."""
        shares = salad_groups.split(replicas, len(groups))
        # Fewer first: in between there is never more than either number.
        steps = sorted(
            zip(shares, groups, strict=True), key=lambda each: each[0] - each[1].replicas
        )
        for share, group in steps:
            if share != group.replicas:
                await self.resize(group.name, share)
            if share and group.is_stopped:
                await self.api.start(group.name)
                self._tell(f"started {group.name}")

    async def replace(self, old: Sequence[Group], *, enough: float, wait_seconds: float) -> None:
        """Waits until *enough* of the new set's replicas run; then ends the *old* set, stepwise.

        Raises:
            TransientError: too few of them run after *wait_seconds*; both sets stand.
        """
        names = {group.name for group in old}
        for step in reversed(range(DRAIN_STEPS)):
            shares = {group.name: group.replicas * step // DRAIN_STEPS for group in old}
            if any(group.replicas for group in old):
                await self._until_enough_run(names, enough, wait_seconds)
            for group in await self.groups():
                if group.replicas > shares.get(group.name, group.replicas):
                    await self.resize(group.name, shares[group.name])
            await self._until_at_most(sum(shares.values()), names, wait_seconds)
        await self.delete(sorted(names))

    async def drain(self, wait_seconds: float) -> None:
        """No replicas, and when no instance is left, stopped.

        Workers hand back what they hold; what one does not, comes back when its lease ends.

        Raises:
            TransientError: instances are left after *wait_seconds*.
        """
        groups = await self.groups()
        for group in groups:
            if group.replicas:
                await self.resize(group.name, 0)
        names = {group.name for group in groups}
        await self._until_at_most(0, names, wait_seconds)
        for group in groups:
            if not group.is_stopped:
                await self.api.stop(group.name)
                self._tell(f"stopped {group.name}")

    async def delete(self, names: Sequence[str], wait_seconds: float = 600) -> None:
        """Returns when they are gone; raises TransientError where they are not in time."""
        for name in names:
            await self.api.delete(name)
            self._tell(f"deleting {name}")
        await self._until(
            lambda groups: not any(group.name in names for group in groups),
            lambda groups: f"{sum(group.name in names for group in groups)} groups still there",
            wait_seconds,
        )

    async def _until_at_most(self, instances: int, names: set[str], wait_seconds: float) -> None:
        def left(groups: Sequence[Group]) -> int:
            return sum(group.on_nodes for group in groups if group.name in names)

        await self._until(
            lambda groups: left(groups) <= instances,
            lambda groups: f"still on their nodes: {left(groups):,}",
            wait_seconds,
        )

    async def _until_enough_run(self, old: set[str], enough: float, wait_seconds: float) -> None:
        def new(groups: Sequence[Group]) -> tuple[int, int]:
            fresh = [group for group in groups if group.name not in old]
            return sum(each.running for each in fresh), sum(each.replicas for each in fresh)

        await self._until(
            lambda groups: new(groups)[0] >= math.ceil(new(groups)[1] * enough),
            lambda groups: "the new set: {:,} of {:,} run".format(*new(groups)),
            wait_seconds,
        )

    async def _until(
        self,
        is_reached: Callable[[Sequence[Group]], bool],
        words: Callable[[Sequence[Group]], str],
        wait_seconds: float,
    ) -> None:
        deadline = time.monotonic() + wait_seconds
        told = ""
        while not is_reached(groups := await self.groups()):
            if words(groups) != told:
                told = words(groups)
                self._tell(told)
            if time.monotonic() > deadline:
                raise errors.TransientError(
                    f"after {wait_seconds / 60:,.0f} minutes: {told}. Nothing was undone: look with"
                    " `imagefleet deploy salad status`, and run the same command again to go on"
                )
            await asyncio.sleep(POLL_SECONDS)


def _refuse_drift(body: Mapping[str, Any], group: Group) -> None:
    container = body["container"]
    pairs = {
        # A registry's name may come back in full, its digest cannot differ.
        "image": tuple(each.rpartition("@")[2] for each in (container["image"], group.image)),
        "priority": (container["priority"], group.priority),
        "GPU classes": (set(container["resources"]["gpu_classes"]), set(group.gpu_ids)),
        # Names alone: whether the API shows values back as they are is its own affair.
        "environment": (
            set(container["environment_variables"]),
            set(
                container["environment_variables"]
                if group.environment is None
                else group.environment
            ),
        ),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise errors.SetupError(
                f"{group.name} was changed outside of this file ({what}): change it back in the"
                " portal, or delete the group there and apply again"
            )
