"""The local job queue: rows of a SQLite file that many processes share.

`visible_at` is 0 for a visible message, and the end of its lease for a leased one. Before messages
are read in the order of the sends, expired leases are reset to 0 through the same index, so that a
returned message comes first again. No frequent statement reads more rows than it returns. A receipt
is the sequence number and version of the row; each lease increments the version.
"""

import asyncio
import contextlib
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from imagefleet.concurrency import Result
from imagefleet.errors import LeaseLost, MissingResourceError
from imagefleet.job import sizes
from imagefleet.storage.bundle import jobs_of
from imagefleet.storage.local import file as sqlite_file
from imagefleet.storage.protocol import (
    FoundMessages,
    LeasedMessage,
    Message,
    Operations,
    QueueDepth,
)

_FOUND_AT_ONCE = 100


class QueueFile:
    """Runs transactions on a SQLite file in a thread of its own; opens it on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="queue-file"
        )
        self._connection: Connection | None = None
        self._identity: tuple[int, int] | None = None

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Does *work* in the thread of the file.

        Raises TransientError if another process locks the file for too long, or the disk is full,
        SetupError if the file or the queue does not exist or cannot be used.
        """
        return await self._in_thread(lambda: work(self._open()))

    async def create(self, queue: str) -> None:
        """Creates the file and the queue if they do not exist."""

        def work() -> None:
            sqlite_file.create(self.path)
            connection = self._open()
            if (queue,) not in connection.execute("SELECT name FROM queues"):
                with transaction(connection, durable=True):
                    connection.execute(
                        "INSERT OR IGNORE INTO queues (name) VALUES (?)", (queue,)
                    )

        await self._in_thread(work)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        def translated() -> Result:
            try:
                return work()
            except sqlite3.Error as error:
                raise sqlite_file.translated(error, self.path) from error

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, translated)

    def _open(self) -> Connection:
        identity = _identity(self.path)
        if self._connection is not None and identity != self._identity:
            # Deleted, or replaced: its jobs are gone, and new ones are in the new file.
            self._close()
        if self._connection is None:
            self._connection = sqlite_file.connect(self.path)
            self._identity = identity
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextlib.contextmanager
def transaction(connection: Connection, *, durable: bool = False) -> Iterator[None]:
    """A write transaction; a *durable* one is synced to the disk.

    A power failure may undo the latest others: a lost lease or acknowledgement repeats a job,
    whereas a lost message would lose one. Crashes of processes undo neither.
    """
    connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if (
            connection.in_transaction
        ):  # some errors (a full disk) roll it back themselves
            connection.execute("ROLLBACK")
        raise


