"""The progress of a load, in a file."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet import errors

#: A write for each batch would slow the load down; a kill repeats what came after the last write,
#: so both are small.
POSITIONS_BETWEEN_WRITES = 1_000
SECONDS_BETWEEN_WRITES = 1.0


class Checkpoint(BaseModel):
    """One load of one source into one queue; `confirmed` counts the positions that are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    storage: str
    queue: str
    confirmed: int = Field(default=0, ge=0)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """A checkpoint, or None if there is no such file.

        Raises:
            SetupError: the file is not a checkpoint or cannot be read.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.SetupError(f"{path} cannot be read: {error.strerror}") from None
        except ValidationError:
            raise errors.SetupError(
                f"{path} is not a valid checkpoint; --restart begins with the first job"
            ) from None

    def write(self, path: Path) -> None:
        """Replaces the file atomically.

        Raises:
            SetupError: the path is not writable.
        """
        # Not synced: after a power cut, the queue's last messages may be gone, too.
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            written.write_text(self.model_dump_json() + "\n", encoding="utf-8")
            written.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
            raise errors.SetupError(
                f"the checkpoint {path} cannot be written: {error.strerror};"
                " choose another path with --checkpoint FILE"
            ) from None


def default_path(source: Path, queue: str) -> Path:
    return source.with_name(f".{source.name}.{queue}.checkpoint.json")


def resume(path: Path, new: Checkpoint) -> Checkpoint:
    """The checkpoint in the file, or *new* if there is no file.

    Raises:
        SetupError: the file belongs to another load; says what to do.
    """
    found = Checkpoint.read(path)
    if found is None:
        return new
    if found.storage != new.storage:
        difference = f"a load into another storage ({found.storage})"
    elif found.queue != new.queue:
        difference = f"a load into another queue ({found.queue})"
    elif found.source != new.source:
        difference = "another load: the file has changed since, or the seed is different"
    else:
        return found
    raise errors.SetupError(
        f"{path} is the checkpoint of {difference}, {found.confirmed:,} jobs sent; --restart"
        " discards it and begins with the first job, --checkpoint FILE keeps both"
    )


class CheckpointFile:
    """Updates the checkpoint file of a load, but not for every batch."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self.path = path
        self._checkpoint = checkpoint
        self._written = -1
        self._written_at = 0.0

    def confirm(self, confirmed: int) -> None:
        """All positions below *confirmed* are stored."""
        self._checkpoint = self._checkpoint.model_copy(update={"confirmed": confirmed})
        if (
            confirmed - self._written >= POSITIONS_BETWEEN_WRITES
            or time.monotonic() - self._written_at >= SECONDS_BETWEEN_WRITES
        ):
            self.write()

    def write(self) -> None:
        """Raises SetupError if the path is not writable."""
        if self._checkpoint.confirmed != self._written:
            self._checkpoint.write(self.path)
            self._written = self._checkpoint.confirmed
            self._written_at = time.monotonic()
