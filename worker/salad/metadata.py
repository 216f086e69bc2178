"""SaladCloud's metadata service: identity, deletion cost and reallocation of this node.

As published (salad-cloud-docs, api-specs/salad-cloud-imds.yaml, 0.9.0-alpha.3). It answers only
inside a container on SaladCloud; on Azure the same address is a different service. Requests carry
`Metadata: true` and no X-Forwarded header, go through no proxy and follow no redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import aiohttp
from prometheus_client import Counter

from imagefleet import errors, redaction, retry
from worker import tasks

log = logging.getLogger(__name__)

ADDRESS = "http://169.254.169.254"

#: The service is on the node itself, so it answers within seconds or not at all.
TIMEOUT_SECONDS = 3.0

#: The service rejects longer texts.
MAX_REASON_CHARACTERS = 1000

#: The limit of SaladCloud's own API (the metadata service takes any 32-bit integer).
MAX_DELETION_COST = 100_000

#: Set in every container on SaladCloud, and only there.
_MACHINE_VARIABLE = "SALAD_MACHINE_ID"

#: Another address of the service; a worker then behaves as on SaladCloud. For tests.
_ADDRESS_VARIABLE = "SALAD_METADATA_URL"

#: A token has 1,000 characters at most; the page of another service may have any number.
_MAX_ANSWER_BYTES = 65_536

_OK, _NO_CONTENT = 200, 204

#: Seconds between two updates of the deletion cost, sent only when it has changed: a group is made
#: smaller every quarter of an hour at most.
COST_SECONDS = 15.0

#: A smaller change does not matter when replicas are compared.
_MATERIAL_FACTOR = 2

#: SaladCloud may take minutes to stop a container; one that is still running then exits.
REALLOCATION_SECONDS = 600.0


class SaladMetadata:
    """The metadata service of the node that this process runs on.

    Every method raises TransientError if the service does not answer as specified. Calls are rare,
    so each opens its own connection.
    """

    def __init__(self, address: str = ADDRESS, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._address = address.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def token(self) -> str:
        """A JWT that identifies this container, valid for 2 to 5 minutes."""
        jwt = _field(await self._request("GET", "/v1/token", None, _OK), "jwt")
        if not isinstance(jwt, str) or not jwt:
            raise errors.TransientError("SaladCloud's metadata service answers without a token")
        return jwt

    async def set_deletion_cost(self, cost: int) -> None:
        """Replicas of the lowest cost are stopped first when the group is made smaller."""
        body = {"deletion_cost": max(0, min(cost, MAX_DELETION_COST))}
        await self._request("PUT", "/v1/deletion-cost", body, _NO_CONTENT)

    async def reallocate(self, reason: str) -> None:
        """Requests another node; the *reason*, cut off, goes to SaladCloud's support."""
        body = {"reason": reason[:MAX_REASON_CHARACTERS]}
        await self._request("POST", "/v1/reallocate", body, _NO_CONTENT)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, expected: int
    ) -> bytes:
        try:
            # By default a session ignores proxies in the environment.
            async with (
                aiohttp.ClientSession(
                    timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
                ) as client,
                client.request(
                    method,
                    self._address + path,
                    json=body,
                    headers={"Metadata": "true"},
                    allow_redirects=False,
                ) as answer,
            ):
                status, reason = answer.status, answer.reason
                content = await answer.content.read(_MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise errors.TransientError(
                f"SaladCloud's metadata service does not answer: {type(error).__name__}"
                f" {redaction.reason(error)}"
            ) from None
        if status != expected:
            detail = _field(content, "detail")  # of its errors; any other page has none
            raise errors.TransientError(
                f"SaladCloud's metadata service answers {path} with {status} {reason}"
                + (f": {str(detail)[:200]}" if detail else "")
            )
        return content


def find_metadata() -> SaladMetadata | None:
    """The node's service on SaladCloud, else None; `SALAD_METADATA_URL` overrides both."""
    address = os.environ.get(_ADDRESS_VARIABLE)
    if address:
        return SaladMetadata(address)
    return SaladMetadata() if os.environ.get(_MACHINE_VARIABLE) else None


def _field(answer: bytes, name: str) -> Any:
    try:
        return json.loads(answer)[name]
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.asynccontextmanager
async def updating_deletion_cost(
    metadata: SaladMetadata | None, jobs_in_flight: Callable[[], int]
) -> AsyncIterator[None]:
    """Keeps the deletion cost at the number of jobs in flight while the block runs.

    It matters only for intended reductions; an owner who returns stops any replica.
    """
    if metadata is None:
        yield
        return
    async with tasks.background(_update(metadata, jobs_in_flight), "deletion cost"):
        yield


async def _update(metadata: SaladMetadata, jobs_in_flight: Callable[[], int]) -> NoReturn:
    current = 0  # a new container's
    has_failed = False
    while True:
        cost = jobs_in_flight()
        if cost != current and max(cost, current) >= _MATERIAL_FACTOR * min(cost, current):
            try:
                await metadata.set_deletion_cost(cost)
            except errors.TransientError as error:
                if not has_failed:
                    log.warning(
                        "the deletion cost is not updated, the work goes on: %s",
                        error,
                        extra={"action": "deletion_cost_failed"},
                    )
                has_failed = True
            else:
                current, has_failed = cost, False
        await asyncio.sleep(retry.jitter(COST_SECONDS, 0.8, 1.2))


class Reallocation:
    """Requests another node for this container, once.

    SaladCloud moves a container that ends with a code other than 0 as well, but without a reason.
    Either way the node is kept from the group for 48 hours. So a worker requests, then waits to be
    stopped: if it exited too, that could count against this node, or the next one, a second time.
    """

    def __init__(self, metadata: SaladMetadata, requests: Counter) -> None:
        self._metadata = metadata
        self._requests = requests
        self._is_granted = False

    async def request(self, reason: str) -> bool:
        """Requests another node unless that is granted already; returns whether it is granted.

        One whose reply is lost counts as refused: the next one comes a quarter of an hour later.
        """
        if self._is_granted:
            return True
        try:
            await self._metadata.reallocate(reason)
        except errors.TransientError as error:
            self._requests.labels("refused").inc()
            log.error(  # noqa: TRY400 - its message says it all
                "requesting another node failed: %s",
                error,
                extra={"action": "reallocation_failed", "reason": reason},
            )
            return False
        self._is_granted = True
        self._requests.labels("granted").inc()
        log.warning(
            "requested another node, waiting to be stopped: %s",
            reason,
            extra={"action": "reallocation", "reason": reason},
        )
        return True
