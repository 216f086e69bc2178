"""The broker: a node sends its identity token and gets a worker's SAS tokens for an hour or two.

The account's key stays here. The tokens are tied to a stored policy, whose removal ends them all.
The broker then makes another policy, never one of the same name: with that, tokens which were
stolen before would work again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import jwt
from aiohttp import web

from fleet.keys import mint
from fleet.salad import groups
from fleet.settings import BrokerSettings
from imagefleet import errors
from imagefleet.storage.open import open_storage

log = logging.getLogger(__name__)

#: Seconds in which nodes may still get tokens that are revoked already; they ask again.
CHECK_SECONDS = 30.0

#: Nodes wait for the answer meanwhile.
LONGEST_CHECK_SECONDS = 10.0

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


class Identities:
    """Accepts the nodes of one organization; with *fleets*, only those of its groups."""

    def __init__(
        self, organization: str, fleets: Collection[str] = (), keys_url: str | None = None
    ) -> None:
        self._organization = organization
        self._fleets = frozenset(fleets)
        self._keys = jwt.PyJWKClient(keys_url or KEYS_URL, timeout=10)

    async def verify(self, identity_token: str) -> tuple[str, str | None]:
        """The machine that asks, and the group that runs there; raises RefusedError."""
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
        return str(claims["sub"]), group if isinstance(group, str) else None

    def _is_ours(self, group: object) -> bool:
        return isinstance(group, str) and (
            group in self._fleets or any(groups.parse_name(each, group) for each in self._fleets)
        )


class Policy:
    """The stored policy of the tokens: one of *prefix*-NUMBER that exists, or a new one."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._name = ""
        self.shards = 1
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def name(self) -> str:
        """The name of a policy that exists or did; raises FleetError if none can be made."""
        async with self._lock:
            if time.monotonic() - self._checked_at >= CHECK_SECONDS:
                try:
                    async with asyncio.timeout(LONGEST_CHECK_SECONDS):
                        self._name = await self._find() or await self._make()
                except (errors.TransientError, TimeoutError) as error:
                    reason = str(error) or "the storage does not answer"
                    if not self._name:
                        raise errors.TransientError(f"cannot read the policies: {reason}") from None
                    log.warning(
                        "cannot read the policies, and goes on with %s: %s",
                        self._name,
                        reason,
                        extra={"action": "policy_unchecked"},
                    )
                self._checked_at = time.monotonic()
            return self._name

    async def _find(self) -> str | None:
        async with open_storage(self._settings) as storage:
            shards = await storage.models.most_shards()
        stored = await mint.policies(
            self._settings, self._settings.role, self._settings.model_names
        )
        ours = sorted(each for each in stored if mint.is_of_broker(self._settings.policy, each))
        name = self._name if self._name in ours else next(iter(ours), None)
        if name is not None and shards != self.shards:
            await self._store(name, shards)  # those that were made since lack it
        self.shards = shards
        return name

    async def _make(self) -> str:
        name = f"{self._settings.policy}-{secrets.token_hex(4)}"
        await self._store(name, self.shards)
        log.info(
            "new tokens have the policy %s; imagefleet keys revoke %s ends them",
            name,
            self._settings.policy,
            extra={"action": "policy_made"},
        )
        return name

    async def _store(self, name: str, shards: int) -> None:
        own = self._settings
        await mint.store_policy(own, own.role, name, own.model_names, shards)


class Broker:
    """Issues worker tokens to the nodes that *identities* accepts."""

    def __init__(self, settings: BrokerSettings, identities: Identities) -> None:
        self._minter = mint.Minter(settings)
        self._identities = identities
        self._life = timedelta(hours=settings.token_hours)
        self._policy = Policy(settings)
        self._role, self._models = settings.role, settings.model_names

    async def start(self, _: web.Application) -> None:
        """Makes the policy, so that a mistake in the settings ends the start."""
        await self._policy.name()

    async def handle(self, request: web.Request) -> web.Response:
        """Answers with tokens, or 401 (invalid token), 403 (not one of ours) or 503 (try again)."""
        scheme, _, identity_token = request.headers.get("Authorization", "").partition(" ")
        try:
            machine, group = await self._identities.verify(
                identity_token if scheme == "Bearer" else ""
            )
            policy = await self._policy.name()
        except RefusedError as refusal:
            # A caller chooses parts of the reason: escaped, they cannot forge another line.
            log.warning("refused: %.300a", refusal.reason, extra={"action": "refused"})
            return web.json_response({"error": refusal.reason}, status=refusal.status)
        except errors.FleetError as error:
            log.warning("%s", error.message, extra={"action": "policy_failed"})
            return web.json_response({"error": "try again later"}, status=503)
        log.info(
            "issued tokens to machine %.60a of %.80a",
            machine,
            group,
            extra={"action": "tokens_given"},
        )
        minted = self._minter.mint(
            self._role, self._life, policy, self._models, self._policy.shards
        )
        return web.json_response(minted.record, headers={"Cache-Control": "no-store"})


def application(broker: Broker) -> web.Application:
    """The broker, for POST requests at any path; GET /live says that it runs."""
    app = web.Application()
    app.on_startup.append(broker.start)
    app.router.add_get("/live", _live)
    app.router.add_post("/{path:.*}", broker.handle)
    return app


async def _live(_: web.Request) -> web.Response:
    return web.Response(text="live\n")
