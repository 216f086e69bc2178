"""A broker that issues short-lived SAS tokens to workers on SaladCloud.

A node sends its identity token (a JSON Web Token from SaladCloud) and gets a worker's SAS tokens
for an hour or two. The account's key stays with the broker. Run it behind a proxy that terminates
TLS, since workers use https only:

    pip install imagefleet 'PyJWT[crypto]'
    export IMAGEFLEET_STORAGE='DefaultEndpointsProtocol=https;AccountName=...;AccountKey=...'
    python broker.py --organization ORGANIZATION_ID --group CONTAINER_GROUP_ID
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Annotated, Any

import jwt
import typer
from aiohttp import web

from fleet.keys import command as keys
from fleet.keys import mint
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import logs

log = logging.getLogger(__name__)

#: SaladCloud's public keys; a new one is published every week.
KEYS_URL = "https://matrix-rest-api.salad.com/.well-known/workload-jwks.json"

#: SaladCloud's signature algorithm; the one that a token names is not trusted.
ALGORITHM = "ES256"

#: Tolerated clock skew; an identity token is valid for five minutes.
LEEWAY_SECONDS = 10

GROUP_CLAIMS = ("salad_container_group_id", "salad_workload_id")


class RefusedError(Exception):
    """The request gets no tokens."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason[:300]  # a caller chooses parts of it
        super().__init__(self.reason)


class Broker:
    """Issues worker tokens to the nodes of some container groups of one organization."""

    def __init__(
        self,
        minter: mint.Minter,
        organization: str,
        groups: Collection[str],
        life: timedelta,
        keys_url: str = KEYS_URL,
    ) -> None:
        self._minter = minter
        self._organization = organization
        self._groups = frozenset(groups)
        self._life = life
        self._keys = jwt.PyJWKClient(keys_url, timeout=10)

    async def handle(self, request: web.Request) -> web.Response:
        """Answers with tokens, or 401 (invalid token), 403 (wrong group) or 503 (try again)."""
        scheme, _, identity_token = request.headers.get("Authorization", "").partition(" ")
        try:
            claims = await self._claims(identity_token if scheme == "Bearer" else "")
        except RefusedError as refusal:
            # A caller chooses parts of the reason: escaped, they cannot forge another line.
            log.warning("refused: %.300a", refusal.reason, extra={"action": "refused"})
            return web.json_response({"error": refusal.reason}, status=refusal.status)
        log.info("issued tokens to machine %s", claims["sub"], extra={"action": "tokens_given"})
        minted = self._minter.mint(ROLES["worker"], self._life)
        return web.json_response(keys.record(minted), headers={"Cache-Control": "no-store"})

    async def _claims(self, identity_token: str) -> dict[str, Any]:
        """The claims of a token with valid signature, times, organization and group."""
        try:
            key = await asyncio.to_thread(self._keys.get_signing_key_from_jwt, identity_token)
            claims: dict[str, Any] = jwt.decode(
                identity_token,
                key.key,
                algorithms=[ALGORITHM],
                audience=self._organization,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "aud", "sub"]},
            )
        except jwt.PyJWKClientConnectionError as error:
            raise RefusedError(503, f"SaladCloud's keys cannot be fetched: {error}") from None
        except jwt.InvalidAudienceError:
            raise RefusedError(403, "the identity token is for another organization") from None
        except jwt.PyJWTError as error:
            raise RefusedError(401, f"invalid identity token: {error}") from None
        group = next((claims[name] for name in GROUP_CLAIMS if name in claims), None)
        if not isinstance(group, str) or group not in self._groups:
            raise RefusedError(403, f"no tokens for the container group {group}")
        return claims


def application(broker: Broker) -> web.Application:
    """The broker, for POST requests at any path."""
    app = web.Application()
    app.router.add_post("/{path:.*}", broker.handle)
    return app


def main(
    organization: Annotated[str, typer.Option(help="Your organization's id at SaladCloud.")],
    group: Annotated[list[str], typer.Option(help="A container group's id; may be repeated.")],
    hours: Annotated[float, typer.Option(min=0.1, max=24, help="Lifetime of the tokens.")] = 2,
    host: str = "127.0.0.1",
    port: int = 8081,
) -> None:
    """Issues SAS tokens to workers on SaladCloud."""
    logs.configure("auto")
    broker = Broker(mint.Minter(StorageSettings()), organization, group, timedelta(hours=hours))
    web.run_app(application(broker), host=host, port=port, access_log=None)


if __name__ == "__main__":
    typer.run(main)
