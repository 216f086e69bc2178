"""Requests made by hand and signed by the SDK, whose own take several times the CPU time.

It runs seventeen policies for each, and reads and writes XML by reflection.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from wsgiref.handlers import format_date_time

import aiohttp
from azure.core.credentials import AzureSasCredential
from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.pipeline.policies import (
    AsyncBearerTokenCredentialPolicy,
    AzureSasCredentialPolicy,
    SansIOHTTPPolicy,
)
from azure.core.pipeline.transport import AioHttpTransport, HttpRequest

from imagefleet.storage.azure import errors as azure_errors

_SCOPE = "https://storage.azure.com/.default"

_UNAUTHORIZED = 401

_Policy = SansIOHTTPPolicy[Any, Any] | AsyncBearerTokenCredentialPolicy[Any, Any] | None


class Signed(NamedTuple):
    """The address of a signed request, and its headers."""

    url: str
    headers: Mapping[str, str]


class SignedRequests:
    """Requests with the *credential* of a client of the SDK, over the session of *transport*."""

    def __init__(self, credential: Any, transport: AioHttpTransport, api_version: str) -> None:
        self._credential = credential
        self._policy = _policy_of(credential)
        self._transport = transport
        self._api_version = api_version
        self._timeout = aiohttp.ClientTimeout(
            sock_connect=transport.connection_config.timeout,
            sock_read=transport.connection_config.read_timeout,
        )

    @property
    def outlives_tokens(self) -> bool:
        """Whether a signature holds for minutes, and no newer token can come meanwhile."""
        changing = AzureSasCredentialPolicy, AsyncBearerTokenCredentialPolicy
        return not isinstance(self._policy, changing)

    async def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Signed:
        dated = {"x-ms-date": format_date_time(time.time()), "x-ms-version": self._api_version}
        made = HttpRequest(method, url, {**headers, **dated})
        request = PipelineRequest(made, PipelineContext(self._transport))
        if isinstance(self._policy, AsyncBearerTokenCredentialPolicy):
            await self._policy.on_request(request)
        elif self._policy is not None:
            self._policy.on_request(request)
        return Signed(made.url, dict(made.headers))

    async def send(
        self, method: str, signed: Signed, status: int, **options: Any
    ) -> tuple[Mapping[str, str], bytes]:
        """The headers and the body of the answer, which must have the *status*.

        Its errors are those of the SDK and of aiohttp, to be translated.
        """
        session: aiohttp.ClientSession = self._transport.session
        async with session.request(
            method,
            signed.url,
            headers=signed.headers,
            timeout=self._timeout,
            allow_redirects=False,
            **options,
        ) as response:
            answer = await response.read()
        if response.status != status:
            if response.status == _UNAUTHORIZED:
                self._policy = _policy_of(self._credential)  # forgets an identity's token
            raise azure_errors.answered(response.status, response.headers, answer)
        return response.headers, answer


def _policy_of(credential: Any) -> _Policy:
    """What signs; None: the token is in the URL."""
    if isinstance(credential, AzureSasCredential):
        return AzureSasCredentialPolicy(credential)
    if credential is None or isinstance(credential, SansIOHTTPPolicy):  # the SDK's, for a key
        return credential
    return AsyncBearerTokenCredentialPolicy(credential, _SCOPE)
