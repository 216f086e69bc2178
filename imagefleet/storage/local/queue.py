"""The local job queue: rows of a SQLite file that many processes share.

`visible_at` is 0 for a visible message, and the end of its lease for a leased one. Before messages
are read in the order of the sends, expired leases are reset to 0 through the same index, so that a
returned message comes first again. No frequent statement reads more rows than it returns. A receipt
is the sequence number and version of the row; each lease increments the version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from imagefleet import errors, uptime
from imagefleet.concurrency import Batches
from imagefleet.job import sizes
from imagefleet.storage import protocol
from imagefleet.storage.local import file as sqlite_file

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
SELECT sequence, visible_at > ?, id, body, delivery_count, enqueued_at FROM messages
WHERE queue = ? AND sequence > ?
AND (id = ? OR instr(body, ?) OR substr(ltrim(body), 1, 1) <> '{')
ORDER BY sequence LIMIT ?
"""
OLDEST = """
SELECT enqueued_at FROM messages WHERE queue = ? AND visible_at = 0 ORDER BY sequence LIMIT 1
"""
# Scans the index: 50 ms for a million messages, which blocks no writer.
COUNT = "SELECT count(*) FROM messages WHERE queue = ?"
COUNT_LEASED = "SELECT count(*) FROM messages WHERE queue = ? AND visible_at > 0"

RECORD_SHARDS = "INSERT OR REPLACE INTO shards VALUES (?, ?, ?)"
SHARDS = "SELECT used, made FROM shards WHERE queue = ?"

_BROWSE_PAGE = 100


#: Changes of single messages in one transaction, which takes a millisecond then.
_MOST_CHANGES = 64


class _Change(NamedTuple):
    """A statement that changes one message, and its values at the time when it is executed."""

    statement: str
    values: Callable[[], Sequence[object]]


