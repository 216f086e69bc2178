"""The SQLite file: its schema and statements, how it is created and opened, and its errors."""

import contextlib
import shutil
import sqlite3
import uuid
from pathlib import Path

from imagefleet.errors import (
    DISK_FULL,
    FleetError,
    MissingResourceError,
    SetupError,
    StorageFullError,
    TransientError,
)
from imagefleet.storage.local.blobs import sync

#: Seconds to wait for another process's transaction: milliseconds, unless the machine is busy.
BUSY_TIMEOUT_SECONDS = 30

#: Pages (4 KiB) of the write-ahead log between checkpoints, each an fsync and a burst of writes.
#: SQLite's default, 1,000, means one every few hundred messages.
CHECKPOINT_PAGES = 4_000

#: Tells the file from those of other programs; another schema takes another number.
_APPLICATION = 0x1F1EE702

_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA application_id = {_APPLICATION};
CREATE TABLE queues (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE messages (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL REFERENCES queues (name),
    visible_at REAL NOT NULL DEFAULT 0,
    version INTEGER NOT NULL DEFAULT 0,
    delivery_count INTEGER NOT NULL DEFAULT 0,
    enqueued_at REAL NOT NULL,
    id TEXT NOT NULL,
    body TEXT NOT NULL,
    jobs INTEGER NOT NULL
);
CREATE INDEX messages_in_order ON messages (queue, visible_at, sequence, jobs);
"""

SEND = (
    "INSERT INTO messages (queue, enqueued_at, id, body, jobs) VALUES (?, ?, ?, ?, ?)"
)
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
COUNT = """
SELECT coalesce(sum(jobs), 0), coalesce(sum(jobs * (visible_at > 0)), 0) FROM messages
WHERE queue = ?
"""
EXISTS = "SELECT 1 FROM queues WHERE name = ?"

#: An I/O error with less room than this is one of a full disk.
_LEAST_FREE_BYTES = 2**18

_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_NO_ACCESS = {
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
}

_START_ANEW = (
    "put a copy of it back, or move it away together with its -wal and -shm and fill a new queue"
    " with `imagefleet load --restart`"
)


def create(path: Path) -> None:
    """Creates a file without queues, in one step, unless there is one, or a lost one's log."""
    log = log_of(path)
    draft = path.with_name(f".{uuid.uuid4().hex}"[: len(path.name)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        if log.exists() and log.stat().st_size and not path.exists():
            # SQLite would delete it, with what was sent last.
            raise SetupError(
                f"{path} is missing, but its log {log.name} is there: put the file back, or remove"
                " the log to begin with an empty queue"
            )
        try:
            with contextlib.closing(_connect(draft, "rwc")) as connection:
                connection.executescript(_SCHEMA)
            with contextlib.suppress(FileExistsError):  # of another process
                path.hardlink_to(draft)
            sync(path.parent)
        finally:
            for leftover in (
                draft,
                log_of(draft),
                draft.with_name(f"{draft.name}-shm"),
            ):
                leftover.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise SetupError(f"{path.parent} is a file, not a folder") from None
    except OSError as error:
        raise _translated_os_error(error, path) from error


def connect(path: Path) -> sqlite3.Connection:
    """Opens an existing file; a typo in a worker's address must not create an empty queue."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except OSError as error:
        raise _translated_os_error(error, path) from error
    if path.is_dir():
        raise SetupError(f"{path} is a folder, not a queue file: move it away")
    if size == 0:
        # SQLite would take it for a new database, and delete its log.
        raise SetupError(f"{path} is damaged: it has 0 bytes; {_START_ANEW}")
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
        raise SetupError(
            f"{path} is not a queue file, but the database of another program or version:"
            " choose another folder with --storage, or move it away"
        )


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def translated(error: sqlite3.Error, path: Path) -> FleetError:
    """Translates SQLite's error into one that names the file and what to do."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code in _NO_ROOM and _is_full(path.parent)):
        return _full(path)
    if code == sqlite3.SQLITE_CANTOPEN and not path.exists():
        return _missing(path)
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return TransientError(
            f"another process has kept {path} locked for {BUSY_TIMEOUT_SECONDS:g} s"
        )
    if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        message = f"{path} is damaged or not a queue file ({error}): {_START_ANEW}"
    elif code in _NO_ACCESS:
        message = f"no access to {path} ({error}): it and its folder must be writable"
    elif code == sqlite3.SQLITE_ERROR:
        message = f"{path} is not used as it should be: {error}"
    else:
        return TransientError(f"{path}: {error}")
    return SetupError(message)


def _translated_os_error(error: OSError, path: Path) -> FleetError:
    if error.errno in DISK_FULL:
        return _full(path)
    return SetupError(f"no access to {path}: {error.strerror or error}")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
    )


def _missing(path: Path) -> MissingResourceError:
    return MissingResourceError(
        f"there is no queue in {path.parent}: {path.name} is missing; `imagefleet load` makes it"
    )


def _full(path: Path) -> StorageFullError:
    return StorageFullError(f"the disk is full: {path} cannot grow; free some space")


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False
