"""Calls of SaladCloud's API: under its rate limit, repeated while that may help, and in words."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import aiohttp

from fleet.salad import groups
from imagefleet import errors

log = logging.getLogger(__name__)

#: SaladCloud takes 240 a minute of one key; the rest is left to the portal and to other commands.
CALLS_A_MINUTE = 200

#: With the waits below, a call that finds no answer takes three minutes to say so.
TRIES = 8
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0

_SHOWN_CHARACTERS = 300

Sleep = Callable[[float], Awaitable[None]]


class CallLimit:
    """At most so many calls in any minute; who comes too early waits."""

    def __init__(
        self,
        calls: int = CALLS_A_MINUTE,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._begun: deque[float] = deque(maxlen=calls)
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        async with self._turn:
            if len(self._begun) == self._begun.maxlen:
                await self._sleep(max(0.0, self._begun[0] + 60 - self._clock()))
            self._begun.append(self._clock())


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API said; *is_repeat*: an earlier try may have done it, though it did not say so."""

    status: int
    body: Any
    is_repeat: bool


class Refused(errors.SetupError):
    """SaladCloud refuses a call: its sentence says why."""

    def __init__(self, answer: Answer, message: str) -> None:
        super().__init__(message)
        self.answer = answer


class _Again(Exception):  # noqa: N818 - no error: the call is repeated
    def __init__(self, words: str, after_seconds: float | None, *, may_be_done: bool) -> None:
        super().__init__(words)
        self.after_seconds = after_seconds
        self.may_be_done = may_be_done


class SaladClient:
    """The API at *url*, with a key of it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        key: str = "",
        *,
        limit: CallLimit | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._session = session
        self._key = key
        self._url = url.rstrip("/")
        self._limit = limit or CallLimit(sleep=sleep)
        self._sleep = sleep

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """The answer of a call that succeeded; SecretStr in *body* are sent, and never told.

        Raises:
            Refused: it never will (4xx).
            TransientError: it has not in many tries.
        """
        may_be_done = False
        words = ""
        for attempt in range(TRIES):
            await self._limit.wait()
            try:
                return await self._once(method, path, body, is_repeat=may_be_done)
            except _Again as again:
                words, may_be_done = str(again), may_be_done or again.may_be_done
                if attempt + 1 < TRIES:
                    seconds = _wait_seconds(attempt, again.after_seconds)
                    log.warning(
                        "trying again in %.0f s: %s",
                        seconds,
                        again,
                        extra={"action": "salad_retry"},
                    )
                    await self._sleep(seconds)
        raise errors.TransientError(f"{words}, {TRIES} times")

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, is_repeat: bool
    ) -> Answer:
        headers = {"Accept": "application/json", "Salad-Api-Key": self._key}
        secrets = [self._key]
        data = None
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
            data = json.dumps(groups.reveal(body, secrets))
        try:
            # A redirect would carry the key to wherever it points.
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                text = await response.text(errors="replace")
        except aiohttp.InvalidURL:
            raise errors.SetupError(f"{self._url} is no address of SaladCloud's API") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            # The call may have arrived, and only its answer been lost.
            reason = str(error) or type(error).__name__
            raise _Again(
                f"SaladCloud's API does not answer: {reason}", None, may_be_done=True
            ) from None
        if not response.ok:  # it may quote what it refuses
            for secret in filter(None, secrets):
                text = text.replace(secret, groups.MASKED)
        return _understood(response, text, is_repeat=is_repeat)


def _understood(response: aiohttp.ClientResponse, text: str, *, is_repeat: bool) -> Answer:
    status = response.status
    body, words = _body(text)
    answer = Answer(status, body, is_repeat)
    said = f"HTTP {status}" + (f", {words}" if words else "")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        after = _retry_after(response.headers.get("Retry-After"))
        raise _Again(f"SaladCloud wants fewer calls ({said})", after, may_be_done=False)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
        after = _retry_after(response.headers.get("Retry-After"))
        raise _Again(f"SaladCloud's API fails ({said})", after, may_be_done=True)
    if status == HTTPStatus.UNAUTHORIZED:
        raise Refused(answer, f"SaladCloud does not know the API key ({said})")
    if status >= HTTPStatus.BAD_REQUEST:
        raise Refused(answer, f"SaladCloud refuses {response.method} {response.url.path}: {said}")
    if status >= HTTPStatus.MULTIPLE_CHOICES or (text and body is None):
        raise _Again(f"SaladCloud's API sends no JSON ({said})", None, may_be_done=True)
    return answer


def _body(text: str) -> tuple[Any, str]:
    """The JSON and what it says of an error; of a page or a text, its words alone."""
    try:
        body = json.loads(text) if text else None
    except ValueError:
        return None, _page_words(text)
    if not isinstance(body, dict):
        return body, ""
    words = [str(body[name]) for name in ("title", "detail") if body.get(name)]
    # Which field is wrong stands beside the sentence, in what ASP.NET calls `errors`.
    if body.get("errors"):
        words.append(json.dumps(body["errors"]))
    return body, ": ".join(words)[:_SHOWN_CHARACTERS]


def _page_words(text: str) -> str:
    """`a page titled 'Bad Gateway'`: the errors of proxies come as HTML."""
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    plain = " ".join(re.sub(r"<[^>]*>", " ", title[1] if title else text).split())
    return f"a page that says {plain[:_SHOWN_CHARACTERS]!r}" if plain else "an empty page"


def _retry_after(value: str | None) -> float | None:
    """Seconds, of either form of the header."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _wait_seconds(attempt: int, asked_for: float | None) -> float:
    if asked_for is not None:
        return asked_for
    longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0**attempt)
    # Half fixed, half drawn: two commands that failed together do not come back together.
    return longest / 2 + random.uniform(0, longest / 2)  # noqa: S311 - no secret