class QueueFile:
    """Runs transactions on a SQLite file that many processes share; opens it on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="queue-file")
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._clock_ahead = 0.0
        self._calls: Batches[_Change | Callable[[], object], Any] = Batches(
            self._do, self._thread, most=_MOST_CHANGES
        )

    async def run(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Does *work* in the thread of the file.

        Raises:
            TransientError: another process locks the file for too long, or the disk is full.
            SetupError: the file or queue does not exist or cannot be used.
        """
        return await self._in_thread(lambda: work(self._open()))

    async def change(self, statement: str, values: Callable[[], Sequence[object]]) -> bool:
        """Executes *statement*, in one transaction with what else waits; whether it met a row.

        Raises:
            TransientError, SetupError: as for `run`; no change of the transaction was made.
        """
        return bool(await self._calls(_Change(statement, values)))

    async def create(self, queues: Iterable[str]) -> None:
        """Creates the file and the queues if they do not exist."""
        names = list(queues)
        await self._in_thread(lambda: self._create(names))

    async def has_queue(self, name: str) -> bool:
        find = "SELECT 1 FROM queues WHERE name = ?"

        def has(connection: sqlite3.Connection) -> bool:
            return connection.execute(find, (name,)).fetchone() is not None

        return await self._in_thread(lambda: sqlite_file.exists(self.path) and has(self._open()))

    def now(self) -> float:
        """The clock of the leases; only for *work* in `run`."""
        return self._clock_ahead + time.clock_gettime(uptime.CLOCK)

    async def close(self) -> None:
        await self._in_thread(self._close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        done: _Result = await self._calls(work)
        return done

    def _do(self, calls: Sequence[_Change | Callable[[], object]]) -> list[object]:
        outcomes: list[object] = []
        for is_change, group in itertools.groupby(calls, lambda each: isinstance(each, _Change)):
            if is_change:
                outcomes += self._change(cast("list[_Change]", list(group)))
            else:
                outcomes += [self._outcome(cast("Callable[[], object]", each)) for each in group]
        return outcomes

    def _change(self, changes: Sequence[_Change]) -> Sequence[object]:
        def change() -> list[bool]:
            connection = self._open()
            with transaction(connection):
                return [
                    connection.execute(each.statement, each.values()).rowcount > 0
                    for each in changes
                ]

        outcome = self._outcome(change)
        return [outcome] * len(changes) if isinstance(outcome, Exception) else outcome

    def _outcome(self, work: Callable[[], _Result]) -> _Result | Exception:
        try:
            return work()
        except sqlite3.Error as error:
            translated = sqlite_file.translated(error, self.path)
            translated.__cause__ = error
            return translated
        except Exception as error:  # noqa: BLE001 - raised again by the call
            return error

    def _create(self, queues: Iterable[str]) -> None:
        sqlite_file.create(self.path)
        connection = self._open()
        known = set(connection.execute("SELECT name FROM queues"))
        if rows := [(name,) for name in queues if (name,) not in known]:
            with transaction(connection, durable=True):
                connection.executemany("INSERT OR IGNORE INTO queues (name) VALUES (?)", rows)

    def _open(self) -> sqlite3.Connection:
        identity = _identity(self.path)
        if self._connection is not None and identity != self._identity:
            # Deleted, or replaced: its jobs are gone, and new ones are in the new file.
            self._close()
        if self._connection is None:
            connection = sqlite_file.connect(self.path)
            try:
                self._clock_ahead = sqlite_file.clock_ahead(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._identity = connection, identity
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, *, durable: bool = False) -> Iterator[None]:
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
        if connection.in_transaction:  # some errors (a full disk) roll it back themselves
            connection.execute("ROLLBACK")
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from another of its name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class LocalQueue:
    """A job queue in a SQLite file, in the order of the sends."""

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
        await self._file.create([self.name])
        await self._file.run(self._read_shards)
        return True

    async def check(self) -> None:
        if not await self._file.has_queue(self.name):
            raise self._missing()
        await self._file.run(self._read_shards)

    async def read_shards(self) -> protocol.Shards:
        return await self._run(self._read_shards)

    async def record_shards(self, shards: protocol.Shards) -> None:
        def record(connection: sqlite3.Connection) -> None:
            connection.execute(sqlite_file.SHARDS)
            with transaction(connection, durable=True):
                now = shards.with_made(self._read_shards(connection).made)
                connection.execute(RECORD_SHARDS, (self.name, *now))
            self.shards = now

        await self._run(record)

    async def send(self, bodies: Iterable[str]) -> None:
        checked = sizes.checked_messages(bodies)
        await self._run(lambda connection: self._send(connection, checked), len(checked))

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        protocol.check_receive(max_messages, lease_seconds)
        return await self._run(
            lambda connection: self._receive(connection, max_messages, lease_seconds)
        )

    async def renew(
        self, message: protocol.LeasedMessage, lease_seconds: float, body: str | None = None
    ) -> protocol.LeasedMessage:
        protocol.check_lease(lease_seconds)
        sequence, version = _row(message)
        await self._update(message, lease_seconds, body)
        return dataclasses.replace(
            message,
            receipt=_receipt(sequence, version + 1),
            body=message.body if body is None else body,
        )

    async def release(
        self, message: protocol.LeasedMessage, delay_seconds: float = 0, body: str | None = None
    ) -> None:
        await self._update(message, delay_seconds, body)

    async def delete(self, message: protocol.LeasedMessage) -> None:
        await self._change(DELETE, lambda: _key(message))

    async def browse(self) -> AsyncIterator[protocol.Message]:
        self._operations.queue += 1
        last = 0
        while page := await self._file.run(functools.partial(self._page, after=last)):
            for _, message in page:
                yield message
            last, _ = page[-1]

    @property
    def finds_all(self) -> bool:
        return True

    async def find(self, text: str) -> AsyncIterator[protocol.FoundMessage]:
        self._operations.queue += 1
        last = 0
        while True:
            values = (self._lease_clock(), self.name, last, text, text, _BROWSE_PAGE)
            page = await self._file.run(functools.partial(self._found, values))
            for _, is_leased, *fields in page:
                yield protocol.FoundMessage(_message(self.name, *fields), bool(is_leased))
            if len(page) < _BROWSE_PAGE:
                return
            last = page[-1][0]

    async def depth(self) -> protocol.QueueDepth:
        depth = await self._run(self._depth)
        if depth.messages:
            self._operations.queue += 1  # on Azure: a peek for the age
        return depth

    def _missing(self) -> errors.MissingResourceError:
        return errors.MissingResourceError(
            f"there is no queue {self.name!r} in {self._file.path.parent};"
            " `imagefleet load` creates and fills it"
        )

    async def clear(self) -> None:
        def clear(connection: sqlite3.Connection) -> None:
            with transaction(connection, durable=True):
                connection.execute(CLEAR, (self.name,))

        await self._run(clear)

    async def stamps(self) -> protocol.Stamps:
        now = _time(self._clock())  # the processes that share the file share a clock
        return protocol.Stamps(now, now)

    async def _run(
        self, work: Callable[[sqlite3.Connection], _Result], operations: int = 1
    ) -> _Result:
        self._operations.queue += operations
        return await self._file.run(work)

    def _send(self, connection: sqlite3.Connection, bodies: Iterable[str]) -> None:
        now = self._clock()
        rows = ((self.name, now, uuid.uuid4().hex, body) for body in bodies)
        try:
            with transaction(connection, durable=True):
                connection.executemany(SEND, rows)
        except sqlite3.IntegrityError:
            raise self._missing() from None

    def _receive(
        self, connection: sqlite3.Connection, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        now = self._lease_clock()
        # An idle worker polls, and must not take the write lock each time.
        if connection.execute(ANY_VISIBLE, (self.name, now)).fetchone() is None:
            return []
        with transaction(connection):
            connection.execute(SWEEP, (self.name, now))
            leased = connection.execute(LEASE, (now + lease_seconds, self.name, max_messages))
            rows = leased.fetchall()
        rows.sort()  # RETURNING guarantees no order; each row starts with its sequence
        return [_leased(self.name, *row) for row in rows]

    async def _update(
        self, message: protocol.LeasedMessage, seconds: float, body: str | None
    ) -> None:
        def values() -> Sequence[object]:
            visible_at = self._lease_clock() + seconds if seconds > 0 else 0
            return visible_at, body, *_key(message)

        await self._change(UPDATE, values)

    async def _change(self, statement: str, values: Callable[[], Sequence[object]]) -> None:
        self._operations.queue += 1
        if not await self._file.change(statement, values):
            raise errors.LeaseLost

    def _page(
        self, connection: sqlite3.Connection, *, after: int
    ) -> list[tuple[int, protocol.Message]]:
        self._sweep(connection)
        rows = connection.execute(BROWSE, (self.name, after, _BROWSE_PAGE)).fetchall()
        return [(sequence, _message(self.name, *fields)) for sequence, *fields in rows]

    def _found(
        self, values: tuple[object, ...], connection: sqlite3.Connection
    ) -> list[tuple[Any, ...]]:
        return connection.execute(FIND, values).fetchall()

    def _depth(self, connection: sqlite3.Connection) -> protocol.QueueDepth:
        self._sweep(connection)
        self._read_shards(connection)
        (messages,) = connection.execute(COUNT, (self.name,)).fetchone()
        (leased,) = connection.execute(COUNT_LEASED, (self.name,)).fetchone()
        oldest = connection.execute(OLDEST, (self.name,)).fetchone()
        age_seconds = max(0.0, self._clock() - oldest[0]) if oldest else None
        return protocol.QueueDepth(messages, leased, age_seconds)

    def _read_shards(self, connection: sqlite3.Connection) -> protocol.Shards:
        row = None
        with contextlib.suppress(sqlite3.OperationalError):  # a file that never had shards
            row = connection.execute(SHARDS, (self.name,)).fetchone()
        self.shards = protocol.Shards(*row) if row else protocol.Shards()
        return self.shards

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


def _leased(
    queue: str,
    sequence: int,
    version: int,
    message_id: str,
    body: str,
    delivery_count: int,
    enqueued_at: float,
) -> protocol.LeasedMessage:
    at, receipt = _time(enqueued_at), _receipt(sequence, version)
    return protocol.LeasedMessage(message_id, body, delivery_count, at, receipt, queue=queue)


def _message(
    queue: str, message_id: str, body: str, delivery_count: int, enqueued_at: float
) -> protocol.Message:
    return protocol.Message(message_id, body, delivery_count, _time(enqueued_at), queue=queue)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _receipt(sequence: int, version: int) -> str:
    return f"{sequence}.{version}"


def _row(message: protocol.LeasedMessage) -> tuple[int, int]:
    sequence, _, version = message.receipt.partition(".")
    return int(sequence), int(version)


def _key(message: protocol.LeasedMessage) -> tuple[int, int, str]:
    """Row, version and id: in a file that replaced another, the row may be another message's."""
    return *_row(message), message.id
