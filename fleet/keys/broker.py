"""`imagefleet broker`: a node sends its identity token and gets a worker's SAS tokens for a while.

The account's key stays here. The tokens are tied to a stored policy, whose removal ends them all.
The broker then makes another policy, never one of the same name: with that, tokens which were
stolen before would work again.
"""

import asyncio
import re
import secrets
import time
from datetime import timedelta

from aiohttp import web
from aiohttp.web import Application, Request, Response

from cli import console, options
from fleet.keys import mint
from fleet.salad import groups
from fleet.settings import BrokerSettings
from imagefleet.errors import FleetError, SetupError, TransientError
from imagefleet.storage import proofs
from imagefleet.telemetry import logs, probes
from imagefleet.telemetry.logs import log

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

    def __init__(self, settings: BrokerSettings, keys_url: str | None = None) -> None:
        try:
            import jwt
        except ModuleNotFoundError as error:
            raise SetupError(
                f"{error.name} is not installed; for the broker: pip install '.[broker]'"
            ) from None
        self._jwt = jwt
        self._organization = settings.organization
        self._fleets = settings.salad_fleets.split(",") if settings.salad_fleets else []
        self._keys = jwt.PyJWKClient(keys_url or KEYS_URL, timeout=10)

    async def verify(self, identity_token: str) -> tuple[str, str]:
        """The machine that asks, and the group that runs there; raises RefusedError."""
        try:
            key = await asyncio.to_thread(
                self._keys.get_signing_key_from_jwt, identity_token
            )
            claims = self._jwt.decode(
                identity_token,
                key.key,
                algorithms=[ALGORITHM],
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "aud", "sub"], "verify_aud": False},
            )
        except self._jwt.PyJWKClientConnectionError as error:
            raise RefusedError(
                503, f"SaladCloud's keys cannot be fetched: {error}"
            ) from None
        except self._jwt.PyJWTError as error:
            raise RefusedError(401, f"invalid identity token: {error}") from None
        # The same keys sign for every organization: this is what keeps the others out.
        is_id = _ID.fullmatch(self._organization)
        if (
            claims.get("aud" if is_id else "salad_organization_name")
            != self._organization
        ):
            raise RefusedError(403, "the identity token is for another organization")
        group = next(
            (str(claims[name]) for name in _GROUP_NAME_CLAIMS if name in claims), ""
        )
        is_ours = (
            fleet == group or groups.parse_name(fleet, group) for fleet in self._fleets
        )
        if self._fleets and not any(is_ours):
            raise RefusedError(403, f"no tokens for the container group {group!r}")
        return str(claims.get("salad_machine_id", claims["sub"])), group


class Broker:
    """Issues worker tokens to the nodes that *identities* accepts.

    They have a stored policy, POLICY-NUMBER: one that exists, or a new one.
    """

    def __init__(self, settings: BrokerSettings, identities: Identities) -> None:
        self._settings = settings
        self._identities = identities
        self._minter = mint.Minter(settings)
        self._policy = ""
        self._secret: str | None = None
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def handle(self, request: Request) -> Response:
        """Answers with tokens, or 401 (invalid token), 403 (not one of ours) or 503 (try again)."""
        scheme, _, identity_token = request.headers.get("Authorization", "").partition(
            " "
        )
        try:
            machine, group = await self._identities.verify(
                identity_token if scheme == "Bearer" else ""
            )
            await self.check_policy()
        except RefusedError as refusal:
            # A caller chooses parts of the reason: escaped, they cannot forge another line.
            log.warning(f"refused: {refusal.reason!a}", action="refused")
            return web.json_response({"error": refusal.reason}, status=refusal.status)
        except FleetError as error:
            log.warning(error.message, action="policy_failed")
            return web.json_response({"error": "try again later"}, status=503)
        log.info(
            f"issued tokens to machine {machine[:60]!a} of {group[:80]!a}",
            action="tokens_given",
        )
        own = self._settings
        answer = self._minter.mint(
            own.role, timedelta(hours=own.token_hours), self._policy, own.model_names
        ).record
        if (own_id := proofs.machine_of(machine)) == machine.lower():
            answer |= {
                "machine": own_id,
                "machine_key": proofs.machine_key(str(self._secret), own_id),
            }
        return web.json_response(answer, headers={"Cache-Control": "no-store"})

    async def check_policy(self) -> None:
        """Finds or makes the policy and the secret; raises FleetError if there never was one."""
        async with self._lock:
            if time.monotonic() - self._checked_at < CHECK_SECONDS:
                return
            try:
                async with asyncio.timeout(LONGEST_CHECK_SECONDS):
                    self._secret = await mint.proof_secret(self._settings, self._secret)
                    self._policy = (
                        await self._find_policy() or await self._make_policy()
                    )
            except (TransientError, TimeoutError) as error:
                text = f"cannot read the policies: {str(error) or 'the storage does not answer'}"
                if not self._policy:
                    raise TransientError(text) from None
                text += f"; goes on with {self._policy}"
                log.warning(text, action="policy_unchecked")
            self._checked_at = time.monotonic()

    async def _find_policy(self) -> str | None:
        own = self._settings
        stored = await mint.policies(own, own.role, own.model_names)
        ours = sorted(name for name in stored if mint.is_of_broker(own.policy, name))
        return self._policy if self._policy in ours else next(iter(ours), None)

    async def _make_policy(self) -> str:
        own = self._settings
        name = f"{own.policy}-{secrets.token_hex(4)}"
        await mint.store_policy(own, own.role, name, own.model_names)
        log.info(
            f"new tokens have the policy {name}; imagefleet keys revoke {own.policy} ends them",
            action="policy_made",
        )
        return name


def application(broker: Broker) -> Application:
    """The broker, for POST requests at any path; GET /live says that it runs."""

    async def live(_: Request) -> Response:
        return Response(text="live\n")

    app = Application()
    # So that a mistake in the settings ends the start.
    app.on_startup.append(lambda _: broker.check_policy())
    app.router.add_get("/live", live)
    app.router.add_post("/{path:.*}", broker.handle)
    return app


@options.flat
async def command(settings: BrokerSettings) -> None:
    """Issues short-lived SAS tokens to workers on SaladCloud.

    Its address is the workers' IMAGEFLEET_BROKER_URL. A node authenticates with SaladCloud's
    identity token, and the account's key stays here. Run it behind a proxy that terminates TLS:
    workers use https only.

    imagefleet broker --organization acme
    """
    logs.configure(settings.log_format)
    if not settings.organization:
        raise SetupError(
            "--organization is required: any other's nodes would get tokens"
        )
    app = application(Broker(settings, Identities(settings)))
    async with probes.listening(app, settings.host, settings.port, "requests") as port:
        log.info(
            f"issuing tokens on port {port} to nodes of"
            f" {settings.salad_fleets or settings.organization}",
            action="broker_started",
        )
        await console.until_stopped(asyncio.Event().wait())
