"""A folder of compiled kernels as one file, NAME.tar.xz, with its key inside.

Loading kernels runs the code in them: whoever can write such a file where workers find it can run
programs there.
"""

from __future__ import annotations

import io
import itertools
import json
import lzma
import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from imagefleet import errors
from imagefleet.files.kinds import KERNELS
from worker.files.disk_cache import DiskCache, appearing

(SUFFIX,) = KERNELS.suffixes

#: The first entry: the key.
HEADER = "kernels.json"

#: A UNet's kernels have some 100 MB; far more would be meant to fill the disk.
MAX_BYTES = 8 * 2**30

#: Stands for the folder in Triton's lists of files, which have absolute paths.
_FOLDER = b"[KERNELS]"

#: Of the empty files that say what is compiled: unpacked last, since by then it is there.
DONE_SUFFIX = ".compiled"

#: Of the lists of files that archives in the storage have.
NOTE_SUFFIX = ".names"

#: What torch and the workers keep beside the kernels.
_LEFT_OUT = frozenset(
    {"locks", "lock", ".lock", ".part", ".ready", ".pyc", NOTE_SUFFIX}
)

_NOT_IN_NAMES = re.compile(r"[^a-z0-9.]+")


class UnusableArchiveError(errors.SetupError):
    """An archive of kernels is damaged, or for another key."""


@dataclass(frozen=True, slots=True)
class Key:
    """All that kernels depend on, as text; those with another key are never loaded.

    Sizes, slots and precision are none of it: kernels for several are kept together, and torch
    finds those it needs.
    """

    gpu: str
    capability: str
    driver: str
    cuda: str
    torch: str
    triton: str
    diffusers: str
    python: str
    engine: str
    """A hash of the engine's source."""
    unet: str
    """A hash of the shapes of the UNet's weights, the same for all fine-tunes of a model."""

    @property
    def name(self) -> str:
        """The key as a file name without its suffix."""
        gpu = _NOT_IN_NAMES.sub("-", self.gpu.removeprefix("NVIDIA ").lower()).strip(
            "-"
        )
        names = {"capability": "sm", "python": "py"}
        values = {**asdict(self), "capability": self.capability.replace(".", "")}
        rest = [f"{names.get(name, name)}{value}" for name, value in values.items()]
        return "-".join((gpu, *rest[1:]))

    def differences(self, other: Key) -> list[str]:
        """The values in which *other* is another key, as in 'torch 2.11.0'."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]}" for name in mine if mine[name] != theirs[name]]


def names(folder: Path) -> list[str]:
    """The files to pack, by their paths in the folder."""
    return [path.relative_to(folder).as_posix() for path in _files(folder)]


def pack(
    folder: Path,
    key: Key,
    target: Path,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    *,
    names: Collection[str] | None = None,
) -> int:
    """Writes *target* in one step, with all files or *names* alone; returns their number.

    *on_progress* gets the bytes packed so far, and in all.
    """
    files = list(_files(folder)) if names is None else [folder / name for name in names]
    total = sum(len(_read(path, folder)) for path in files)
    packed = 0
    with appearing(target) as part:
        # Without times and owners, which would make each archive another.
        with tarfile.open(part, "w:xz", format=tarfile.GNU_FORMAT) as tar:
            _add(
                tar, HEADER, json.dumps(asdict(key), indent=2, sort_keys=True).encode()
            )
            for path in files:
                content = _read(path, folder)
                _add(tar, path.relative_to(folder).as_posix(), content)
                packed += len(content)
                on_progress(packed, total)
        part.chmod(0o644)
    return len(files)


def check(path: Path) -> tuple[Key, int]:
    """The key of an archive, and the bytes of its files, all of which are read.

    Raises UnusableArchiveError if it is none, or any of it is damaged.
    """
    entries = _entries(path)
    name, content = next(entries, ("", b""))
    try:
        key = Key(**json.loads(content)) if name == HEADER else None
    except (ValueError, TypeError, RecursionError):
        key = None
    if key is None:
        raise UnusableArchiveError(
            f"{path} has no key of kernels that this version reads"
        )
    return key, sum(len(content) for _, content in entries)


def unpack(
    path: Path, folder: Path, key: Key, on_file: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Unpacks into *folder*, each file in one step; those that are there already stay.

    Returns the names of all; *on_file* gets each before it is there. Raises:
        UnusableArchiveError: it is damaged or for another key, and nothing was unpacked; NodeError,
        SetupError: the disk is full, or the folder not writable.
    """
    found, size = check(path)
    if others := key.differences(found):
        raise UnusableArchiveError(f"{path} is for {', '.join(others)}")
    cache = DiskCache(folder)
    with cache.errors():
        folder.mkdir(parents=True, exist_ok=True)
        cache.check_room(size)
        found_names = []
        for name, content in itertools.islice(_entries(path), 1, None):
            on_file(name)
            _write(folder / name, content, folder)
            found_names.append(name)
    return found_names


def _entries(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents, the header first; raises UnusableArchiveError, perhaps at the end."""
    size = 0
    try:
        with lzma.open(path) as data, tarfile.open(fileobj=data, mode="r|") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                is_inside = not name.is_absolute() and ".." not in name.parts
                file = tar.extractfile(entry) if entry.isfile() and is_inside else None
                if file is None:
                    raise UnusableArchiveError(
                        f"{path} has an entry not its own: {entry.name[:80]!r}"
                    )
                size += entry.size
                if size > MAX_BYTES:
                    raise UnusableArchiveError(
                        f"{path} is too large: over {MAX_BYTES:,} bytes"
                    )
                yield entry.name, file.read()
            while data.read(io.DEFAULT_BUFFER_SIZE):  # to the checksum
                pass
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise UnusableArchiveError(
            f"{path} is damaged, or no archive: {error}"
        ) from None


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(
        folder.rglob("*"), key=lambda each: (each.suffix == DONE_SUFFIX, each)
    ):
        parts = {*path.suffixes, *path.relative_to(folder).parts}
        if parts.isdisjoint(_LEFT_OUT) and path.is_file() and not path.is_symlink():
            yield path


def _read(path: Path, folder: Path) -> bytes:
    content = path.read_bytes()
    return (
        content.replace(os.fsencode(folder), _FOLDER) if _has_paths(path) else content
    )


def _write(path: Path, content: bytes, folder: Path) -> None:
    if path.exists():
        return
    with appearing(path) as part:
        own = (
            content.replace(_FOLDER, os.fsencode(folder))
            if _has_paths(path)
            else content
        )
        part.write_bytes(own)


def _has_paths(path: Path) -> bool:
    return path.name.startswith("__grp__")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))
