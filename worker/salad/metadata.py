"""SaladCloud's metadata service: a node's own word about itself, and the way off a bad one.

As published (salad-cloud-docs, api-specs/salad-cloud-imds.yaml, 0.9.0-alpha.3). It answers only
inside a container on SaladCloud, at an address that on Azure is another service. Each request
carries `Metadata: true` and no X-Forwarded header, goes through no proxy and is never redirected.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import aiohttp

from imagefleet import errors

ADDRESS = "http://169.254.169.254"

#: The service is on the node itself: what does not answer within seconds will not.
TIMEOUT_SECONDS = 3.0

#: The platform takes no longer text.
MAX_REASON_CHARACTERS = 1000

#: The range that SaladCloud's own interface takes (the metadata service's is any 32-bit integer).
MAX_DELETION_COST = 100_000

#: Set in each of its containers, and nowhere else.
_VARIABLE = "SALAD_MACHINE_ID"

#: A token has 1,000 characters at most; a page that is no answer of the service may have any.
_MAX_ANSWER_BYTES = 65_536

_OK, _NO_CONTENT = 200, 204


@dataclass(frozen=True, slots=True)
class Status:
    """What the platform's probes found of this container."""

    ready: bool
    started: bool


class SaladMetadata:
    """The metadata service of the node that this process runs on.

    Every method raises TransientError where the service does not answer, or answers anything but
    what its specification says. Calls are rare, so each has a connection of its own.
    """

    def __init__(self, address: str = ADDRESS, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._address = address.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def token(self) -> str:
        """A JWT that proves which container this is; good for 2 minutes at least, 5 at most."""
        jwt = (await self._get("/v1/token")).get("jwt")
        if not isinstance(jwt, str) or not jwt:
            raise errors.TransientError("SaladCloud's metadata service answers without a token")
        return jwt

    async def status(self) -> Status:
        answer = await self._get("/v1/status")
        ready, started = answer.get("ready"), answer.get("started")
        if not isinstance(ready, bool) or not isinstance(started, bool):
            raise errors.TransientError("SaladCloud's metadata service answers without a status")
        return Status(ready, started)

    async def deletion_cost(self) -> int:
        cost = (await self._get("/v1/deletion-cost")).get("deletion_cost")
        if not isinstance(cost, int):
            raise errors.TransientError("SaladCloud's metadata service answers without a cost")
        return cost

    async def set_deletion_cost(self, cost: int) -> None:
        """Of several replicas, one of the lowest cost goes first when the group is made smaller."""
        body = {"deletion_cost": max(0, min(cost, MAX_DELETION_COST))}
        await self._send("PUT", "/v1/deletion-cost", body)

    async def reallocate(self, reason: str) -> None:
        """Asks for another node; this one is kept from the group for 48 hours.

        *reason* goes to SaladCloud's support; what is over 1,000 characters of it is cut off.
        """
        await self._send("POST", "/v1/reallocate", {"reason": reason[:MAX_REASON_CHARACTERS]})

    async def _get(self, path: str) -> dict[str, Any]:
        body = await self._request("GET", path, None, _OK)
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise errors.TransientError(
                f"SaladCloud's metadata service answers {path} with no JSON"
            )
        return answer

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        await self._request(method, path, body, _NO_CONTENT)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, expected: int
    ) -> bytes:
        try:
            # A session reads no proxy from the environment unless it is told to.
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
                f"SaladCloud's metadata service does not answer: {type(error).__name__} {error}"
            ) from None
        if status != expected:
            raise errors.TransientError(
                f"SaladCloud's metadata service answers {path} with {status} {reason}"
                f"{_detail(content)}"
            )
        return content


def find_metadata(address: str | None) -> SaladMetadata | None:
    """The service at *address*; without one, the node's own on SaladCloud and none elsewhere."""
    if address is not None:
        return SaladMetadata(address)
    return SaladMetadata() if os.environ.get(_VARIABLE) else None


def _detail(content: bytes) -> str:
    """What an error of the service says for itself; pages of anything else say nothing here."""
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {str(detail)[:200]}"
