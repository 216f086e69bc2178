"""Identity tokens of SaladCloud's nodes: JSON Web Tokens that say whose container runs there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jwt

from fleet.salad import groups

#: SaladCloud's public keys; a new one is published every week.
KEYS_URL = "https://matrix-rest-api.salad.com/.well-known/workload-jwks.json"

#: SaladCloud's signature algorithm; the one that a token names is not trusted.
ALGORITHM = "ES256"

#: Tolerated clock skew; an identity token is valid for five minutes.
LEEWAY_SECONDS = 10

#: SaladCloud's tutorial on these tokens shows the first of the two in a real one.
_GROUP_NAME_CLAIMS = ("salad_workload_name", "salad_container_group_name")

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class RefusedError(Exception):
    """The request gets no tokens."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason[:300]  # a caller chooses parts of it
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True)
class Node:
    """The machine that asks, and the container group that runs there."""

    machine: str
    group: str | None


class Identities:
    """Accepts the nodes of one organization; with *fleets*, only those of its groups."""

    def __init__(
        self, organization: str, fleets: Collection[str] = (), keys_url: str | None = None
    ) -> None:
        self._organization = organization
        self._fleets = frozenset(fleets)
        self._keys = jwt.PyJWKClient(keys_url or KEYS_URL, timeout=10)

    async def verify(self, identity_token: str) -> Node:
        """Checks the signature, the times, the organization and the group.

        Raises:
            RefusedError: 401 (invalid), 403 (not one of ours) or 503 (try again).
        """
        try:
            key = await asyncio.to_thread(self._keys.get_signing_key_from_jwt, identity_token)
            claims: dict[str, Any] = jwt.decode(
                identity_token,
                key.key,
                algorithms=[ALGORITHM],
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "aud", "sub"], "verify_aud": False},
            )
        except jwt.PyJWKClientConnectionError as error:
            raise RefusedError(503, f"SaladCloud's keys cannot be fetched: {error}") from None
        except jwt.PyJWTError as error:
            raise RefusedError(401, f"invalid identity token: {error}") from None
        # The same keys sign for every organization: this is what keeps the others out.
        is_id = _ID.fullmatch(self._organization)
        if claims.get("aud" if is_id else "salad_organization_name") != self._organization:
            raise RefusedError(403, "the identity token is for another organization")
        group = next((claims[name] for name in _GROUP_NAME_CLAIMS if name in claims), None)
        if self._fleets and not self._is_ours(group):
            raise RefusedError(403, f"no tokens for the container group {group!r}")
        return Node(str(claims["sub"]), group if isinstance(group, str) else None)

    def _is_ours(self, group: object) -> bool:
        return isinstance(group, str) and (
            group in self._fleets or any(groups.parse_name(each, group) for each in self._fleets)
        )
