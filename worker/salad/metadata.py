"""SaladCloud's metadata service: identity, deletion cost and reallocation of this node.

As published (salad-cloud-docs, api-specs/salad-cloud-imds.yaml, 0.9.0-alpha.3). It answers only
inside a container on SaladCloud; on Azure the same address is a different service. Requests carry
`Metadata: true` and no X-Forwarded header, go through no proxy and follow no redirects.
"""

from __future__ import annotations

import json
import os
from typing import Any

import aiohttp

from imagefleet import errors, redaction

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
        body = await self._request("GET", "/v1/token", None, _OK)
        try:
            jwt = json.loads(body)["jwt"]
        except (ValueError, KeyError, TypeError):
            jwt = None
        if not isinstance(jwt, str) or not jwt:
            raise errors.TransientError("SaladCloud's metadata service answers without a token")
        return jwt

    async def set_deletion_cost(self, cost: int) -> None:
        """Replicas of the lowest cost are stopped first when the group is made smaller."""
        body = {"deletion_cost": max(0, min(cost, MAX_DELETION_COST))}
        await self._send("PUT", "/v1/deletion-cost", body)

    async def reallocate(self, reason: str) -> None:
        """Requests another node; this one is kept from the group for 48 hours.

        *reason* goes to SaladCloud's support, cut off after 1,000 characters.
        """
        await self._send("POST", "/v1/reallocate", {"reason": reason[:MAX_REASON_CHARACTERS]})

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        await self._request(method, path, body, _NO_CONTENT)

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
            raise errors.TransientError(
                f"SaladCloud's metadata service answers {path} with {status} {reason}"
                f"{_detail(content)}"
            )
        return content


def find_metadata() -> SaladMetadata | None:
    """The node's service on SaladCloud, else None; `SALAD_METADATA_URL` overrides both."""
    address = os.environ.get(_ADDRESS_VARIABLE)
    if address:
        return SaladMetadata(address)
    return SaladMetadata() if os.environ.get(_MACHINE_VARIABLE) else None


def _detail(content: bytes) -> str:
    """The text of one of the service's errors; empty for any other page."""
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {str(detail)[:200]}"
