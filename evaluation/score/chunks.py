"""Results of each chunk on the disk: features, scores, and images that were left out."""

import io
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from cli import console
from evaluation.score.plan import Chunk
from evaluation.score.statistics import Features


class Note(BaseModel):
    """Completes a chunk, so it is written last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Identifies the images and the networks that computed the features.
    digest: str
    images: int
    #: Images that are missing, not as recorded, or no images.
    left_out: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


def read_note(chunk: Chunk) -> Note | None:
    """None for a chunk that is not complete, or damaged."""
    try:
        return Note.model_validate_json(_note(chunk).read_bytes())
    except (OSError, ValidationError):
        return None


def is_done(chunk: Chunk, digest: str) -> bool:
    """False, too, where images were missing: they may have come since."""
    note = read_note(chunk)
    return note is not None and note.digest == digest and not note.left_out


def write(chunk: Chunk, note: Note, arrays: dict[str, Features]) -> None:
    """Keeps a chunk's features; whoever is interrupted leaves none."""
    for kind, features in arrays.items():
        stored = io.BytesIO()
        np.save(stored, features)
        console.write_file(path_of(chunk, kind), stored.getvalue())
    console.write_file(_note(chunk), note.model_dump_json())


def path_of(chunk: Chunk, kind: str) -> Path:
    return chunk.features.with_name(f"{chunk.features.name}.{kind}.npy")


def _note(chunk: Chunk) -> Path:
    return chunk.features.with_name(f"{chunk.features.name}.json")


class StoredRows:
    """The features of chunks in order, of which those asked for are read."""

    def __init__(self, chunks: Sequence[Chunk], kind: str, dimensions: int) -> None:
        notes = [(path_of(chunk, kind), read_note(chunk)) for chunk in chunks]
        kept = [(path, note.images) for path, note in notes if note and note.images]
        self._paths = [path for path, _ in kept]
        self._ends = np.fromiter(accumulate(count for _, count in kept), np.int64)
        self.shape = (int(self._ends[-1]) if kept else 0, dimensions)

    def __getitem__(self, indices: npt.NDArray[np.int64], /) -> Features:
        found = np.empty((len(indices), self.shape[1]), np.float32)
        places = np.searchsorted(self._ends, indices, side="right")
        for place in np.unique(places):
            chosen = places == place
            first = self._ends[place - 1] if place else 0
            # Opened for each reading: so the memory does not grow with the chunks.
            stored = np.load(self._paths[place], mmap_mode="r")
            found[chosen] = stored[indices[chosen] - first]
        return found
