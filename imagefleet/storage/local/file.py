"""The SQLite file that many processes share: how it is created, opened and worked on.

Its clock is the machine's uptime plus a constant that the first process after a start of the
machine writes into it: a lease ends when it should although somebody sets the time meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from imagefleet import errors, uptime
from imagefleet.concurrency import Batches

#: Seconds to wait for another process's transaction: milliseconds, unless the machine is busy.
BUSY_TIMEOUT_SECONDS = 30

#: Pages (4 KiB) of the write-ahead log between checkpoints, each an fsync and a burst of writes.
#: SQLite's default, 1,000, means one every few hundred messages.
CHECKPOINT_PAGES = 4_000

#: Changes of single messages in one transaction, which takes a millisecond then.
_MOST_CHANGES = 64

#: Tells the file from those of other programs; another schema takes another number.
_APPLICATION = 0x1F1EE700

#: The number of a queue's shards is kept with the first one.
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA application_id = {_APPLICATION};
CREATE TABLE queues (
    name TEXT PRIMARY KEY, used INTEGER NOT NULL DEFAULT 1, made INTEGER NOT NULL DEFAULT 1
) WITHOUT ROWID;
CREATE TABLE messages (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL REFERENCES queues (name),
    visible_at REAL NOT NULL DEFAULT 0,
    version INTEGER NOT NULL DEFAULT 0,
    delivery_count INTEGER NOT NULL DEFAULT 0,
    enqueued_at REAL NOT NULL,
    id TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX messages_in_order ON messages (queue, visible_at, sequence);
CREATE TABLE clock (boot TEXT PRIMARY KEY, ahead REAL NOT NULL);
"""

#: An I/O error with less room than this is one of a full disk.
_LEAST_FREE_BYTES = 2**18

#: A write failed for want of space.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_NO_ACCESS = frozenset(
    {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN}
)

_START_ANEW = (
    "put a copy of it back, or move it away together with its -wal and -shm and fill a new queue"
    " with `imagefleet load --restart`"
)

_Result = TypeVar("_Result")


class _Change(NamedTuple):
    """Work that shares a transaction with what else waits."""

    work: Callable[[sqlite3.Connection], object]


