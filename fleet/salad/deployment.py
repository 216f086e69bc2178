"""Brings a fleet's container groups on SaladCloud from their actual to their desired state.

Each step checks the actual state first, so an interrupted command can be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from fleet import console
from fleet.salad import client as salad_client
from fleet.salad import groups as salad_groups
from fleet.salad.client import SaladClient
from fleet.salad.file import FleetFile
from fleet.salad.groups import Group, Quota
from imagefleet import errors, retry
from imagefleet.telemetry import proxies

#: Instances start and stop within minutes; each poll is one call.
POLL_SECONDS = 10.0

#: Old groups are drained in this many steps, each only once the new groups run.
DRAIN_STEPS = 4


@dataclass(frozen=True, slots=True)
class Changes:
    """Groups to create or resize, with their replicas, to start, and old ones to delete."""

    create: Mapping[str, int]
    resize: Mapping[str, int]
    start: Sequence[str]
    delete: Sequence[str]
    more_replicas: int

    def __bool__(self) -> bool:
        return bool(self.create or self.resize or self.start or self.delete)


def changes(bodies: Sequence[Mapping[str, Any]], existing: Sequence[Group]) -> Changes:
    """What turns *existing* into *bodies*; raises SetupError if one was changed elsewhere."""
    for body in bodies:
        for group in existing:
            if group.name == body["name"]:
                _refuse_drift(body, group)
    return _changes({body["name"]: body["replicas"] for body in bodies}, existing)


def resized(groups: Sequence[Group], replicas: int) -> Changes:
    """What spreads *replicas* over *groups*, which changes nothing else."""
    shares = salad_groups.split(replicas, len(groups))
    return _changes(dict(zip((group.name for group in groups), shares, strict=True)), groups)


def refuse_unscalable(groups: Sequence[Group], replicas: int) -> None:
    """Raises SetupError if *groups* are of several revisions or too few for *replicas*."""
    if is_rolling(groups):
        raise errors.SetupError(
            "a rolling change is unfinished: run `imagefleet deploy apply` to continue it"
        )
    if replicas > len(groups) * salad_groups.MAX_REPLICAS:
        raise errors.SetupError(
            f"{len(groups)} groups can have {salad_groups.MAX_REPLICAS} replicas each, fewer than"
            f" {replicas:,}: `imagefleet deploy apply --replicas {replicas}` adds groups"
        )


def _changes(wanted: Mapping[str, int], existing: Sequence[Group]) -> Changes:
    """What gives the fleet the *wanted* replicas by group, and no other group."""
    kept = [group for group in existing if group.name in wanted]
    # Reductions first, so that the total never exceeds the old and the new one.
    kept.sort(key=lambda group: wanted[group.name] - group.replicas)
    names = {group.name for group in existing}
    return Changes(
        create={name: replicas for name, replicas in wanted.items() if name not in names},
        resize={
            group.name: wanted[group.name] for group in kept if group.replicas != wanted[group.name]
        },
        start=[group.name for group in kept if group.is_stopped and wanted[group.name]],
        delete=[group.name for group in existing if group.name not in wanted],
        more_replicas=sum(wanted.values()) - sum(group.replicas for group in kept),
    )


def refuse_over_quota(more_replicas: int, quota: Quota) -> None:
    """Raises SetupError if the quota does not allow so many more."""
    if more_replicas > quota.free:
        raise errors.SetupError(
            f"SaladCloud's quota is {quota.replicas:,} replicas and {quota.used:,} are in use"
            f" (stopped groups count): {more_replicas:,} more do not fit. Request a larger quota in"
            " the portal, delete groups that you do not need, or use fewer --replicas"
        )


def is_rolling(groups: Sequence[Group]) -> bool:
    """True while groups of several revisions exist."""
    return len({group.name.rpartition("-")[0] for group in groups}) > 1


class Deployment:
    """The container groups of one fleet; each step is a line on stderr."""

    def __init__(self, client: SaladClient, fleet: str) -> None:
        self.client = client
        self.fleet = fleet

    async def groups(self) -> list[Group]:
        """The fleet's groups, of all revisions."""
        found = await self.client.groups()
        parse = salad_groups.parse_name
        ours = {name: group for group in found if (name := parse(self.fleet, group.name))}
        return [ours[name] for name in sorted(ours)]

    async def existing_groups(self) -> list[Group]:
        """The same as `groups`; raises SetupError if there are none."""
        groups = await self.groups()
        if not groups:
            raise errors.SetupError(
                f"the fleet {self.fleet} has no groups on SaladCloud: create them with"
                " `imagefleet deploy apply`"
            )
        return groups

    async def carry_out(self, plan: Changes, bodies: Iterable[Mapping[str, Any]] = ()) -> None:
        """Makes the changes, except for old groups: those are for `replace`.

        *bodies* has the requests of the groups to create.
        """
        for body in bodies:
            if body["name"] in plan.create:
                await self.client.create(body)
                console.print_note(
                    f"created {body['name']}: {console.counted(body['replicas'], 'replica')}"
                )
        for name, replicas in plan.resize.items():
            await self.resize(name, replicas)
        for name in plan.start:
            await self.client.start(name)
            console.print_note(f"started {name}")

    async def resize(self, name: str, replicas: int) -> None:
        await self.client.scale(name, replicas)
        console.print_note(f"{name}: {console.counted(replicas, 'replica')}")

    async def replace(self, old: Sequence[str], *, enough: float, wait_seconds: float) -> None:
        """Drains *old* groups in steps; raises TransientError if not *enough* new replicas run."""
        groups = await self.groups()
        replicas = {group.name: group.replicas for group in groups if group.name in old}

        def pending(groups: Sequence[Group]) -> str:
            new = [group for group in groups if group.name not in old]
            running = sum(group.running for group in new)
            wanted = sum(group.replicas for group in new)
            if running >= math.ceil(wanted * enough):
                return ""
            return f"new groups: {running:,} of {wanted:,} replicas run"

        for step in reversed(range(DRAIN_STEPS)):
            shares = {name: count * step // DRAIN_STEPS for name, count in replicas.items()}
            if any(replicas.values()):
                await self._until_none(pending, wait_seconds)
            for group in await self.groups():
                if group.replicas > shares.get(group.name, group.replicas):
                    await self.resize(group.name, shares[group.name])
            await self._until_at_most(sum(shares.values()), old, wait_seconds)
        await self.delete(old)

    async def drain(self, wait_seconds: float) -> None:
        """Scales to zero, then stops the groups; raises TransientError if instances are left."""
        groups = await self.groups()
        for group in groups:
            if group.replicas:
                await self.resize(group.name, 0)
        await self._until_at_most(0, [group.name for group in groups], wait_seconds)
        for group in groups:
            if not group.is_stopped:
                await self.client.stop(group.name)
                console.print_note(f"stopped {group.name}")

    async def delete(self, names: Sequence[str], wait_seconds: float = 600) -> None:
        """Deletes groups; raises TransientError if some still exist after *wait_seconds*."""
        for name in names:
            await self.client.delete(name)
            console.print_note(f"deleting {name}")

        def pending(groups: Sequence[Group]) -> str:
            left = sum(group.name in names for group in groups)
            return f"{console.counted(left, 'group')} not deleted yet" if left else ""

        await self._until_none(pending, wait_seconds)

    async def _until_at_most(self, most: int, names: Sequence[str], wait_seconds: float) -> None:
        def pending(groups: Sequence[Group]) -> str:
            left = sum(group.on_nodes for group in groups if group.name in names)
            return f"{left:,} instances still run" if left > most else ""

        await self._until_none(pending, wait_seconds)

    async def _until_none(
        self, pending: Callable[[Sequence[Group]], str], wait_seconds: float
    ) -> None:
        """Polls until *pending* describes nothing any more, and logs what it describes."""
        deadline = time.monotonic() + wait_seconds
        last = ""
        while text := pending(await self.groups()):
            if text != last:
                console.print_note(text)
            last = text
            if time.monotonic() > deadline:
                raise errors.TransientError(
                    f"after {wait_seconds / 60:,.0f} minutes: {text}. Nothing was undone: check"
                    " `imagefleet deploy status`, and run the same command again to continue"
                )
            await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def connected(
    file: FleetFile, retry_policy: retry.RetryPolicy | None = None
) -> AsyncIterator[Deployment]:
    """The fleet that *file* describes, as deployed on SaladCloud."""
    key = file.api_key.read().get_secret_value()
    if not key.isprintable():
        raise errors.SetupError(
            f"the key of SaladCloud's API, {file.api_key.place}, has a line break or another"
            " control character in it: copy it again"
        )
    timeout = aiohttp.ClientTimeout(total=salad_client.TIMEOUT_SECONDS)
    async with proxies.session(timeout=timeout) as session:
        salad = salad_client.SaladClient(
            session, file.api, key, file.organization, file.project, retry_policy
        )
        yield Deployment(salad, file.name)


def _refuse_drift(body: Mapping[str, Any], group: Group) -> None:
    container = body["container"]
    variables = container["environment_variables"]
    pairs = {
        # The API may return the registry's full name; the digest stays.
        "image": (container["image"].rpartition("@")[2], group.image.rpartition("@")[2]),
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
