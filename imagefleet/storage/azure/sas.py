"""Sources of SAS tokens that change while a worker runs: a file that is rewritten, or a broker."""

import asyncio
import contextlib
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import parse_qs

from aiohttp import ClientConnectorCertificateError, ClientError, ClientTimeout
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    SecretStr,
    model_validator,
)

from imagefleet import concurrency, redaction, validation
from imagefleet.errors import FleetError, SetupError, TransientError
from imagefleet.files import safetensors
from imagefleet.storage.azure.roles import RESOURCES
from imagefleet.storage.proofs import Prover
from imagefleet.storage.settings import Resource, StorageSettings
from imagefleet.telemetry import proxies

#: A signed token as it stands in a query, without its question mark.
_TOKEN = re.compile(r"(?=.*(?:^|&)sig=[^&]+)[^\s?#]+")

#: How often the file is checked for changes: the cost is one `stat`.
FILE_CHECK_SECONDS = 1.0

#: A broker is asked for new tokens after this fraction of their life (random within the range):
#: late enough to ask seldom, early enough to survive an outage of the broker as long again.
_RENEWED_AFTER = (0.5, 0.75)

#: The assumed life of tokens that do not state their end, which a stored policy may have.
_UNKNOWN_LIFE_SECONDS = 3600.0

#: Pauses between requests to a broker that fails, or whose tokens Azure refuses; doubled each time.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

#: Refusals in a row that are final. A single one may be due to an identity token that has just
#: expired.
_MAX_REFUSALS = 3

_RETRYABLE = {408, 425, 429}

#: Fetches this node's identity token, a JSON Web Token.
IdentityToken = Callable[[], Awaitable[str]]


def _checked_token(token: SecretStr) -> SecretStr:
    text = token.get_secret_value().removeprefix("?")
    if not _TOKEN.fullmatch(text):
        raise ValueError("is not a SAS token")
    return SecretStr(text)


_SasToken = Annotated[SecretStr, AfterValidator(_checked_token)]


class QueueTokens(BaseModel, frozen=True, extra="ignore", hide_input_in_errors=True):
    """The tokens of one model's job queues, or of jobs without one."""

    queue: _SasToken | None = None
    queue_high: _SasToken | None = None
    queue_low: _SasToken | None = None

    def token(self, resource: str) -> str:
        token = getattr(self, resource, None)
        return token.get_secret_value() if token else ""


class Tokens(QueueTokens):
    """`{"queue": ..., "poison": ..., "blob": ..., "files": ..., "expires_at": ...}`.

    A role has tokens only for what it needs; one of the whole account is for what has none.
    `models` has the tokens of the queues of each model; `machine` the id of the machine that they
    were given to, and `machine_key` what it proves its work with.
    """

    poison: _SasToken | None = None
    blob: _SasToken | None = None
    packs: _SasToken | None = None
    files: _SasToken | None = None
    models: dict[str, QueueTokens] = {}
    expires_at: AwareDatetime | None = None
    machine: str = ""
    machine_key: SecretStr | None = None

    @model_validator(mode="after")
    def _check_that_there_is_one(self) -> Self:
        if not any(self.token(each) for each in RESOURCES):
            raise ValueError(f"a token of {', '.join(RESOURCES)} is missing")
        return self

    def of(self, resource: Resource, model: str | None = None) -> str:
        """The token for it, of a *model*'s queues if given; empty if there is none."""
        own = (self.token(each) for each in RESOURCES)
        accounts = (token for token in own if "ss" in parse_qs(token))
        given = self if model is None else self.models.get(model, QueueTokens())
        return given.token(resource) or next(accounts, "")

    @property
    def prover(self) -> Prover | None:
        key = self.machine_key
        return None if key is None else Prover(self.machine, key.get_secret_value())

    @property
    def ends_at(self) -> datetime | None:
        """The time at which the first of them expires, as far as that is known."""
        ends = [expiry(self.of(resource)) for resource in RESOURCES]
        return self.expires_at or min((end for end in ends if end), default=None)


class TokenFile:
    """A JSON file of tokens that is replaced now and then; while it is broken, the last hold."""

    def __init__(self, path: Path) -> None:
        self.name = f"the file {path}"
        self.due_at = self.retry_at = 0.0
        self._path = path
        self._version: safetensors.Identity | None = None  # of the last good one

    async def read(self) -> Tokens | None:
        """The tokens; None if they have not changed.

        Raises TransientError if the file is broken now, SetupError if it always was.
        """
        self.due_at = time.monotonic() + FILE_CHECK_SECONDS
        try:
            # A Kubernetes secret is a link that is moved, so its path stays the same.
            version = await asyncio.to_thread(safetensors.identify, self._path)
            if version == self._version:
                return None
            tokens = read_tokens(await asyncio.to_thread(self._path.read_bytes))
        except (OSError, ValueError) as error:
            kind = TransientError if self._version else SetupError
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise kind(f"{self.name} holds no SAS tokens: {reason}") from None
        self._version = version
        return tokens