class LocalQueue:
    """A job queue in a SQLite file, in the order of the sends."""

    is_local = True

    def __init__(self, file: QueueFile, name: str, operations: Operations) -> None:
        self._file = file
        self.name = name
        self._operations = operations
        self._clock = time.time

    async def create(self) -> bool:
        await self._file.create(self.name)
        return True

    async def check(self) -> None:
        await self._file.run(self._check_exists)

    async def send(self, bodies: Iterable[str]) -> list[LeasedMessage]:
        messages = sizes.checked_messages(bodies)

        def send(connection: Connection) -> list[LeasedMessage]:
            now = self._clock()
            sent = []
            try:
                with transaction(connection, durable=True):
                    for body in messages:
                        message = self._message(uuid.uuid4().hex, body, 0, now)
                        row = self.name, now, message.id, body, jobs_of(body)
                        added = connection.execute(sqlite_file.SEND, row)
                        sent.append(message.leased(f"{added.lastrowid}.0"))
            except sqlite3.IntegrityError:
                raise self._missing() from None
            return sent

        return await self._run(send, len(messages))

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[LeasedMessage]:
        def receive(connection: Connection) -> list[Any]:
            now = self._clock()
            # An idle worker polls, and must not take the write lock each time.
            if (
                connection.execute(sqlite_file.ANY_VISIBLE, (self.name, now)).fetchone()
                is None
            ):
                return []
            with transaction(connection):
                connection.execute(sqlite_file.SWEEP, (self.name, now))
                values = now + lease_seconds, self.name, max_messages
                return connection.execute(sqlite_file.LEASE, values).fetchall()

        # RETURNING guarantees no order; each row starts with its sequence.
        rows = sorted(await self._run(receive))
        return [
            self._message(*row).leased(f"{sequence}.{version}")
            for sequence, version, *row in rows
        ]

    async def renew(
        self,
        message: LeasedMessage,
        lease_seconds: float,
        body: str | None = None,
    ) -> LeasedMessage:
        sequence, version, _ = _key(message)
        await self._update(message, lease_seconds, body)
        return message.renewed(f"{sequence}.{version + 1}", body)

    async def release(
        self,
        message: LeasedMessage,
        delay_seconds: float = 0,
        body: str | None = None,
    ) -> None:
        await self._update(message, delay_seconds, body)

    async def delete(self, message: LeasedMessage) -> None:
        await self._change(sqlite_file.DELETE, lambda: _key(message))

    async def find(self, text: str) -> FoundMessages:
        last = 0

        def page(connection: Connection) -> list[Any]:
            self._sweep(connection)
            values = self.name, last, text, text, _FOUND_AT_ONCE
            return connection.execute(sqlite_file.FIND, values).fetchall()

        self._operations.queue += 1
        while rows := await self._file.run(page):
            for _, *row, is_leased in rows:
                yield self._message(*row), bool(is_leased)
            last = rows[-1][0]

    async def depth(self) -> QueueDepth:
        def depth(connection: Connection) -> QueueDepth:
            self._sweep(connection)
            self._check_exists(connection)
            messages, leased = connection.execute(
                sqlite_file.COUNT, (self.name,)
            ).fetchone()
            oldest = connection.execute(sqlite_file.OLDEST, (self.name,)).fetchone()
            age_seconds = max(0.0, self._clock() - oldest[0]) if oldest else None
            return QueueDepth(messages, leased, age_seconds)

        found = await self._run(depth)
        if found.messages:
            self._operations.queue += 1  # on Azure: a peek for the age
        return found

    async def clear(self) -> None:
        def clear(connection: Connection) -> None:
            with transaction(connection, durable=True):
                connection.execute(sqlite_file.CLEAR, (self.name,))

        await self._run(clear)

    async def _run(
        self, work: Callable[[Connection], Result], operations: int = 1
    ) -> Result:
        self._operations.queue += operations
        return await self._file.run(work)

    async def _update(
        self, message: LeasedMessage, seconds: float, body: str | None
    ) -> None:
        def values() -> tuple[object, ...]:
            visible_at = self._clock() + seconds if seconds > 0 else 0
            return visible_at, body, *_key(message)

        await self._change(sqlite_file.UPDATE, values)

    async def _change(
        self, statement: str, values: Callable[[], tuple[object, ...]]
    ) -> None:
        """*values* are those at the time when the statement is executed."""

        def change(connection: Connection) -> int:
            with transaction(connection):
                return connection.execute(statement, values()).rowcount

        if not await self._run(change):
            raise LeaseLost

    def _message(self, message_id: str, body: str, count: int, at: float) -> Message:
        enqueued_at = datetime.fromtimestamp(at, UTC)
        return Message(message_id, body, count, enqueued_at, queue=self.name)

    def _check_exists(self, connection: Connection) -> None:
        if connection.execute(sqlite_file.EXISTS, (self.name,)).fetchone() is None:
            raise self._missing()

    def _missing(self) -> MissingResourceError:
        return MissingResourceError(
            f"there is no queue {self.name!r} in {self._file.path.parent};"
            " `imagefleet load` creates and fills it"
        )

    def _sweep(self, connection: Connection) -> None:
        """Makes messages with expired leases visible, for reads that lease nothing."""
        now = self._clock()
        if (
            connection.execute(sqlite_file.ANY_EXPIRED, (self.name, now)).fetchone()
            is not None
        ):
            try:
                with transaction(connection):
                    connection.execute(sqlite_file.SWEEP, (self.name, now))
            except sqlite3.OperationalError as error:
                # On a full disk the rest can be read all the same.
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise


def _key(message: LeasedMessage) -> tuple[int, int, str]:
    """Row, version and id: in a file that replaced another, the row may be another message's."""
    sequence, _, version = message.receipt.partition(".")
    return int(sequence), int(version), message.id


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from another of its name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
