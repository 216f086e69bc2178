"""SaladCloud's API, as much of it as a fleet needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp

from fleet.salad import client, gpus
from fleet.salad import records as salad_records
from fleet.salad.file import FleetFile
from imagefleet import errors

TIMEOUT_SECONDS = 60.0


class SaladApi:
    """The container groups of one project.

    Every method raises SetupError where SaladCloud refuses a call, TransientError where it fails.
    """

    def __init__(self, calls: client.SaladClient, organization: str, project: str) -> None:
        self._calls = calls
        self._organization = f"/organizations/{organization}"
        self._containers = f"{self._organization}/projects/{project}/containers"

    async def groups(self) -> list[salad_records.Group]:
        """All of the project, of whichever fleet."""
        return [salad_records.as_group(each) for each in await self._items(self._containers)]

    async def create(self, body: Mapping[str, Any]) -> None:
        """Creates a group; where the answer was lost, its repetition is refused: it is there."""
        try:
            await self._calls.call("POST", self._containers, body)
        except client.Refused as refused:
            if not (refused.answer.is_repeat and await self._exists(body["name"])):
                raise

    async def scale(self, name: str, replicas: int) -> None:
        """Changes the replicas alone, which restarts none."""
        await self._calls.call("PATCH", f"{self._containers}/{name}", {"replicas": replicas})

    async def start(self, name: str) -> None:
        await self._tell(name, "start")

    async def stop(self, name: str) -> None:
        await self._tell(name, "stop")

    async def delete(self, name: str) -> None:
        """A group that is not there any more is as good as deleted."""
        try:
            await self._calls.call("DELETE", f"{self._containers}/{name}")
        except client.Refused as refused:
            if refused.answer.status != HTTPStatus.NOT_FOUND:
                raise

    async def quota(self) -> salad_records.Quota:
        answer = await self._calls.call("GET", f"{self._organization}/quotas")
        return salad_records.as_quota(answer.body)

    async def gpu_classes(self) -> list[gpus.GpuClass]:
        """The classes that there are, at today's prices."""
        return gpus.of_api(await self._items(f"{self._organization}/gpu-classes"))

    async def _tell(self, name: str, verb: str) -> None:
        try:
            await self._calls.call("POST", f"{self._containers}/{name}/{verb}")
        except client.Refused as refused:
            # What has been stopped cannot be stopped again: the first answer was lost.
            if not refused.answer.is_repeat:
                raise

    async def _exists(self, name: str) -> bool:
        try:
            await self._calls.call("GET", f"{self._containers}/{name}")
        except client.Refused:
            return False
        return True

    async def _items(self, path: str) -> list[Mapping[str, Any]]:
        body = (await self._calls.call("GET", path)).body
        if not (isinstance(body, dict) and isinstance(body.get("items"), list)):
            raise errors.TransientError(f"SaladCloud's answer to {path} has no items")
        return list(body["items"])


@asynccontextmanager
async def connected(file: FleetFile, key: str) -> AsyncIterator[SaladApi]:
    """The project that *file* names, with the API key."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        yield SaladApi(client.SaladClient(session, file.api, key), file.organization, file.project)