class TokenBroker:
    """A service that issues tokens to nodes that authenticate with an identity token.

    The request is a `POST` with `Authorization: Bearer IDENTITY_TOKEN`, the answer the tokens as
    JSON. They are renewed well before they expire, with back-off while the broker is down.
    """

    def __init__(self, url: str, identity_token: IdentityToken) -> None:
        self.name = "the broker"
        self.due_at = self.retry_at = 0.0
        self._url = url
        self._identity_token = identity_token
        self._tls = ssl.create_default_context()
        self._failures = 0  # in a row; requests because of refused tokens count, too
        self._refusals = 0

    async def read(self) -> Tokens:
        """New tokens; raises SetupError if the broker refuses this worker for good."""
        was_due = time.monotonic() >= self.due_at
        life_seconds = 0.0
        self._failures += 1
        try:
            tokens, life_seconds = await self._request()
            self._refusals = 0
            if was_due:
                self._failures = 0
            return tokens
        finally:
            retries = max(0, self._failures - 1)
            pause = concurrency.backoff(
                retries, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
            )
            self.retry_at = time.monotonic() + pause
            renewal_at = time.monotonic() + concurrency.jitter(
                life_seconds, *_RENEWED_AFTER
            )
            self.due_at = max(self.retry_at, renewal_at)

    async def _request(self) -> tuple[Tokens, float]:
        """New tokens, and how long they are valid, in seconds."""
        try:
            identity_token = await self._identity_token()
        except (FleetError, ClientError, OSError) as error:
            raise TransientError(
                "cannot get this node's identity token for the broker:"
                f" {redaction.reason(error)}"
            ) from None
        headers = {
            "Authorization": f"Bearer {identity_token}",
            "Accept": "application/json",
        }
        try:
            async with (
                proxies.session(timeout=ClientTimeout(total=20)) as session,
                # No redirects: the identity token is for this address alone.
                session.post(
                    self._url, headers=headers, allow_redirects=False, ssl=self._tls
                ) as response,
            ):
                self._check_status(response.status)
                tokens = read_tokens(await response.read())
                # By the broker's clock: the node's own may be wrong.
                now = concurrency.http_date(
                    response.headers.get("Date")
                ) or datetime.now(UTC)
                ends_at = tokens.ends_at or now + timedelta(
                    seconds=_UNKNOWN_LIFE_SECONDS
                )
                return tokens, (ends_at - now).total_seconds()
        except (ClientError, OSError) as error:
            why = type(error).__name__
            if isinstance(error, ClientConnectorCertificateError):
                why = redaction.reason(
                    error
                )  # which does not end a worker whose tokens are valid
            raise TransientError(f"cannot reach the broker: {why}") from None
        except ValueError as error:
            raise TransientError(f"invalid answer of the broker: {error}") from None

    def _check_status(self, status: int) -> None:
        if status == 200:  # noqa: PLR2004 - OK
            return
        is_refusal = 300 <= status < 500 and status not in _RETRYABLE  # noqa: PLR2004
        self._refusals = self._refusals + 1 if is_refusal else 0
        if self._refusals >= _MAX_REFUSALS:
            raise SetupError(f"the broker refuses this worker: HTTP {status}")
        raise TransientError(f"the broker answered HTTP {status}")


#: `due_at`: when to read again; `retry_at`: not before, if Azure refuses the tokens (monotonic).
TokenSource = TokenFile | TokenBroker


def source_of(
    settings: StorageSettings, identity_token: IdentityToken | None
) -> TokenSource | None:
    """The source of changing tokens that the settings name, if any; a SetupError for two."""
    given = (settings.sas_file, settings.broker_url, settings.sas)
    if sum(each is not None for each in given) > 1:
        raise SetupError(
            "there are several sources of SAS tokens: keep one of IMAGEFLEET_SAS_FILE,"
            " IMAGEFLEET_BROKER_URL and IMAGEFLEET_SAS"
        )
    if settings.sas_file is not None:
        return TokenFile(settings.sas_file)
    if settings.broker_url is None:
        return None
    if identity_token is None:
        raise SetupError(
            "IMAGEFLEET_BROKER_URL works only for workers on SaladCloud, which have an identity"
            " token; elsewhere set IMAGEFLEET_SAS_FILE or IMAGEFLEET_SAS"
        )
    return TokenBroker(settings.broker_url, identity_token)


def fixed_tokens(settings: StorageSettings, in_address: str | None) -> Tokens | None:
    """The tokens of IMAGEFLEET_SAS, or the one in the storage's address, which is for all."""
    text = settings.sas.get_secret_value().strip() if settings.sas else in_address
    if text is None:
        return None
    try:
        if text.startswith("{"):
            return read_tokens(text)
        token = _checked_token(SecretStr(text))
    except ValueError as error:
        reason = (
            str(error) if text.startswith("{") else "it is neither JSON nor a token"
        )
        raise SetupError(
            f"IMAGEFLEET_SAS holds no SAS tokens: {reason}; `imagefleet keys` prints them"
        ) from None
    return Tokens.model_validate(dict.fromkeys(RESOURCES, token))


def read_tokens(text: str | bytes) -> Tokens:
    """Parses a JSON record of tokens; the ValueError for others does not quote them."""
    with validation.as_error(ValueError):
        return Tokens.model_validate_json(text)


def expiry(token: str) -> datetime | None:
    """The end that a SAS token states, unless a stored policy determines it."""
    (text,) = parse_qs(token).get("se", [""])
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return None
