"""Packs a folder in diffusers format into a .tar: the same folder gives the same bytes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

#: Marks the folder; one without it is a checkpoint all the same.
_INDEX = "model_index.json"
_LEAST_INDEX = b'{"_class_name": "StableDiffusionPipeline"}'

#: What the worker reads: no safety checker, no pickles, no pictures.
_PARTS = (
    *("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"),
)
_SUFFIXES = frozenset({".json", ".txt", ".safetensors"})


def files_of(folder: Path) -> list[Path]:
    """The files to pack, in order."""
    parts = [each for part in _PARTS for each in (folder / part).glob("*")]
    files = [folder / _INDEX, *(each for each in parts if each.suffix in _SUFFIXES)]
    return sorted(each for each in files if each.is_file())


def pack(folder: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Writes the .tar; *on_progress* gets the bytes packed so far."""
    packed = 0
    # Without times and owners, which would make each .tar another.
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        files = files_of(folder)
        if folder / _INDEX not in files:
            entry = tarfile.TarInfo(_INDEX)
            entry.size = len(_LEAST_INDEX)
            tar.addfile(entry, io.BytesIO(_LEAST_INDEX))
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(entry, _Watched(file, packed, on_progress))
            packed += entry.size


class _Watched:
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, before: int, on_progress: Callable[[int], None]) -> None:
        self._file = file
        self._before = before
        self._on_progress = on_progress

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_progress(self._before + self._file.tell())
        return data
