"""A broker of SAS tokens for workers on SaladCloud: short ones, for nodes that prove what they are.

A node sends the proof that SaladCloud gave it (a JSON Web Token) and gets a worker's tokens for
an hour or two; a node that leaves the fleet gets no more. The account's key stays here. Run it
behind something that ends TLS, since workers ask over https alone:

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
from fleet.keys.roles import ROLES
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import logs

log = logging.getLogger(__name__)

#: Where SaladCloud publishes its public keys; a new one each week.
KEYS_URL = "https://matrix-rest-api.salad.com/.well-known/workload-jwks.json"

#: The one that SaladCloud signs with. The token itself does not get to choose.
ALGORITHM = "ES256"

#: For clocks that differ; a proof holds for five minutes.
LEEWAY_SECONDS = 10

GROUP_CLAIMS = ("salad_container_group_id", "salad_workload_id")


class RefusedError(Exception):
    """A request without tokens for an answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Broker:
    """Gives a worker's tokens to the nodes of some container groups of one organization."""

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
        """Answers a POST with tokens, or 401 (no proof), 403 (another's) or 503 (ask again)."""
        scheme, _, proof = request.headers.get("Authorization", "").partition(" ")
        try:
            claims = await self._claims(proof if scheme == "Bearer" else "")
        except RefusedError as refusal:
            log.warning("refused: %s", refusal.reason, extra={"action": "refused"})
            return web.json_response({"error": refusal.reason}, status=refusal.status)
        log.info("tokens for the machine %s", claims["sub"], extra={"action": "tokens_given"})
        minted = self._minter.mint(ROLES["worker"], self._life)
        return web.json_response(keys.record(minted), headers={"Cache-Control": "no-store"})

    async def _claims(self, proof: str) -> dict[str, Any]:
        """What a proof says, once its signature, times, organization and group are right."""
        try:
            key = await asyncio.to_thread(self._keys.get_signing_key_from_jwt, proof)
            claims: dict[str, Any] = jwt.decode(
                proof,
                key.key,
                algorithms=[ALGORITHM],
                audience=self._organization,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "aud", "sub"]},
            )
        except jwt.PyJWKClientConnectionError as error:
            raise RefusedError(503, f"SaladCloud's keys are not to be had: {error}") from None
        except jwt.InvalidAudienceError:
            raise RefusedError(403, "the proof is another organization's") from None
        except jwt.PyJWTError as error:
            raise RefusedError(401, f"the proof is not accepted: {error}") from None
        group = next((claims[name] for name in GROUP_CLAIMS if name in claims), None)
        if group not in self._groups:
            raise RefusedError(403, f"the container group {group} gets no tokens here")
        return claims


def application(broker: Broker) -> web.Application:
    """The broker at every path's POST."""
    app = web.Application()
    app.router.add_post("/{path:.*}", broker.handle)
    return app


def main(
    organization: Annotated[str, typer.Option(help="Your organization's id at SaladCloud.")],
    group: Annotated[list[str], typer.Option(help="A container group's id; may be repeated.")],
    hours: Annotated[float, typer.Option(min=0.1, max=24, help="How long tokens hold.")] = 2,
    host: str = "127.0.0.1",
    port: int = 8081,
) -> None:
    """Gives workers on SaladCloud their SAS tokens."""
    logs.configure("auto")
    broker = Broker(mint.Minter(StorageSettings()), organization, group, timedelta(hours=hours))
    web.run_app(application(broker), host=host, port=port, access_log=None)


if __name__ == "__main__":
    typer.run(main)
