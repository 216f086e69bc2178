"""Where SAS tokens come from while a worker runs: a file that is rewritten, or a broker."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs

import aiohttp
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    SecretStr,
    ValidationError,
    field_validator,
)

from imagefleet import errors
from imagefleet.storage.settings import Resource, StorageSettings

#: A signed token as it stands in a query, without its question mark.
_TOKEN = re.compile(r"(?=.*(?:^|&)sig=[^&]+)[^\s?#]+")

#: How often the file is looked at: the cost is one `stat`.
LOOK_SECONDS = 1.0

#: Tokens are renewed after this part of their life, drawn anew each time: late enough to ask
#: seldom, early enough to survive a broker that is down for as long again.
_RENEWED_AFTER = (0.5, 0.75)

#: Of tokens that do not tell when they end (those of a stored policy).
_UNKNOWN_LIFE_SECONDS = 3600.0

#: Between two questions to a broker that fails, or whose tokens Azure refuses; doubled each time.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

#: A broker that refuses a worker so often in a row means it. Once may be a proof that was a
#: second too old.
_REFUSALS = 3

_ANSWER_SECONDS = 20

_TRY_AGAIN = frozenset({408, 425, 429})

IdentityToken = Callable[[], Awaitable[str]]
"""Gives the proof of a node's identity, a JSON Web Token."""


