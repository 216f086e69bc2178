"""A plain queue for the tests of routing, of which each test gives the methods that it uses."""

from collections.abc import AsyncIterator, Iterable

from imagefleet.storage.protocol import LeasedMessage, Message


class UnusedQueue:
    """What the tests do not use raises NotImplementedError."""

    is_local = False

    async def create(self) -> bool:
        raise NotImplementedError

    async def find(self, text: str) -> AsyncIterator[tuple[Message, bool]]:
        raise NotImplementedError
        yield  # type: ignore[unreachable]

    async def clear(self) -> None:
        raise NotImplementedError

    async def send(self, bodies: Iterable[str]) -> list[LeasedMessage]:
        raise NotImplementedError

    async def renew(
        self, message: LeasedMessage, lease_seconds: float, body: str | None = None
    ) -> LeasedMessage:
        raise NotImplementedError

    async def release(
        self, message: LeasedMessage, delay_seconds: float = 0, body: str | None = None
    ) -> None:
        raise NotImplementedError

    async def delete(self, message: LeasedMessage) -> None:
        raise NotImplementedError
