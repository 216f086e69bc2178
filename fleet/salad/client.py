"""A client of SaladCloud's API: what a fleet needs of it, within its rate limit."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
from aiolimiter import AsyncLimiter

from fleet.salad import gpus, groups, records, responses
from fleet.salad.file import FleetFile
from imagefleet import errors, retry

log = logging.getLogger(__name__)

#: SaladCloud allows 240 calls/min per API key. Any minute has at most the burst and 60 seconds of
#: the rate, 200 calls; the rest is left to the portal and to other commands.
CALL_BURST = 20
CALLS_PER_SECOND = 3

#: With the waits below, a call that gets no answer fails after three minutes.
TRIES = 8
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0

TIMEOUT_SECONDS = 60.0


def call_limiter() -> AsyncLimiter:
    return AsyncLimiter(CALL_BURST, CALL_BURST / CALLS_PER_SECOND)


class SaladClient:
    """The container groups of one project, through the API at *url*.

    Every method raises SetupError if SaladCloud refuses a call, TransientError if it fails.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        key: str,
        organization: str = "",
        project: str = "",
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._key = key
        self._url = url.rstrip("/")
        self._organization = f"/organizations/{organization}"
        self._containers = f"{self._organization}/projects/{project}/containers"
        self._limiter = call_limiter()
        self._sleep = sleep

    async def groups(self) -> list[records.Group]:
        """All groups of the project, those of other fleets included."""
        return [records.as_group(each) for each in await self._items(self._containers)]

    async def create(self, body: Mapping[str, Any]) -> None:
        """Creates a group; a repeated call is refused if the lost one had created it."""
        try:
            await self.call("POST", self._containers, body)
        except responses.RefusedError as refused:
            if not (refused.answer.is_repeat and await self._exists(body["name"])):
                raise

    async def scale(self, name: str, replicas: int) -> None:
        """Changes only the replicas, which restarts no worker."""
        await self.call("PATCH", f"{self._containers}/{name}", {"replicas": replicas})

    async def start(self, name: str) -> None:
        await self._post(name, "start")

    async def stop(self, name: str) -> None:
        await self._post(name, "stop")

    async def delete(self, name: str) -> None:
        """Deletes a group; one that no longer exists is fine."""
        try:
            await self.call("DELETE", f"{self._containers}/{name}")
        except responses.RefusedError as refused:
            if refused.answer.status != HTTPStatus.NOT_FOUND:
                raise

    async def quota(self) -> records.Quota:
        answer = await self.call("GET", f"{self._organization}/quotas")
        return records.as_quota(answer.body)

    async def gpu_classes(self) -> list[gpus.GpuClass]:
        """The available GPU classes, at today's prices."""
        return gpus.of_api(await self._items(f"{self._organization}/gpu-classes"))

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> responses.Answer:
        """The answer of a successful call; secrets in *body* are sent, but never shown.

        Raises:
            RefusedError: a 4xx.
            TransientError: every try failed.
        """
        # Not a RetryPolicy: Retry-After sets the waits, and a repetition must know that an earlier
        # try may have taken effect.
        may_be_done, retries = False, 0
        while True:
            await self._limiter.acquire()
            try:
                return await self._try(method, path, body, is_repeat=may_be_done)
            except responses.RetryLater as failure:
                if retries + 1 == TRIES:
                    raise errors.TransientError(f"{failure}, {TRIES} times") from None
                may_be_done = may_be_done or failure.may_be_done
                seconds = failure.after_seconds
                if seconds is None:
                    seconds = retry.backoff(retries, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
                log.warning(
                    "retrying in %.0f s: %s", seconds, failure, extra={"action": "salad_retry"}
                )
                await self._sleep(seconds)
                retries += 1

    async def _try(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, is_repeat: bool
    ) -> responses.Answer:
        headers = {"Accept": "application/json", "Salad-Api-Key": self._key}
        secrets = [self._key]
        data = None
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
            data = json.dumps(groups.reveal(body, secrets))
        try:
            # A redirect would send the key to wherever it points.
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                text = await response.text(errors="replace")
        except aiohttp.InvalidURL:
            raise errors.SetupError(f"{self._url} is not a valid URL of SaladCloud's API") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            # The call may have arrived and only its answer been lost.
            reason = str(error) or type(error).__name__
            raise responses.RetryLater(f"SaladCloud's API does not answer: {reason}") from None
        if not response.ok:  # it may quote what it refuses
            for secret in filter(None, secrets):
                text = text.replace(secret, groups.MASKED)
        return responses.read(response, text, is_repeat=is_repeat)

    async def _post(self, name: str, verb: str) -> None:
        try:
            await self.call("POST", f"{self._containers}/{name}/{verb}")
        except responses.RefusedError as refused:
            # A group cannot be stopped twice: the answer to the first call was lost.
            if not refused.answer.is_repeat:
                raise

    async def _exists(self, name: str) -> bool:
        try:
            await self.call("GET", f"{self._containers}/{name}")
        except responses.RefusedError:
            return False
        return True

    async def _items(self, path: str) -> list[Mapping[str, Any]]:
        body = (await self.call("GET", path)).body
        if not (isinstance(body, dict) and isinstance(body.get("items"), list)):
            raise errors.TransientError(f"SaladCloud's answer to {path} has no items")
        return list(body["items"])


@asynccontextmanager
async def connected(file: FleetFile, key: str) -> AsyncIterator[SaladClient]:
    """A client of the project that *file* names."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        yield SaladClient(session, file.api, key, file.organization, file.project)