class Tokens(BaseModel):
    """The tokens of one moment: `{"queue": ..., "poison": ..., "blob": ..., "expires_at": ...}`.

    Without tokens of their own, the poison queue and the container are asked with the queue's.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    queue: SecretStr
    poison: SecretStr | None = None
    blob: SecretStr | None = None
    expires_at: AwareDatetime | None = None

    @field_validator("queue", "poison", "blob")
    @classmethod
    def _is_a_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is None:
            return None
        text = token.get_secret_value().removeprefix("?")
        if not _TOKEN.fullmatch(text):
            raise ValueError("is no SAS token")
        return SecretStr(text)

    def of(self, resource: Resource) -> str:
        token = {"queue": self.queue, "poison": self.poison, "blob": self.blob}[resource]
        return (token or self.queue).get_secret_value()

    @property
    def ends_at(self) -> datetime | None:
        """When the first of them ends, as far as they tell."""
        tokens = filter(None, (self.queue, self.poison, self.blob))
        ends = [expiry(token.get_secret_value()) for token in tokens]
        return self.expires_at or min((end for end in ends if end), default=None)


class TokenSource(Protocol):
    """Gives tokens. Asked by one task at a time."""

    @property
    def name(self) -> str:
        """What it is called in a message."""

    def is_due(self) -> bool:
        """Whether it is time to read again."""

    def may_be_asked_early(self) -> bool:
        """Whether it may be read now, its tokens having been refused."""

    async def read(self) -> Tokens | None:
        """The newest tokens; None where they are the last ones still.

        Raises:
            TransientError: it cannot tell now; SetupError: it never will.
        """


_Seen = tuple[int, int, int]


class TokenFile:
    """A JSON file of tokens that somebody rewrites; a Kubernetes secret is one.

    A file that is broken or gone changes nothing: the last good tokens stay in force.
    """

    def __init__(self, path: Path) -> None:
        self.name = f"the file {path}"
        self._path = path
        self._looked_at = 0.0
        self._seen: _Seen | None = None  # of the last good one

    def is_due(self) -> bool:
        return time.monotonic() - self._looked_at >= LOOK_SECONDS

    def may_be_asked_early(self) -> bool:
        return True

    async def read(self) -> Tokens | None:
        self._looked_at = time.monotonic()
        try:
            found = await asyncio.to_thread(self._read_if_changed)
            if found is None:
                return None
            seen, text = found
            tokens = read_tokens(text)
        except (OSError, ValueError) as error:
            kind = errors.TransientError if self._seen else errors.SetupError
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise kind(f"{self.name} holds no SAS tokens: {reason}") from None
        self._seen = seen
        return tokens

    def _read_if_changed(self) -> tuple[_Seen, str] | None:
        # By what it is, not by its path: a Kubernetes secret is a link that is moved.
        status = self._path.stat()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        return None if seen == self._seen else (seen, self._path.read_text(encoding="utf-8"))


class TokenBroker:
    """A service that gives tokens to who proves what it is.

    It is sent `POST` with `Authorization: Bearer PROOF` and answers with the tokens as JSON.
    Renewed well before they end; a broker that is down is asked again, ever less often.
    """

    def __init__(self, url: str, identity_token: IdentityToken) -> None:
        self.name = "the broker"
        self._url = url
        self._identity_token = identity_token
        self._tls = ssl.create_default_context()
        self._due_at = 0.0
        self._in_vain = 0  # asked in a row without an answer, or because of refused tokens
        self._not_before = 0.0
        self._refusals = 0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    def may_be_asked_early(self) -> bool:
        return time.monotonic() >= self._not_before

    async def read(self) -> Tokens | None:
        was_due = self.is_due()
        try:
            tokens, life_seconds = await self._ask()
        except errors.FleetError:
            self._in_vain += 1
            self._due_at = self._pause()
            raise
        self._refusals = 0
        self._in_vain = 0 if was_due else self._in_vain + 1
        not_before = self._pause()
        renewed_after = life_seconds * random.uniform(*_RENEWED_AFTER)  # noqa: S311 - jitter
        self._due_at = max(time.monotonic() + renewed_after, not_before)
        return tokens

    def _pause(self) -> float:
        """When it may be asked again, even if its tokens are refused."""
        seconds = FIRST_PAUSE_SECONDS * 2 ** max(0, min(self._in_vain, 10) - 1)
        seconds = min(seconds, LONGEST_PAUSE_SECONDS)
        self._not_before = time.monotonic() + seconds * random.uniform(0.5, 1)  # noqa: S311 - jitter
        return self._not_before

    async def _ask(self) -> tuple[Tokens, float]:
        """New tokens, and how long they are good for, in seconds."""
        try:
            identity_token = await self._identity_token()
        except (errors.FleetError, aiohttp.ClientError, OSError) as error:
            raise errors.TransientError(
                f"there is no proof of this node's identity for the broker: {error}"
            ) from None
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS), trust_env=True
                ) as session,
                session.post(
                    self._url,
                    headers={
                        "Authorization": f"Bearer {identity_token}",
                        "Accept": "application/json",
                    },
                    allow_redirects=False,  # the proof is for this address alone
                    ssl=self._tls,
                ) as response,
            ):
                self._check_status(response.status)
                tokens = read_tokens(await response.read())
                return tokens, _life_seconds(tokens, response.headers.get("Date"))
        except (aiohttp.ClientError, OSError) as error:
            raise errors.TransientError(
                f"the broker is not reached: {type(error).__name__}"
            ) from None
        except ValueError as error:
            raise errors.TransientError(f"the broker's answer is none: {error}") from None

    def _check_status(self, status: int) -> None:
        if status == 200:  # noqa: PLR2004 - OK
            return
        is_refusal = 300 <= status < 500 and status not in _TRY_AGAIN  # noqa: PLR2004
        self._refusals = self._refusals + 1 if is_refusal else 0
        if self._refusals >= _REFUSALS:
            raise errors.SetupError(f"the broker refuses this worker: HTTP {status}")
        raise errors.TransientError(f"the broker answers HTTP {status}")


def source_of(
    settings: StorageSettings, identity_token: IdentityToken | None
) -> TokenSource | None:
    """The source that the settings name, if any.

    Raises:
        SetupError: they name two, or a broker to somebody who can prove nothing.
    """
    if settings.sas_file is None and settings.broker_url is None:
        return None
    given = settings.queue_sas or settings.poison_sas or settings.blob_sas
    if sum(each is not None for each in (settings.sas_file, settings.broker_url, given)) > 1:
        raise errors.SetupError(
            "there are several sources of SAS tokens: keep one of IMAGEFLEET_SAS_FILE,"
            " IMAGEFLEET_BROKER_URL and IMAGEFLEET_QUEUE_SAS"
        )
    if settings.sas_file is not None:
        return TokenFile(settings.sas_file)
    if identity_token is None:
        raise errors.SetupError(
            "IMAGEFLEET_BROKER_URL is for workers on SaladCloud, which can prove what they are;"
            " elsewhere set IMAGEFLEET_SAS_FILE or IMAGEFLEET_QUEUE_SAS"
        )
    assert settings.broker_url is not None  # noqa: S101 - the one that is left
    return TokenBroker(settings.broker_url, identity_token)


def read_tokens(text: str | bytes) -> Tokens:
    """The tokens in a JSON text.

    Raises:
        ValueError: it holds none. The message does not quote it.
    """
    try:
        return Tokens.model_validate_json(text)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, detail["loc"]))
        reason = "it is no JSON" if detail["type"] == "json_invalid" else detail["msg"]
        raise ValueError(f"{where}: {reason}" if where else reason) from None


def expiry(token: str) -> datetime | None:
    """When a SAS token ends; None where its stored policy knows."""
    (text,) = parse_qs(token).get("se", [""])
    with contextlib.suppress(ValueError):
        end = datetime.fromisoformat(text)
        return end if end.tzinfo else end.replace(tzinfo=UTC)
    return None


def _life_seconds(tokens: Tokens, date: str | None) -> float:
    """How long they are good for by the clock of who made them: a node's own may be wrong."""
    ends_at = tokens.ends_at
    if ends_at is None:
        return _UNKNOWN_LIFE_SECONDS
    now = datetime.now(UTC)
    with contextlib.suppress(ValueError):
        now = parsedate_to_datetime(date).astimezone(UTC) if date else now
    return (ends_at - now).total_seconds()
