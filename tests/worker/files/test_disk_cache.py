from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagefleet import errors
from worker.files import disk_cache

DAY = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there" / "yet"


@pytest.fixture
def age(folder: Path) -> Callable[[str, float], None]:
    """Makes a file look as if it was last used so many seconds ago."""

    def make(name: str, seconds: float) -> None:
        path = folder / f"{name}.safetensors"
        used_at = time.time() - seconds
        os.utime(path, (used_at, path.stat().st_mtime))

    return make


def names(folder: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in folder.iterdir()}


def test_what_is_stored_is_found_and_what_is_not_is_not(folder: Path) -> None:
    loras = disk_cache.LoraFolder(folder, 1000)
    assert loras.find("a") is None
    path = loras.store("a", b"bytes")
    assert loras.find("a") == path == folder / "a.safetensors"
    assert path.read_bytes() == b"bytes"
    assert names(folder) == {"a"}
    loras.drop(path)
    loras.drop(path)
    assert loras.find("a") is None


def test_the_least_recently_used_make_room(folder: Path, age: Callable[[str, float], None]) -> None:
    loras = disk_cache.LoraFolder(folder, 250)
    for days, name in ((3, "a"), (2, "b")):
        loras.store(name, b"x" * 100)
        age(name, days * DAY)
    loras.find("a")
    age("a", 1 * DAY)
    loras.store("c", b"x" * 100)
    assert names(folder) == {"a", "c"}
    age("c", 1 * DAY)
    loras.store("d", b"x" * 250)
    assert names(folder) == {"d"}


def test_a_file_that_some_job_is_about_to_read_stays_over_the_limit(
    folder: Path, age: Callable[[str, float], None]
) -> None:
    loras = disk_cache.LoraFolder(folder, 150)
    loras.store("a", b"x" * 100)
    loras.store("b", b"x" * 100)
    assert names(folder) == {"a", "b"}
    age("a", disk_cache.IN_USE_SECONDS + 1)
    age("b", disk_cache.IN_USE_SECONDS + 1)
    loras.find("b")
    loras.store("c", b"x" * 10)
    assert names(folder) == {"b", "c"}


def test_a_full_disk_makes_room_below_the_limit(
    folder: Path, age: Callable[[str, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loras = disk_cache.LoraFolder(folder, 10**9)
    for days, name in ((3, "a"), (2, "b"), (1, "c")):
        loras.store(name, b"x" * 100)
        age(name, days * DAY)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=50))
    loras.store("d", b"x" * 200)
    assert names(folder) == {"c", "d"}


def test_a_use_does_not_make_another_file_of_it(folder: Path) -> None:
    """The memory's cache goes by the time of modification."""
    loras = disk_cache.LoraFolder(folder, 1000)
    path = loras.store("a", b"bytes")
    os.utime(path, ns=(1, 2))
    loras.find("a")
    assert path.stat().st_mtime_ns == 2
    assert time.time() - path.stat().st_atime < 10


def test_what_a_killed_worker_left_half_written_goes_and_what_is_being_written_stays(
    folder: Path,
) -> None:
    loras = disk_cache.LoraFolder(folder, 1000)
    loras.store("a", b"bytes")
    old, new = folder / ".old.part", folder / ".new.part"
    for path, seconds in ((old, DAY), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - seconds,) * 2)
    (folder / "notes.txt").write_text("not ours")
    loras.store("b", b"bytes")
    assert names(folder) == {"a", "b", ".new.part", "notes.txt"}


def test_a_write_that_fails_leaves_nothing_and_is_the_machines_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loras = disk_cache.LoraFolder(folder, 1000)
    loras.store("a", b"first")

    def refuse(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(errors.NodeError, match=r"cannot be written: No space left on device"):
        loras.store("a", b"second")
    assert names(folder) == {"a"}
    assert (folder / "a.safetensors").read_bytes() == b"first"


def test_a_folder_that_cannot_be_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.NodeError, match="file"):
        disk_cache.LoraFolder(tmp_path / "file" / "cache", 1000).store("a", b"bytes")


def test_workers_that_share_a_folder_see_whole_files_only(folder: Path) -> None:
    workers = [disk_cache.LoraFolder(folder, 150) for _ in range(4)]
    contents = {bytes([letter]) * 100_000 for letter in b"abcd"}
    workers[0].store("a", next(iter(contents)))
    seen: set[bytes] = set()

    def work(worker: disk_cache.LoraFolder, content: bytes) -> None:
        for _ in range(20):
            worker.store("a", content)
            path = worker.find("a")
            assert path is not None
            seen.add(path.read_bytes())

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(workers, contents, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen <= contents
    assert names(folder) == {"a"}
