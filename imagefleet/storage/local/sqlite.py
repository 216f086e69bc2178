"""The SQLite file of the local queues: one connection in a dedicated thread.

The file must be on a local disk, as the write-ahead log uses memory shared between processes.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from imagefleet import errors, retry

#: For another process's transaction: milliseconds, unless the machine is overloaded.
BUSY_TIMEOUT_SECONDS = 30

#: Pages (4 KiB) of the write-ahead log between checkpoints, each an fsync and a burst of writes.
#: SQLite's default, 1,000, means one every few hundred messages.
CHECKPOINT_PAGES = 4_000

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS queues (name TEXT PRIMARY KEY) WITHOUT ROWID",
    """
    CREATE TABLE IF NOT EXISTS messages (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        queue TEXT NOT NULL REFERENCES queues (name),
        visible_at REAL NOT NULL DEFAULT 0,
        version INTEGER NOT NULL DEFAULT 0,
        delivery_count INTEGER NOT NULL DEFAULT 0,
        enqueued_at REAL NOT NULL,
        id TEXT NOT NULL,
        body TEXT NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS messages_in_order ON messages (queue, visible_at, sequence)",
)

_MISSING_QUEUE = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT})
_NO_DATABASE = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_NO_ACCESS = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})

_Result = TypeVar("_Result")


class QueueFile:
    """Runs transactions on a SQLite file that many processes share; opens it on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="queue-file")
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Does *work* in the thread of the file.

        Raises:
            TransientError: another process locks the file for too long, or the disk is full.
            SetupError: the file or queue does not exist or cannot be used.
        """
        return await self._in_thread(lambda: work(self._open(create=False)))

    async def create(self, queues: Iterable[str]) -> None:
        """Creates the file and the queues if they do not exist."""
        names = list(queues)
        # When two processes create the file at once, one may find it locked: SQLite's busy timeout
        # does not apply to the switch to a write-ahead log.
        await retry.DEFAULT.call(lambda: self._in_thread(lambda: self._create(names)))

    async def has_queue(self, name: str) -> bool:
        find = "SELECT 1 FROM queues WHERE name = ?"
        return self.path.exists() and await self.run(
            lambda connection: connection.execute(find, (name,)).fetchone() is not None
        )

    async def close(self) -> None:
        await self._in_thread(self._close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        def translated() -> _Result:
            try:
                return work()
            except sqlite3.Error as error:
                raise _translate(error, self.path) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, translated)

    def _create(self, queues: Iterable[str]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.SetupError(
                f"cannot create {self.path.parent}: {error.strerror}"
            ) from error
        connection = self._open(create=True)
        with transaction(connection, durable=True):
            for statement in _SCHEMA:
                connection.execute(statement)
            rows = [(name,) for name in queues]
            connection.executemany("INSERT OR IGNORE INTO queues (name) VALUES (?)", rows)

    def _open(self, *, create: bool) -> sqlite3.Connection:
        if self._connection is None:
            # A typo in a worker's address must not create an empty queue.
            mode = "rwc" if create else "rw"
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=BUSY_TIMEOUT_SECONDS,
                isolation_level=None,
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
                connection.execute("PRAGMA foreign_keys = ON")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
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


def _translate(error: sqlite3.Error, path: Path) -> errors.FleetError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return errors.TransientError(f"the disk is full: {path} cannot grow; free some space")
    if code == sqlite3.SQLITE_CANTOPEN and not path.exists():
        return errors.SetupError(f"there is no queue in {path.parent}: {path.name} is missing")
    if code in _MISSING_QUEUE:
        return errors.SetupError(f"{path} lacks this queue: {error}")
    if code in _NO_DATABASE:
        return errors.SetupError(f"{path} is damaged or not a queue file: {error}")
    if code in _NO_ACCESS or code == sqlite3.SQLITE_CANTOPEN:
        return errors.SetupError(f"no access to {path}: {error}")
    return errors.TransientError(f"{path}: {error}")
