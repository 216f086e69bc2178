"""The receiver of webhooks: one attempt to deliver an event, and what its answer means."""

import base64
import binascii
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout

from fleet.webhooks.events import Event
from imagefleet import concurrency, redaction
from imagefleet.errors import SetupError
from imagefleet.storage.protocol import Clock

#: The specification recommends 15 to 30 seconds.
TIMEOUT_SECONDS = 20.0

#: A receiver that names no time gets this pause where it says that it has too much to do.
PAUSE_SECONDS = 30.0

_LONGEST_PAUSE_SECONDS = 24 * 3600.0

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

#: Too Many Requests, and what a gateway answers in place of the receiver.
_OVERLOADED = frozenset({429, 502, 503, 504})

#: The prefix of a secret, so that it is recognised as one.
PREFIX = "whsec_"

#: The specification's limits.
MIN_SECRET_BYTES = 24
MAX_SECRET_BYTES = 64

_SETTING = "--secret-file"


def read_secrets(path: Path) -> list[bytes]:
    """The secrets in a file, one a line; raises SetupError if it holds something else."""
    try:
        lines = path.expanduser().read_text(errors="replace").split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no path"
        raise SetupError(f"{_SETTING}: the file cannot be read: {reason}") from None
    if not lines:
        raise SetupError(f"{_SETTING}: the file holds no secret")
    return [_secret(line) for line in lines]


def _secret(line: str) -> bytes:
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        secret = b""
    if (
        not line.startswith(PREFIX)
        or not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES
    ):
        raise SetupError(
            f"{_SETTING}: a secret should be {PREFIX} and {MIN_SECRET_BYTES} to"
            f" {MAX_SECRET_BYTES} bytes in base64: `echo {PREFIX}$(openssl rand -base64 32)` makes"
            " one"
        )
    return secret


def signed_headers(
    secrets: Iterable[bytes], event_id: str, body: bytes, unix_seconds: int
) -> dict[str, str]:
    """The headers of one attempt: the id, its time and a signature by each secret."""
    signed = b"%s.%d.%s" % (event_id.encode(), unix_seconds, body)
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(unix_seconds),
        "webhook-signature": " ".join(
            f"v1,{base64.b64encode(hmac.digest(secret, signed, 'sha256')).decode()}"
            for secret in secrets
        ),
    }


class Answer(NamedTuple):
    """The outcome of an attempt; *failure* is None if the event was delivered."""

    failure: str | None = None
    #: The receiver wants no more webhooks.
    is_gone: bool = False
    #: Seconds in which nothing else should be sent.
    pause_seconds: float = 0.0


def check_url(url: str) -> None:
    """Raises SetupError for an address to which webhooks may not be sent."""
    try:
        redaction.check_address(url)
    except ValueError as error:
        raise SetupError(f"--url: {error}") from None
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in _LOCAL_HOSTS:
        raise SetupError(
            "--url: should begin with https://, except on this machine (http://localhost): the"
            " signature does not encrypt what is sent"
        )


@dataclass(frozen=True)
class Endpoint:
    """The *clock* tells the time of each attempt, which receivers compare with theirs."""

    session: ClientSession
    url: str
    secrets: Sequence[bytes]
    clock: Clock

    async def send(self, event: Event) -> Answer:
        body = event.body()
        headers = signed_headers(
            self.secrets, event.id, body, int(self.clock.now().timestamp())
        )
        headers["Content-Type"] = "application/json"
        try:
            async with self.session.post(
                self.url,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=ClientTimeout(total=TIMEOUT_SECONDS),
            ) as response:
                return _meaning(response.status, response.headers.get("Retry-After"))
        except TimeoutError:
            return Answer(f"no answer within {TIMEOUT_SECONDS:g} s")
        except (ClientError, OSError, ValueError) as error:
            return Answer(redaction.reason(error))


def _meaning(status: int, retry_after: str | None) -> Answer:
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return Answer()
    failure = f"HTTP {status}"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        failure += ", a redirect, which is not followed: give the new address"
    pause_seconds = concurrency.after_seconds(retry_after, _LONGEST_PAUSE_SECONDS)
    if status in _OVERLOADED and pause_seconds is None:
        pause_seconds = PAUSE_SECONDS
    return Answer(failure, status == HTTPStatus.GONE, pause_seconds or 0.0)
