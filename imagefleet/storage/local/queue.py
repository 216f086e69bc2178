"""The local job queue: rows of a SQLite file that many processes share.

`visible_at` is 0 for a visible message, and the end of its lease for a leased one. Before messages
are read in the order of the sends, expired leases are reset to 0 through the same index, so that a
returned message comes first again. No frequent statement reads more rows than it returns. A receipt
is the sequence number and version of the row; each lease increments the version.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.storage import protocol
from imagefleet.storage.local.file import QueueFile, transaction

_Result = TypeVar("_Result")

SEND = "INSERT INTO messages (queue, enqueued_at, id, body) VALUES (?, ?, ?, ?)"
ANY_VISIBLE = "SELECT 1 FROM messages WHERE queue = ? AND visible_at <= ? LIMIT 1"
ANY_EXPIRED = """
SELECT 1 FROM messages WHERE queue = ? AND visible_at > 0 AND visible_at <= ? LIMIT 1
"""
SWEEP = "UPDATE messages SET visible_at = 0 WHERE queue = ? AND visible_at > 0 AND visible_at <= ?"
LEASE = """
UPDATE messages
SET visible_at = ?, version = version + 1, delivery_count = delivery_count + 1
WHERE sequence IN (
    SELECT sequence FROM messages WHERE queue = ? AND visible_at = 0 ORDER BY sequence LIMIT ?
)
RETURNING sequence, version, id, body, delivery_count, enqueued_at
"""
UPDATE = """
UPDATE messages SET visible_at = ?, body = coalesce(?, body), version = version + 1
WHERE sequence = ? AND version = ? AND id = ?
"""
DELETE = "DELETE FROM messages WHERE sequence = ? AND version = ? AND id = ?"
CLEAR = "DELETE FROM messages WHERE queue = ?"
BROWSE = """
SELECT sequence, id, body, delivery_count, enqueued_at FROM messages
WHERE queue = ? AND visible_at = 0 AND sequence > ? ORDER BY sequence LIMIT ?
"""
# Messages in base64, as Azure Functions send them, are the caller's to read.
FIND = """
SELECT sequence, id, body, delivery_count, enqueued_at, visible_at > 0 FROM messages
WHERE queue = ? AND sequence > ?
AND (id = ? OR instr(body, ?) OR substr(ltrim(body), 1, 1) <> '{')
ORDER BY sequence LIMIT ?
"""
OLDEST = """
SELECT enqueued_at FROM messages WHERE queue = ? AND visible_at = 0 ORDER BY sequence LIMIT 1
"""
# Scans the index: 50 ms for a million messages, which blocks no writer.
COUNT = "SELECT count(*), count(nullif(visible_at, 0)) FROM messages WHERE queue = ?"
RECORD_SHARDS = "UPDATE queues SET used = ?, made = ? WHERE name = ?"
SHARDS = "SELECT used, made FROM queues WHERE name = ?"

_BROWSE_PAGE = 100


class LocalQueue:
    """A job queue in a SQLite file, in the order of the sends."""

    finds_all = True

    def __init__(
        self,
        file: QueueFile,
        name: str,
        operations: protocol.Operations,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """*clock* replaces both this machine's and that of the leases, for tests."""
        self._file = file
        self.name = name
        self._operations = operations
        self._clock = clock or time.time
        self._lease_clock = clock or file.now
        self.shards: protocol.Shards | None = None

    async def create(self) -> bool:
        await self._file.create(self.name)
        await self._file.run(self._read_shards)
        return True

    async def check(self) -> None:
        await self._file.run(self._read_shards)

    async def read_shards(self) -> protocol.Shards:
        return await self._run(self._read_shards)

    async def record_shards(self, shards: protocol.Shards) -> None:
        def record(connection: sqlite3.Connection) -> None:
            with transaction(connection, durable=True):
                now = shards.with_made(self._read_shards(connection).made)
                connection.execute(RECORD_SHARDS, (*now, self.name))
            self.shards = now

        await self._run(record)

    async def send(self, bodies: Iterable[str]) -> None:
        messages = sizes.checked_messages(bodies)

        def send(connection: sqlite3.Connection) -> None:
            now = self._clock()
            rows = ((self.name, now, uuid.uuid4().hex, body) for body in messages)
            try:
                with transaction(connection, durable=True):
                    connection.executemany(SEND, rows)
            except sqlite3.IntegrityError:
                raise self._missing() from None

        await self._run(send, len(messages))

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        protocol.check_receive(max_messages, lease_seconds)

        def receive(connection: sqlite3.Connection) -> list[Any]:
            now = self._lease_clock()
            # An idle worker polls, and must not take the write lock each time.
            if connection.execute(ANY_VISIBLE, (self.name, now)).fetchone() is None:
                return []
            with transaction(connection):
                connection.execute(SWEEP, (self.name, now))
                values = now + lease_seconds, self.name, max_messages
                return connection.execute(LEASE, values).fetchall()

        # RETURNING guarantees no order; each row starts with its sequence.
        rows = sorted(await self._run(receive))
        return [
            protocol.LeasedMessage(**self._fields(*row), receipt=f"{sequence}.{version}")
            for sequence, version, *row in rows
        ]

    async def renew(
        self, message: protocol.LeasedMessage, lease_seconds: float, body: str | None = None
    ) -> protocol.LeasedMessage:
        protocol.check_lease(lease_seconds)
        sequence, version, _ = _key(message)
        await self._update(message, lease_seconds, body)
        return dataclasses.replace(
            message,
            receipt=f"{sequence}.{version + 1}",
            body=message.body if body is None else body,
        )

    async def release(
        self, message: protocol.LeasedMessage, delay_seconds: float = 0, body: str | None = None
    ) -> None:
        await self._update(message, delay_seconds, body)

    async def delete(self, message: protocol.LeasedMessage) -> None:
        await self._change(DELETE, lambda: _key(message))

    async def browse(self) -> AsyncIterator[protocol.Message]:
        async for _, *row in self._pages(BROWSE):
            yield protocol.Message(**self._fields(*row))

    async def find(self, text: str) -> AsyncIterator[protocol.FoundMessage]:
        async for _, *row, is_leased in self._pages(FIND, text, text):
            message = protocol.Message(**self._fields(*row))
            yield protocol.FoundMessage(message, bool(is_leased))

    async def depth(self) -> protocol.QueueDepth:
        def depth(connection: sqlite3.Connection) -> protocol.QueueDepth:
            self._sweep(connection)
            self._read_shards(connection)
            messages, leased = connection.execute(COUNT, (self.name,)).fetchone()
            oldest = connection.execute(OLDEST, (self.name,)).fetchone()
            age_seconds = max(0.0, self._clock() - oldest[0]) if oldest else None
            return protocol.QueueDepth(messages, leased, age_seconds)

        found = await self._run(depth)
        if found.messages:
            self._operations.queue += 1  # on Azure: a peek for the age
        return found

    async def clear(self) -> None:
        def clear(connection: sqlite3.Connection) -> None:
            with transaction(connection, durable=True):
                connection.execute(CLEAR, (self.name,))

        await self._run(clear)

    async def stamps(self) -> protocol.Stamps:
        now = datetime.fromtimestamp(
            self._clock(), UTC
        )  # the processes that share the file share a clock
        return protocol.Stamps(now, now)

    async def _run(
        self, work: Callable[[sqlite3.Connection], _Result], operations: int = 1
    ) -> _Result:
        self._operations.queue += operations
        return await self._file.run(work)

    async def _update(
        self, message: protocol.LeasedMessage, seconds: float, body: str | None
    ) -> None:
        def values() -> tuple[object, ...]:
            visible_at = self._lease_clock() + seconds if seconds > 0 else 0
            return visible_at, body, *_key(message)

        await self._change(UPDATE, values)

    async def _change(self, statement: str, values: Callable[[], tuple[object, ...]]) -> None:
        """*values* are those at the time when the statement is executed."""
        self._operations.queue += 1
        if not await self._file.change(lambda each: each.execute(statement, values()).rowcount):
            raise errors.LeaseLost

    async def _pages(self, statement: str, *texts: str) -> AsyncIterator[Any]:
        """The rows of a statement, read by pages; each row starts with its sequence."""
        last = 0

        def page(connection: sqlite3.Connection) -> list[Any]:
            self._sweep(connection)
            values = self.name, last, *texts, _BROWSE_PAGE
            return connection.execute(statement, values).fetchall()

        self._operations.queue += 1
        while rows := await self._file.run(page):
            for row in rows:
                yield row
            last = rows[-1][0]

    def _fields(self, message_id: str, body: str, count: int, at: float) -> dict[str, Any]:
        """The fields that every message has."""
        return {
            "id": message_id,
            "body": body,
            "delivery_count": count,
            "enqueued_at": datetime.fromtimestamp(at, UTC),
            "queue": self.name,
        }

    def _read_shards(self, connection: sqlite3.Connection) -> protocol.Shards:
        row = connection.execute(SHARDS, (self.name,)).fetchone()
        if row is None:
            raise self._missing()
        self.shards = protocol.Shards(*row)
        return self.shards

    def _missing(self) -> errors.MissingResourceError:
        return errors.MissingResourceError(
            f"there is no queue {self.name!r} in {self._file.path.parent};"
            " `imagefleet load` creates and fills it"
        )

    def _sweep(self, connection: sqlite3.Connection) -> None:
        """Makes messages with expired leases visible, for reads that lease nothing."""
        now = self._lease_clock()
        if connection.execute(ANY_EXPIRED, (self.name, now)).fetchone() is not None:
            try:
                with transaction(connection):
                    connection.execute(SWEEP, (self.name, now))
            except sqlite3.OperationalError as error:
                # On a full disk the rest can be read all the same.
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise


def _key(message: protocol.LeasedMessage) -> tuple[int, int, str]:
    """Row, version and id: in a file that replaced another, the row may be another message's."""
    sequence, _, version = message.receipt.partition(".")
    return int(sequence), int(version), message.id
