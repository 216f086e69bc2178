"""SQLite files of the cache: made anew where they are damaged or of another version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from imagefleet import errors


def opened(path: Path, tables: str, version: int) -> sqlite3.Connection:
    """A connection for all threads, to a file that has the tables; several may create them at once.

    Raises:
        SetupError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are in it
        try:
            db = _with_tables(path, tables, version)
        except sqlite3.OperationalError:  # it is locked, the disk is full, and so on
            raise
        except sqlite3.DatabaseError:  # a power failure has damaged it
            db = None
        if db is None:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            db = _with_tables(path, tables, version)
    except (sqlite3.Error, OSError) as error:
        raise errors.SetupError(
            f"cannot write {path}: {error}; choose another folder with --cache"
        ) from None
    if db is None:
        raise errors.SetupError(f"{path} is of another version; delete it")
    path.touch()
    return db


def connect(path: Path) -> sqlite3.Connection:
    """Another connection to such a file."""
    db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    # It is a cache: after a power failure, some of it is made again.
    db.execute("PRAGMA synchronous = off")
    return db


def _with_tables(path: Path, tables: str, version: int) -> sqlite3.Connection | None:
    """Opens a file with these tables; None: the file is of another version."""
    db = connect(path)
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found in {0, version}:
            db.executescript(
                "PRAGMA journal_mode = wal; BEGIN IMMEDIATE;"
                f"{tables} PRAGMA user_version = {version}; COMMIT;"
            )
            return db
    except BaseException:
        db.close()
        raise
    db.close()
    return None
