"""How far a load has come, in a file that outlives the process."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet import errors

#: Writing it for each batch would slow the load down; a kill sends again what came after it, so
#: both are small.
POSITIONS_BETWEEN_WRITES = 1_000
SECONDS_BETWEEN_WRITES = 1.0


class Checkpoint(BaseModel):
    """One load of one source into one queue; `confirmed` counts positions stored for certain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    storage: str
    queue: str
    confirmed: int = Field(default=0, ge=0)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a checkpoint; None where there is none.

        Raises:
            SetupError: the file is no checkpoint or cannot be read.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.SetupError(f"{path} cannot be read: {error.strerror}") from None
        except ValidationError:
            raise errors.SetupError(
                f"{path} is no checkpoint that can be read; begin anew with --restart"
            ) from None

    def write(self, path: Path) -> None:
        """Replaces the file in one step: a kill leaves the old one or the new one, whole.

        Raises:
            SetupError: the place cannot be written to.
        """
        # Not flushed to the disk: that guards against a power cut, after which the queue's own
        # last messages may be gone too.
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            written.write_text(self.model_dump_json() + "\n", encoding="utf-8")
            written.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
            raise errors.SetupError(
                f"the checkpoint {path} cannot be written: {error.strerror};"
                " --checkpoint FILE puts it elsewhere"
            ) from None

    def resumes(self, other: Checkpoint) -> bool:
        """Whether both are about the same load."""
        return self.model_copy(update={"confirmed": other.confirmed}) == other


def default_path(source: Path, queue: str) -> Path:
    return source.with_name(f".{source.name}.{queue}.checkpoint.json")


def resume(path: Path, wanted: Checkpoint) -> Checkpoint:
    """The checkpoint to go on from: what the file holds, or *wanted* where there is none.

    Raises:
        SetupError: the file is about another load; says what to do.
    """
    found = Checkpoint.read(path)
    if found is None:
        return wanted
    if found.resumes(wanted):
        return found
    raise errors.SetupError(
        f"{path} is the checkpoint of {_difference(found, wanted)}, of which {found.confirmed:,}"
        " are sent; --restart forgets it and begins with the first job, --checkpoint FILE keeps"
        " both"
    )


def _difference(found: Checkpoint, wanted: Checkpoint) -> str:
    if found.storage != wanted.storage:
        return f"a load into another storage ({found.storage})"
    if found.queue != wanted.queue:
        return f"a load into another queue ({found.queue})"
    return "another load: the file has changed since, or the seed is another one"


class CheckpointFile:
    """Keeps a load's checkpoint file up to date, without a write for every batch."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self.path = path
        self._checkpoint = checkpoint
        self._written = -1
        self._written_at = 0.0

    def confirm(self, confirmed: int) -> None:
        """Notes that all positions below *confirmed* are stored."""
        self._checkpoint = self._checkpoint.model_copy(update={"confirmed": confirmed})
        if (
            confirmed - self._written >= POSITIONS_BETWEEN_WRITES
            or time.monotonic() - self._written_at >= SECONDS_BETWEEN_WRITES
        ):
            self.write()

    def write(self) -> None:
        """Writes what was noted.

        Raises:
            SetupError: the place cannot be written to.
        """
        if self._checkpoint.confirmed != self._written:
            self._checkpoint.write(self.path)
            self._written = self._checkpoint.confirmed
            self._written_at = time.monotonic()
