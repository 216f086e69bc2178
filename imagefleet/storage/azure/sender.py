"""Adds messages to a queue, one request each, in a fifth of the SDK's CPU time.

Its `send_message` takes some 0.8 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from xml.sax.saxutils import escape

from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.queue.aio import QueueClient

from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.signed import Signed, SignedRequests

#: Messages of the same length, which is all of a message that Azure's signature covers, share one
#: for so long. Azure accepts it for 15 minutes.
SIGNED_SECONDS = 5.0

_DECLARATION = "<?xml version='1.0' encoding='utf-8'?>\n"

_CREATED = 201


class MessageSender:
    """Adds messages that never expire to the queue of *client*, over the session of *transport*."""

    def __init__(
        self,
        client: QueueClient,
        transport: AioHttpTransport,
        api_version: str,
        on_request: Callable[[], None],
    ) -> None:
        """*on_request* is called for each request."""
        base, _, token = client.url.partition("?")
        self._url = f"{base}/messages?messagettl=-1{token and '&'}{token}"
        self._what = f"the queue {client.queue_name!r}"
        self._requests = SignedRequests(client.credential, transport, api_version)
        self._on_request = on_request
        self._by_length: dict[int, Signed] = {}
        self._signed_until = -1.0

    async def send(self, body: str) -> None:
        """Adds one message; its errors are those of the SDK and of aiohttp, to be translated."""
        data = self.xml(body)
        signed = await self.signed(len(data))
        self._on_request()
        # aiohttp repeats no POST by itself.
        _, answer = await self._requests.send("POST", signed, _CREATED, data=data, middlewares=())
        if b"<MessageId>" not in answer:  # of a proxy, say
            raise azure_errors.ReplyLostError(azure_errors.not_of_azure(self._what))

    @staticmethod
    def xml(body: str) -> bytes:
        """The body of a request, in UTF-8."""
        message = f"<QueueMessage><MessageText>{escape(body)}</MessageText></QueueMessage>"
        return f"{_DECLARATION}{message}".encode()

    async def signed(self, length: int) -> Signed:
        """A request with so many bytes."""
        if not self._requests.outlives_tokens:
            return await self._made(length)
        now = time.time()
        if not self._signed_until - SIGNED_SECONDS <= now < self._signed_until:
            self._by_length.clear()
            self._signed_until = now + SIGNED_SECONDS
        found = self._by_length.get(length)
        if found is None:
            found = self._by_length[length] = await self._made(length)
        return found

    async def _made(self, length: int) -> Signed:
        headers = {
            "Accept": "application/xml",
            "Content-Length": f"{length}",
            "Content-Type": "application/xml",
        }
        return await self._requests.sign("POST", self._url, headers)
