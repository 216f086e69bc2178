"""The job queue on Azure Queue Storage.

Pitfalls of the SDK that this module avoids: `receive_messages` reads on until the queue is empty,
unless limited to one page; `update_message` without a timeout hands the message back, and with a
message object it sends the whole body again; messages expire after seven days by default.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from azure.storage.queue import QueueMessage
from azure.storage.queue.aio import QueueClient

from imagefleet import concurrency
from imagefleet.concurrency import Operation, Result
from imagefleet.errors import NoTokenError, TransientError
from imagefleet.job import sizes
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.credentials import Access
from imagefleet.storage.azure.roles import ANY_PERMISSION
from imagefleet.storage.bundle import jobs_of
from imagefleet.storage.protocol import (
    MAX_RECEIVE,
    Clock,
    FoundMessages,
    LeasedMessage,
    Message,
    Metadata,
    QueueDepth,
)

#: Sends in flight at most: from far away, 128 at 50 ms are a queue's limit.
MOST_SENDS = 128


class AzureQueue:
    """A job queue in roughly the order of the sends; Azure guarantees none."""

    is_local = False

    def __init__(
        self,
        client: QueueClient,
        access: Access,
        clock: Clock,
    ) -> None:
        self.name = client.queue_name
        self._clock = clock
        self._client = client
        self._access = access
        self._call = access.call

    async def create(self) -> bool:
        async def request() -> bool:
            with azure_errors.tolerated(azure_errors.NOT_FOR_TOKENS):
                with azure_errors.tolerated({"QueueAlreadyExists"}):
                    await self._client.create_queue()
                return True
            return False

        try:
            return await self._call("", request)
        except NoTokenError:
            return False

    async def check(self) -> None:
        async def request() -> None:
            with azure_errors.tolerated(azure_errors.LESS_PERMISSION):
                await self._client.get_queue_properties()

        await self._call(ANY_PERMISSION, request)

    async def metadata(self) -> Metadata:
        return (await self._call("r", self._client.get_queue_properties)).metadata or {}

    async def send(self, bodies: Iterable[str]) -> list[LeasedMessage]:
        messages = sizes.checked_messages(bodies)
        sent = {}

        async def send(numbered: tuple[int, str]) -> None:
            number, body = numbered
            # By default the SDK's expire after seven days.
            request = partial(self._client.send_message, body, time_to_live=-1)
            message = await self._call("a", request)
            message.content = body
            sent[number] = self._message(message).leased(str(message.pop_receipt))

        await concurrency.for_each(enumerate(messages), send, MOST_SENDS)
        return [sent[number] for number in sorted(sent)]

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[LeasedMessage]:
        async def request() -> list[LeasedMessage]:
            pages = self._client.receive_messages(
                messages_per_page=max_messages,
                max_messages=max_messages,
                visibility_timeout=math.ceil(lease_seconds),
            ).by_page()
            async for page in pages:
                return [
                    self._message(each).leased(str(each.pop_receipt))
                    async for each in page
                ]
            return []

        return await self._call("p", request)

    async def renew(
        self,
        message: LeasedMessage,
        lease_seconds: float,
        body: str | None = None,
    ) -> LeasedMessage:
        updated = await self._set_visible_after(message, lease_seconds, body)
        if updated is None:
            # The lost renewal replaced the receipt, or another worker has the message.
            raise TransientError(
                f"{self._access.what}: the reply to a renewal was lost"
            )
        return message.renewed(str(updated.pop_receipt), body)

    async def release(
        self,
        message: LeasedMessage,
        delay_seconds: float = 0,
        body: str | None = None,
    ) -> None:
        await self._set_visible_after(message, delay_seconds, body)

    async def delete(self, message: LeasedMessage) -> None:
        request = partial(self._client.delete_message, message.id, message.receipt)
        await self._call_with_receipt("p", request)

    async def find(self, text: str) -> FoundMessages:
        for message in await self._peek(MAX_RECEIVE):
            if (
                text in message.body
                or text == message.id
                or not message.body.startswith("{")
            ):
                yield message, False

    async def depth(self) -> QueueDepth:
        properties = await self._call("r", self._client.get_queue_properties)
        count = properties.approximate_message_count or 0  # never too low
        front = await self._peek(MAX_RECEIVE) if count else []
        age_seconds = None
        if front:
            jobs = sum(jobs_of(message.body) for message in front)
            count = round(count * jobs / len(front))
            age_seconds = max(
                0.0, (self._clock.now() - front[0].enqueued_at).total_seconds()
            )
        return QueueDepth(count, None, age_seconds)

    async def clear(self) -> None:
        # Of a large queue Azure deletes what it can within half a minute, and says that it failed.
        left = math.inf
        while True:
            try:
                return await self._call("", self._client.clear_messages)
            except TransientError:
                before = left
                left = (await self.depth()).messages
                if left >= before:
                    raise

    async def _call_with_receipt(
        self, permission: str, request: Operation[Result]
    ) -> Result | None:
        """Makes a request that invalidates its receipt.

        Returns None if a reply was lost, and the receipt is stale in the retry: either the request
        succeeded, or another worker has the message.
        """

        async def attempt(is_in_doubt: bool) -> Result | None:
            with azure_errors.tolerated(azure_errors.LEASE_LOST if is_in_doubt else ()):
                return await request()
            return None

        return await self._access.call_in_doubt(permission, attempt)

    async def _set_visible_after(
        self, message: LeasedMessage, seconds: float, body: str | None
    ) -> QueueMessage | None:
        # By id: given the message, the SDK would send its content again.
        update = partial(self._client.update_message, message.id, message.receipt, body)
        request = partial(update, visibility_timeout=math.ceil(seconds))
        return await self._call_with_receipt("u", request)

    async def _peek(self, max_messages: int) -> list[Message]:
        peeked = await self._call("r", lambda: self._client.peek_messages(max_messages))
        return [self._message(each) for each in peeked]

    def _message(self, message: Any) -> Message:  # the SDK's types would allow None
        facts = message.id, message.content, message.dequeue_count, message.inserted_on
        return Message(*facts, queue=self.name)
