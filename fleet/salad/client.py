"""A client of SaladCloud's API: what a fleet needs of it, within its rate limit."""

import contextlib
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from aiohttp import ClientError, ClientResponse, ClientSession
from aiolimiter import AsyncLimiter
from pydantic import SecretStr

from fleet.salad import gpus
from fleet.salad import groups as salad_groups
from fleet.salad.groups import Group, Quota
from imagefleet import concurrency, redaction
from imagefleet.errors import SetupError, TransientError
from imagefleet.telemetry import proxies
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONObject

#: SaladCloud allows 240 calls/min per API key. Any minute has at most the burst and 60 seconds of
#: the rate, 200 calls; the rest is left to the portal and to other commands.
CALL_BURST = 20
CALLS_PER_SECOND = 3

#: The waits add up to a minute and a half on average.
RETRIES = concurrency.RetryPolicy(
    tries=9,
    first_wait_seconds=1,
    longest_wait_seconds=60,
    on_retry=lambda error: log.warning(f"retrying: {error}", action="salad_retry"),
)

#: A server, or a proxy, may ask for hours; meanwhile nobody would watch the budget.
LONGEST_RETRY_AFTER_SECONDS = 120.0

TIMEOUT_SECONDS = 60.0

_SHOWN_CHARACTERS = 300

_Record = TypeVar("_Record")


class RefusedError(SetupError):
    """SaladCloud refuses a call (4xx)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def call_limiter() -> AsyncLimiter:
    return AsyncLimiter(CALL_BURST, CALL_BURST / CALLS_PER_SECOND)


class SaladClient:
    """The container groups of one project, through the API at *url*.

    Every method raises SetupError if SaladCloud refuses a call, TransientError if it fails.
    """

    def __init__(
        self,
        session: ClientSession,
        url: str,
        key: str,
        organization: str = "",
        project: str = "",
    ) -> None:
        self._session = session
        self._key = key
        self._url = url.rstrip("/")
        self._organization = f"/organizations/{organization}"
        self._containers = f"{self._organization}/projects/{project}/containers"
        self._limiter = call_limiter()

    async def groups(self) -> list[Group]:
        """All groups of the project, those of other fleets included."""
        return await self._get(
            self._containers,
            lambda body: [Group.model_validate(each) for each in body["items"]],
        )

    async def create(self, body: JSONObject) -> None:
        """Creates a group; one that exists is fine: the answer to an earlier try may be lost."""
        try:
            await self.call("POST", self._containers, body)
        except RefusedError:
            if await self._group(body["name"]) is None:
                raise

    async def patch(self, name: str, body: JSONObject) -> None:
        """Changes a group; its replicas and its scheduled scaling restart no worker."""
        await self.call("PATCH", f"{self._containers}/{name}", body)

    async def turn(self, name: str, state: Literal["start", "stop"]) -> None:
        """Starts or stops a group; SaladCloud refuses to do it twice, which is fine."""
        try:
            await self.call("POST", f"{self._containers}/{name}/{state}")
        except RefusedError:
            group = await self._group(name)
            if group is None or group.is_stopped != (state == "stop"):
                raise

    async def _group(self, name: str) -> Group | None:
        return next(
            (group for group in await self.groups() if group.name == name), None
        )

    async def delete(self, name: str) -> None:
        """Deletes a group; one that no longer exists is fine."""
        try:
            await self.call("DELETE", f"{self._containers}/{name}")
        except RefusedError as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise

    async def quota(self) -> Quota:
        return await self._get(f"{self._organization}/quotas", Quota.model_validate)

    async def gpu_classes(self) -> list[gpus.GpuClass]:
        """The available GPU classes, at today's prices."""
        return await self._get(
            f"{self._organization}/gpu-classes", lambda body: gpus.of_api(body["items"])
        )

    async def call(self, method: str, path: str, body: JSONObject | None = None) -> Any:
        """The JSON that a successful call returns; secrets in *body* are sent, but never shown.

        Raises:
            RefusedError: a 4xx.
            TransientError: every try failed.
        """
        return await RETRIES.call(lambda: self._try(method, path, body))

    async def _try(self, method: str, path: str, body: JSONObject | None) -> Any:
        secrets = [self._key]

        def reveal(secret: SecretStr) -> str:
            secrets.append(secret.get_secret_value())
            return secrets[-1]

        headers = {"Accept": "application/json", "Salad-Api-Key": self._key}
        data = None
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
            data = json.dumps(body, default=reveal)
        await self._limiter.acquire()
        try:
            # A redirect would send the key to wherever it points.
            async with self._session.request(
                method,
                self._url + path,
                data=data,
                headers=headers,
                allow_redirects=False,
            ) as response:
                text = await response.text(errors="replace")
        except (ClientError, TimeoutError) as error:
            raise proxies.unreachable(
                "SaladCloud's API does not answer", error
            ) from None
        shown = text
        for secret in filter(None, secrets):  # it may quote what it refuses
            for quoted in (secret, json.dumps(secret)[1:-1]):
                shown = shown.replace(quoted, salad_groups.MASKED)
        return _read(response, text, shown)

    async def _get(self, path: str, read: Callable[[Any], _Record]) -> _Record:
        answer = await self.call("GET", path)
        try:
            return read(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise TransientError(
                f"invalid answer of SaladCloud to {path}: {redaction.reason(error)}"
            ) from None


def _read(response: ClientResponse, text: str, shown: str) -> Any:
    """The JSON in a response whose body is *text*, *shown* in errors, which are those of `call`."""
    status = response.status
    message = redaction.printable(redaction.message(_message(shown)))
    details = f"HTTP {status}" + (f", {message}" if message else "")
    failure = "SaladCloud's API does not return JSON"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        failure = "SaladCloud's rate limit is reached"
    elif (
        status >= HTTPStatus.INTERNAL_SERVER_ERROR
        or status == HTTPStatus.REQUEST_TIMEOUT
    ):
        failure = "SaladCloud's API fails"
    elif status >= HTTPStatus.BAD_REQUEST:
        reason = f"SaladCloud refuses {response.method} {response.url.path}: {details}"
        if status == HTTPStatus.UNAUTHORIZED:
            reason = f"SaladCloud does not know the API key ({details})"
        elif status == HTTPStatus.NOT_FOUND and response.method == "GET":
            reason += "; check the organization and the project of the fleet file"
        raise RefusedError(reason, status)
    elif status < HTTPStatus.MULTIPLE_CHOICES:
        with contextlib.suppress(ValueError):  # proxies return their errors as HTML
            return json.loads(text or "null")
    error = TransientError(f"{failure} ({details})")
    error.after_seconds = concurrency.after_seconds(
        response.headers.get("Retry-After"), LONGEST_RETRY_AFTER_SECONDS
    )
    raise error


def _message(text: str) -> str:
    """The error message in a body; of anything but JSON, such as a page, its first words."""
    try:
        body = json.loads(text)
    except ValueError:
        body = {"title": " ".join(re.sub(r"<[^>]*>", " ", text).split())}
    if not isinstance(body, dict):
        return ""
    # ASP.NET names the wrong fields in `errors`.
    parts = [
        str(body[name]) for name in ("title", "detail", "errors") if body.get(name)
    ]
    return ": ".join(parts)[:_SHOWN_CHARACTERS]
