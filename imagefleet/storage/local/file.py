"""The SQLite file: how it is created and opened, its clock, and what is said of a damaged one.

Its clock is the machine's uptime plus a constant that the first process after a start of the
machine writes into it: a lease ends when it should although somebody sets the time meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import time
import uuid
from pathlib import Path

from imagefleet import errors, uptime

#: Seconds to wait for another process's transaction: milliseconds, unless the machine is busy.
BUSY_TIMEOUT_SECONDS = 30

#: Pages (4 KiB) of the write-ahead log between checkpoints, each an fsync and a burst of writes.
#: SQLite's default, 1,000, means one every few hundred messages.
CHECKPOINT_PAGES = 4_000

_CLOCK = "CREATE TABLE IF NOT EXISTS clock (boot TEXT PRIMARY KEY, ahead REAL NOT NULL)"

SHARDS = """
CREATE TABLE IF NOT EXISTS shards (
    queue TEXT PRIMARY KEY, used INTEGER NOT NULL, made INTEGER NOT NULL
) WITHOUT ROWID
"""

_SCHEMA = (
    "CREATE TABLE queues (name TEXT PRIMARY KEY) WITHOUT ROWID",
    """
    CREATE TABLE messages (
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
    "CREATE INDEX messages_in_order ON messages (queue, visible_at, sequence)",
    _CLOCK,
)

_COLUMNS = frozenset(
    {"sequence", "queue", "visible_at", "version", "delivery_count", "enqueued_at", "id", "body"}
)

#: An I/O error with less room than this is one of a full disk.
_LEAST_FREE_BYTES = 2**18

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
#: A write failed for want of space.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_MISSING_QUEUE = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT})
_NO_DATABASE = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_NO_ACCESS = frozenset(
    {
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_CANTOPEN,
    }
)

_START_ANEW = (
    "put a copy of it back, or move it away together with its -wal and -shm and fill a new queue"
    " with `imagefleet load --restart`"
)


def create(path: Path) -> None:
    """Creates a file without queues, in one step, unless there is one.

    Raises:
        SetupError: its folder cannot be written, or the log of a lost file is there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise errors.SetupError(f"{path.parent} is a file, not a folder") from None
    except OSError as error:
        raise errors.SetupError(f"cannot create {path.parent}: {error.strerror}") from error
    if exists(path):
        return
    log = log_of(path)
    if log.exists() and log.stat().st_size and not path.exists():
        # SQLite would delete it, with what was sent last.
        raise errors.SetupError(
            f"{path} is missing, but its log {log.name} is there: put the file back, or remove"
            " the log to begin with an empty queue"
        )
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with contextlib.closing(_connect(draft, "rwc")) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            for statement in _SCHEMA:
                connection.execute(statement)
        with contextlib.suppress(FileExistsError):  # of another process
            path.hardlink_to(draft)
        _sync(path.parent)
    except OSError as error:
        raise _translated_os_error(error, path) from error
    finally:
        for leftover in (draft, log_of(draft), draft.with_name(f"{draft.name}-shm")):
            leftover.unlink(missing_ok=True)


def connect(path: Path) -> sqlite3.Connection:
    """Opens an existing file; a typo in a worker's address must not create an empty queue.

    Raises:
        SetupError: it is missing, or no queue file.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
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
        _check_schema(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def clock_ahead(connection: sqlite3.Connection) -> float:
    """What the file's clock is ahead of the machine's uptime.

    After a restart of the machine nobody holds the leases any more: they end.
    """
    boot = uptime.boot_id()
    if boot is None:
        return time.time() - uptime.seconds()
    find = "SELECT ahead FROM clock WHERE boot = ?"
    with contextlib.suppress(sqlite3.OperationalError):  # a file of an older version has no clock
        if found := connection.execute(find, (boot,)).fetchone():
            return float(found[0])
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(_CLOCK)
        found = connection.execute(find, (boot,)).fetchone()
        ahead = float(found[0]) if found else time.time() - uptime.seconds()
        if not found:
            if connection.execute("DELETE FROM clock").rowcount:
                connection.execute("UPDATE messages SET visible_at = 0 WHERE visible_at > 0")
            connection.execute("INSERT INTO clock VALUES (?, ?)", (boot, ahead))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return ahead


def exists(path: Path) -> bool:
    """Raises SetupError where that cannot be told."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _translated_os_error(error, path) from error
    return True


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def translated(error: sqlite3.Error, path: Path) -> errors.FleetError:
    """What SQLite says, as an error that names the file and what to do."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code in _NO_ROOM and _is_full(path.parent)):
        return _full(path)
    if code == sqlite3.SQLITE_CANTOPEN and not path.exists():
        return _missing(path)
    if code in _BUSY:
        seconds = f"{BUSY_TIMEOUT_SECONDS:g} s"
        return errors.TransientError(f"another process has kept {path} locked for {seconds}")
    if code in _MISSING_QUEUE:
        message = f"{path} lacks this queue: {error}"
    elif code in _NO_DATABASE:
        message = f"{path} is damaged or not a queue file ({error}): {_START_ANEW}"
    elif code in _NO_ACCESS:
        message = f"no access to {path} ({error}): it and its folder must be writable"
    else:
        return errors.TransientError(f"{path}: {error}")
    return errors.SetupError(message)


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    columns = connection.execute("SELECT name FROM pragma_table_info('messages')")
    if not {name for (name,) in columns} >= _COLUMNS:
        raise errors.SetupError(
            f"{path} is not a queue file, but the database of another program or version:"
            " choose another folder with --storage, or move it away"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
    )


def _missing(path: Path) -> errors.SetupError:
    return errors.SetupError(f"there is no queue in {path.parent}: {path.name} is missing")


def _full(path: Path) -> errors.StorageFullError:
    return errors.StorageFullError(f"the disk is full: {path} cannot grow; free some space")


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def _translated_os_error(error: OSError, path: Path) -> errors.FleetError:
    if error.errno in DISK_FULL:
        return _full(path)
    return errors.SetupError(f"no access to {path}: {error.strerror or error}")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
