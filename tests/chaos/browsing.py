"""The messages of a queue that wait, whichever storage it is on."""

from collections.abc import AsyncIterator

from imagefleet.storage.protocol import MAX_RECEIVE, JobQueue, LeasedMessage, Message

LEASE_SECONDS = 300


async def visible(queue: JobQueue) -> AsyncIterator[Message]:
    """Yields all messages that are not leased; 32 and more on Azure are delivered for it."""
    found = [message async for message, is_leased in queue.find("") if not is_leased]
    if queue.is_local or len(found) < MAX_RECEIVE:
        for message in found:
            yield message
        return
    leased: dict[str, LeasedMessage] = {}
    try:
        while page := await queue.receive(MAX_RECEIVE, LEASE_SECONDS):
            for message in page:
                leased[message.id] = message
                yield message
    finally:
        for each in leased.values():
            await queue.release(each)
