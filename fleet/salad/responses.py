"""HTTP responses of SaladCloud's API: an answer, a refusal, or a reason to try again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import aiohttp

from imagefleet import errors

_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; *is_repeat*: an earlier try, whose response was lost, may have succeeded."""

    status: int
    body: Any
    is_repeat: bool


class RefusedError(errors.SetupError):
    """SaladCloud refuses a call (4xx)."""

    def __init__(self, answer: Answer, message: str) -> None:
        super().__init__(message)
        self.answer = answer


class RetryLater(Exception):  # noqa: N818 - not an error: the call is repeated
    """A failure that may pass; *may_be_done*: the call may have taken effect all the same."""

    def __init__(
        self, message: str, after_seconds: float | None = None, *, may_be_done: bool = True
    ) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds
        self.may_be_done = may_be_done


def read(response: aiohttp.ClientResponse, text: str, *, is_repeat: bool) -> Answer:
    """The answer in a response whose body is *text*.

    Raises:
        RefusedError: it is a 4xx.
        RetryLater: it is a failure of the server, or not JSON.
    """
    status = response.status
    body, message = _body(text)
    answer = Answer(status, body, is_repeat)
    details = f"HTTP {status}" + (f", {message}" if message else "")
    after_seconds = _retry_after(response.headers.get("Retry-After"))
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        raise RetryLater(
            f"SaladCloud's rate limit is reached ({details})", after_seconds, may_be_done=False
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
        raise RetryLater(f"SaladCloud's API fails ({details})", after_seconds)
    if status == HTTPStatus.UNAUTHORIZED:
        raise RefusedError(answer, f"SaladCloud does not know the API key ({details})")
    if status >= HTTPStatus.BAD_REQUEST:
        path = response.url.path
        raise RefusedError(answer, f"SaladCloud refuses {response.method} {path}: {details}")
    if status >= HTTPStatus.MULTIPLE_CHOICES or (text and body is None):
        raise RetryLater(f"SaladCloud's API does not return JSON ({details})")
    return answer


def _body(text: str) -> tuple[Any, str]:
    """The JSON and its error message; for anything else, None and its text."""
    try:
        body = json.loads(text) if text else None
    except ValueError:
        return None, _page_text(text)
    if not isinstance(body, dict):
        return body, ""
    parts = [str(body[name]) for name in ("title", "detail") if body.get(name)]
    # ASP.NET names the wrong fields in `errors`.
    if body.get("errors"):
        parts.append(json.dumps(body["errors"]))
    return body, ": ".join(parts)[:_SHOWN_CHARACTERS]


def _page_text(text: str) -> str:
    """`a page titled 'Bad Gateway'`: proxies return their errors as HTML."""
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
    plain = " ".join(re.sub(r"<[^>]*>", " ", title[1] if title else text).split())
    return f"a page titled {plain[:_SHOWN_CHARACTERS]!r}" if plain else "an empty page"


def _retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header, which has a number or a date."""
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
