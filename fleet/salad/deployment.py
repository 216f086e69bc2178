"""Brings a fleet's container groups on SaladCloud from their actual to their desired state.

Each step checks the actual state first, so an interrupted command can be run again.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from dataclasses import dataclass

import aiohttp

from cli import console
from fleet.salad import client as salad_client
from fleet.salad import groups as salad_groups
from fleet.salad.changes import Changes
from fleet.salad.client import SaladClient
from fleet.salad.file import FleetFile
from fleet.salad.groups import Group, Groups, Replicas
from imagefleet.errors import SetupError, TransientError
from imagefleet.telemetry import proxies
from imagefleet.validation import JSONObject

#: Instances start and stop within minutes; each poll is one call.
POLL_SECONDS = 10.0

#: Share of the new replicas that must run before old ones are drained.
ENOUGH = 0.8


@dataclass
class Deployment:
    """The container groups of one fleet; each step is a line on stderr."""

    client: SaladClient
    fleet: str

    async def groups(self) -> list[Group]:
        """The fleet's groups, of all revisions."""
        found = await self.client.groups()
        ours = {
            name: group
            for group in found
            if (name := salad_groups.parse_name(self.fleet, group.name))
        }
        return [ours[name] for name in sorted(ours)]

    async def existing_groups(self) -> list[Group]:
        """The fleet's groups as `groups` finds them; raises SetupError if there are none."""
        groups = await self.groups()
        if not groups:
            raise SetupError(
                f"the fleet {self.fleet} has no groups on SaladCloud: create them with"
                " `imagefleet deploy apply`"
            )
        return groups

    async def apply(
        self, plan: Changes, bodies: Sequence[JSONObject], wait_seconds: float
    ) -> None:
        """Takes the steps of *plan*, then deletes old groups; *bodies* creates new ones.

        A step shrinks groups, waits until their instances are gone, and grows others; the next one
        follows once `ENOUGH` of the new replicas run. Raises TransientError if what is awaited does
        not come within *wait_seconds*.
        """
        await self.end_by(await self.groups(), None)
        for step in plan.steps:
            groups = await self.groups()
            kept = {
                group.name: min(step[group.name], group.live_replicas)
                for group in groups
            }
            await self.resize(groups, kept)
            if plan.new_replicas or plan.delete:
                await self._until_at_most(kept, groups, wait_seconds)
            await self.resize(await self.groups(), step)
            for body in bodies:
                name = body["name"]
                count = step[name]
                if count and name not in kept:
                    await self.client.create({**body, "replicas": count})
                    console.print_note(
                        f"created {name}: {console.counted(count, 'replica')}"
                    )
            if step is not plan.steps[-1]:
                await self._until_running(step.keys() - plan.delete, wait_seconds)
        if plan.delete:
            await self.delete(plan.delete)

    async def resize(self, groups: Iterable[Group], replicas: Replicas) -> None:
        """Gives *groups* their *replicas*, and starts those that are stopped and get any."""
        for group in groups:
            name = group.name
            count = replicas[name]
            if count != group.replicas:
                await self.client.patch(name, {"replicas": count})
                console.print_note(f"{name}: {console.counted(count, 'replica')}")
            if count and group.is_stopped:
                await self.client.turn(name, "start")
                console.print_note(f"started {name}")

    async def end_by(self, groups: Iterable[Group], schedule: str | None) -> None:
        """Has SaladCloud scale *groups* to none by the *schedule*, a cron's; None: no more."""
        schedules = [schedule] if schedule else []
        body = {
            "scheduled-scaling-enabled": True,
            "scaling-actions": [
                {"schedule": each, "replicas": 0} for each in schedules
            ],
        }
        for group in groups:
            if group.schedules != schedules:
                await self.client.patch(group.name, body)

    async def drain(self, wait_seconds: float) -> None:
        """Scales to zero, then stops the groups; raises TransientError if instances are left."""
        groups = await self.groups()
        none = {group.name: 0 for group in groups}
        await self.resize(groups, none)
        await self._until_at_most(none, groups, wait_seconds)
        for group in groups:
            if not group.is_stopped:
                await self.client.turn(group.name, "stop")
                console.print_note(f"stopped {group.name}")

    async def delete(self, names: Sequence[str], wait_seconds: float = 600) -> None:
        """Deletes groups; raises TransientError if some still exist after *wait_seconds*."""
        for name in names:
            await self.client.delete(name)
            console.print_note(f"deleting {name}")

        def left(groups: Groups) -> int:
            return sum(group.name in names for group in groups)

        await self._until_none(left, "group", "not deleted yet", wait_seconds)

    async def _until_at_most(
        self, most: Replicas, before: Iterable[Group], wait_seconds: float
    ) -> None:
        """Raises SetupError if somebody else makes the fleet larger than it was *before*."""
        were = {group.name: group.live_replicas for group in before}

        def more(groups: Groups) -> int:
            for group in groups:
                if group.live_replicas > were.get(group.name, 0):
                    raise SetupError(
                        f"somebody else changes the fleet: {group.name} has"
                        f" {console.counted(group.live_replicas, 'replica')} now; see `imagefleet"
                        " deploy status`, and run this again once that has ended"
                    )
            return sum(
                max(0, group.on_nodes - most.get(group.name, 0)) for group in groups
            )

        await self._until_none(more, "instance", "still to stop", wait_seconds)

    async def _until_running(self, new: Collection[str], wait_seconds: float) -> None:
        def missing(groups: Groups) -> int:
            started = [group for group in groups if group.name in new]
            enough = math.ceil(ENOUGH * sum(group.replicas for group in started))
            return max(0, enough - sum(group.running for group in started))

        await self._until_none(missing, "new replica", "still to start", wait_seconds)

    async def _until_none(
        self,
        count: Callable[[Groups], int],
        noun: str,
        state: str,
        wait_seconds: float,
    ) -> None:
        """Polls until *count* is 0, and says how many there are when their number changes."""
        deadline = time.monotonic() + wait_seconds
        last = 0
        while left := count(await self.groups()):
            text = f"{console.counted(left, noun)} {state}"
            if left != last:
                console.print_note(text)
            last = left
            if time.monotonic() > deadline:
                raise TransientError(
                    f"after {wait_seconds / 60:,.0f} minutes: {text}. Nothing was undone: check"
                    " `imagefleet deploy status`, and run the same command again to continue"
                )
            await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def connected(file: FleetFile) -> AsyncIterator[Deployment]:
    key = file.api_key.read().get_secret_value()
    if not key.isprintable():
        raise SetupError(
            f"the key of SaladCloud's API, the variable {file.api_key.env}, has a line break or"
            " another control character in it: copy it again"
        )
    timeout = aiohttp.ClientTimeout(total=salad_client.TIMEOUT_SECONDS)
    async with proxies.session(timeout=timeout) as session:
        client = SaladClient(session, file.api, key, file.organization, file.project)
        yield Deployment(client, file.name)