class QueueFile:
    """Runs transactions on a SQLite file in a thread of its own; opens it on first use."""

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
        done: _Result = await self._calls(lambda: work(self._open()))
        return done

    async def change(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Does *work* in one transaction with what else waits.

        Raises:
            TransientError, SetupError: as for `run`; no change of the transaction was made.
        """
        done: _Result = await self._calls(_Change(work))
        return done

    async def create(self, queue: str) -> None:
        """Creates the file and the queue if they do not exist."""

        def work() -> None:
            create(self.path)
            connection = self._open()
            if (queue,) not in connection.execute("SELECT name FROM queues"):
                with transaction(connection, durable=True):
                    connection.execute("INSERT OR IGNORE INTO queues (name) VALUES (?)", (queue,))

        await self._calls(work)

    def now(self) -> float:
        """The clock of the leases; only for *work*."""
        return self._clock_ahead + time.clock_gettime(uptime.CLOCK)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _do(self, calls: Sequence[_Change | Callable[[], object]]) -> list[object]:
        outcomes: list[object] = []
        for is_change, group in itertools.groupby(calls, lambda each: isinstance(each, _Change)):
            if is_change:
                outcomes += self._change([each for each in group if isinstance(each, _Change)])
            else:
                outcomes += [self._outcome(each) for each in group if callable(each)]
        return outcomes

    def _change(self, changes: Sequence[_Change]) -> Sequence[object]:
        def work() -> list[object]:
            connection = self._open()
            with transaction(connection):
                return [change.work(connection) for change in changes]

        outcome = self._outcome(work)
        return [outcome] * len(changes) if isinstance(outcome, Exception) else outcome

    def _outcome(self, work: Callable[[], _Result]) -> _Result | Exception:
        try:
            return work()
        except sqlite3.Error as error:
            translated = _translated(error, self.path)
            translated.__cause__ = error
            return translated
        except Exception as error:  # noqa: BLE001 - raised again by the call
            return error

    def _open(self) -> sqlite3.Connection:
        identity = _identity(self.path)
        if self._connection is not None and identity != self._identity:
            # Deleted, or replaced: its jobs are gone, and new ones are in the new file.
            self._close()
        if self._connection is None:
            connection = connect(self.path)
            try:
                self._clock_ahead = _clock_ahead(connection)
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


def create(path: Path) -> None:
    """Creates a file without queues, in one step, unless there is one.

    Raises:
        SetupError: its folder cannot be written, or the log of a lost file is there.
    """
    log = log_of(path)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        if log.exists() and log.stat().st_size and not path.exists():
            # SQLite would delete it, with what was sent last.
            raise errors.SetupError(
                f"{path} is missing, but its log {log.name} is there: put the file back, or remove"
                " the log to begin with an empty queue"
            )
        try:
            with contextlib.closing(_connect(draft, "rwc")) as connection:
                connection.executescript(_SCHEMA)
            with contextlib.suppress(FileExistsError):  # of another process
                path.hardlink_to(draft)
            sync_folder(path.parent)
        finally:
            for leftover in (draft, log_of(draft), draft.with_name(f"{draft.name}-shm")):
                leftover.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise errors.SetupError(f"{path.parent} is a file, not a folder") from None
    except OSError as error:
        raise _translated_os_error(error, path) from error


def connect(path: Path) -> sqlite3.Connection:
    """Opens an existing file; a typo in a worker's address must not create an empty queue.

    Raises:
        SetupError: it is missing, or no queue file.
    """
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except OSError as error:
        raise _translated_os_error(error, path) from error
    if path.is_dir():
        raise errors.SetupError(f"{path} is a folder, not a queue file: move it away")
    if size == 0:
        # SQLite would take it for a new database, and delete its log.
        raise errors.SetupError(f"{path} is damaged: it has 0 bytes; {_START_ANEW}")
    connection = _connect(path, "rw")
    try:
        _check_application(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_application(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION,):
        raise errors.SetupError(
            f"{path} is not a queue file, but the database of another program or version:"
            " choose another folder with --storage, or move it away"
        )


def _clock_ahead(connection: sqlite3.Connection) -> float:
    """What the file's clock is ahead of the machine's uptime.

    After a restart of the machine nobody holds the leases any more: they end.
    """
    ahead = time.time() - uptime.seconds()
    if (boot := uptime.boot_id()) is None:
        return ahead
    find = "SELECT ahead FROM clock WHERE boot = ?"
    if found := connection.execute(find, (boot,)).fetchone():
        return float(found[0])
    with transaction(connection):
        if found := connection.execute(find, (boot,)).fetchone():
            return float(found[0])
        if connection.execute("DELETE FROM clock").rowcount:
            connection.execute("UPDATE messages SET visible_at = 0 WHERE visible_at > 0")
        connection.execute("INSERT INTO clock VALUES (?, ?)", (boot, ahead))
    return ahead


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def sync_folder(folder: Path | str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _translated(error: sqlite3.Error, path: Path) -> errors.FleetError:
    """What SQLite says, as an error that names the file and what to do."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code in _NO_ROOM and _is_full(path.parent)):
        return _full(path)
    if code == sqlite3.SQLITE_CANTOPEN and not path.exists():
        return _missing(path)
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        seconds = f"{BUSY_TIMEOUT_SECONDS:g} s"
        return errors.TransientError(f"another process has kept {path} locked for {seconds}")
    if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        message = f"{path} is damaged or not a queue file ({error}): {_START_ANEW}"
    elif code in _NO_ACCESS:
        message = f"no access to {path} ({error}): it and its folder must be writable"
    elif code == sqlite3.SQLITE_ERROR:
        message = f"{path} is not used as it should be: {error}"
    else:
        return errors.TransientError(f"{path}: {error}")
    return errors.SetupError(message)


def _translated_os_error(error: OSError, path: Path) -> errors.FleetError:
    if error.errno in DISK_FULL:
        return _full(path)
    return errors.SetupError(f"no access to {path}: {error.strerror or error}")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from another of its name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _missing(path: Path) -> errors.MissingResourceError:
    return errors.MissingResourceError(
        f"there is no queue in {path.parent}: {path.name} is missing; `imagefleet load` makes it"
    )


def _full(path: Path) -> errors.StorageFullError:
    return errors.StorageFullError(f"the disk is full: {path} cannot grow; free some space")


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False
