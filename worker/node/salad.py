"""SaladCloud: its metadata service, and waiting there for what no other node would have either.

The service is as published (salad-cloud-docs, api-specs/salad-cloud-imds.yaml, 0.9.0-alpha.3). It
answers only inside a container on SaladCloud; on Azure the same address is a different service.
Requests carry `Metadata: true` and no X-Forwarded header, go through no proxy and follow no
redirects.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar
from prometheus_client import Counter

from imagefleet import concurrency, redaction
from imagefleet.concurrency import Operation
from imagefleet.errors import SetupError, TransientError
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict
from worker import tasks

ADDRESS = "http://169.254.169.254"

#: The service is on the node itself, so it answers within seconds or not at all.
TIMEOUT_SECONDS = 3.0

#: The service rejects longer texts.
MAX_REASON_CHARACTERS = 1000

#: A token has 1,000 characters at most; the page of another service may have any number.
_MAX_ANSWER_BYTES = 65_536

#: SaladCloud may take minutes to stop a container; one that is still running then exits.
REALLOCATION_SECONDS = 600.0

#: The first pause ends before anybody has read the log; the longest is short compared to renewing
#: credentials, and a thousand workers' attempts in it do not harm the storage.
FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0

#: An operator who reads the alert has an hour; a fleet that waits longer costs more than a restart.
GIVE_UP_SECONDS = 3600.0

Result = TypeVar("Result")


class SaladMetadata:
    """The metadata service of the node that this process runs on.

    Every method but `leave` raises TransientError if the service does not answer as specified.
    Calls are rare, so each opens its own connection.
    """

    def __init__(
        self, address: str = ADDRESS, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._address = address.rstrip("/")
        self._timeout = ClientTimeout(total=timeout_seconds)

    async def token(self) -> str:
        """A JWT that identifies this container, valid for 2 to 5 minutes."""
        jwt = _field(await self._request("GET", "/v1/token"), "jwt")
        if not isinstance(jwt, str) or not jwt:
            raise TransientError(
                "SaladCloud's metadata service answers without a token"
            )
        return jwt

    async def reallocate(self, reason: str) -> None:
        """Requests another node; the *reason*, cut off, goes to SaladCloud's support."""
        body = {"reason": reason[:MAX_REASON_CHARACTERS]}
        await self._request("POST", "/v1/reallocate", body)

    async def leave(self, reason: str, requests: Counter) -> bool:
        """Asks for another node; returns whether it is granted.

        SaladCloud moves a container that ends with a code other than 0 as well, but without a
        reason. Either way the node is kept from the group for 48 hours. So a worker asks, then
        waits to be stopped: if it exited too, that could count against a node a second time. A
        request whose reply is lost counts as refused. *requests* counts them by result.
        """
        try:
            await self.reallocate(reason)
        except TransientError as error:
            requests.labels("refused").inc()
            log.warning(
                f"requesting another node failed: {error}",
                action="reallocation_failed",
                reason=reason,
            )
            return False
        requests.labels("granted").inc()
        log.warning(
            f"requested another node, waiting to be stopped: {reason}",
            action="reallocation",
            reason=reason,
        )
        return True

    async def _request(
        self, method: str, path: str, body: JSONDict | None = None
    ) -> bytes:
        try:
            # By default a session ignores proxies in the environment.
            async with (
                ClientSession(
                    timeout=self._timeout, cookie_jar=DummyCookieJar()
                ) as client,
                client.request(
                    method,
                    self._address + path,
                    json=body,
                    headers={"Metadata": "true"},
                    allow_redirects=False,
                ) as answer,
            ):
                status = answer.status
                reason = answer.reason
                content = await answer.content.read(_MAX_ANSWER_BYTES)
        except (ClientError, TimeoutError, OSError) as error:
            raise TransientError(
                f"SaladCloud's metadata service does not answer: {type(error).__name__}"
                f" {redaction.reason(error)}"
            ) from None
        if status != (200 if body is None else 204):
            detail = _field(content, "detail")  # of its errors; any other page has none
            raise TransientError(
                f"SaladCloud's metadata service answers {path} with {status} {reason}"
                + (f": {str(detail)[:200]}" if detail else "")
            )
        return content


def find_metadata() -> SaladMetadata | None:
    """The node's service, where there is one; tests set another by `SALAD_METADATA_URL`."""
    if address := os.environ.get("SALAD_METADATA_URL"):
        return SaladMetadata(address)
    # Set in every container on SaladCloud, and only there.
    return SaladMetadata() if os.environ.get("SALAD_MACHINE_ID") else None


def _field(answer: bytes, name: str) -> Any:
    try:
        return json.loads(answer)[name]
    except (ValueError, KeyError, TypeError):
        return None


async def retry_until_fixed(
    attempt: Operation[Result],
    *,
    stop: asyncio.Event,
    set_waiting: Callable[[bool], None],
    has_worked: Callable[[], bool],
) -> Result | None:
    """Repeats *attempt* until it succeeds; None if *stop* or `GIVE_UP_SECONDS` ended the waiting.

    An exit code is an instruction to SaladCloud: after any but 0 the node is blocked for the group
    and its container moved, after 0 it may be restarted where it is. So workers that ended because
    a SAS token expired or the storage is down would use up one node after the other, or restart in
    a loop, all of them billed. They wait instead; meanwhile the probes' `/started` and `/live` are
    true, `/ready` is not. In the end the code is 0: the node is not at fault.

    If the last attempt got as far as working (*has_worked*), pauses and time start anew. A
    NodeError is raised at once.
    """
    pauses = 0
    waiting_since = time.monotonic()
    while True:
        try:
            return await attempt()
        except (SetupError, TransientError) as error:
            if has_worked():
                pauses = 0
                waiting_since = time.monotonic()
            waited_seconds = time.monotonic() - waiting_since
            longest = min(FIRST_PAUSE_SECONDS * 2**pauses, LONGEST_PAUSE_SECONDS)
            if waited_seconds + longest > GIVE_UP_SECONDS:
                log.error(
                    f"giving up after {waited_seconds:.0f} s: {error}",
                    action="setup_given_up",
                )
                return None
            seconds = concurrency.backoff(
                pauses, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
            )
            log.error(
                f"no node could work like this, retrying in {seconds:.0f} s: {error}",
                action="setup_awaited",
                error=type(error).__name__,
            )
        set_waiting(True)
        await tasks.first_of(stop.wait(), timeout_seconds=seconds)
        set_waiting(False)
        if stop.is_set():
            return None
        pauses += 1
