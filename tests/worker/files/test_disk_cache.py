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

Age = Callable[[str, float], None]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "not" / "there" / "yet"


@pytest.fixture
def age(folder: Path) -> Age:
    """Sets a file's last use to so many seconds ago."""

    def make(name: str, seconds: float) -> None:
        path = folder / f"{name}.safetensors"
        used_at = time.time() - seconds
        os.utime(path, (used_at, path.stat().st_mtime))

    return make


def names(folder: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in folder.iterdir()}


def test_what_is_stored_is_found_and_what_is_not_is_not(folder: Path):
    loras = disk_cache.DiskCache(folder, 1000)
    assert loras.find("a") is None
    path = loras.store("a", b"bytes")
    assert loras.find("a") == path == folder / "a.safetensors"
    assert path.read_bytes() == b"bytes"
    assert names(folder) == {"a"}
    loras.drop(path)
    loras.drop(path)
    assert loras.find("a") is None


def test_the_least_recently_used_are_evicted(folder: Path, age: Age):
    loras = disk_cache.DiskCache(folder, 250)
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


def test_a_file_in_use_stays_above_the_limit(folder: Path, age: Age):
    loras = disk_cache.DiskCache(folder, 150)
    loras.store("a", b"x" * 100)
    loras.store("b", b"x" * 100)
    assert names(folder) == {"a", "b"}
    age("a", disk_cache.IN_USE_SECONDS + 1)
    age("b", disk_cache.IN_USE_SECONDS + 1)
    loras.find("b")
    loras.store("c", b"x" * 10)
    assert names(folder) == {"b", "c"}


def test_a_full_disk_evicts_files_below_the_limit(folder: Path, age: Age, monkeypatch):
    loras = disk_cache.DiskCache(folder, 10**9)
    for days, name in ((3, "a"), (2, "b"), (1, "c")):
        loras.store(name, b"x" * 100)
        age(name, days * DAY)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=50))
    loras.store("d", b"x" * 200)
    assert names(folder) == {"c", "d"}


def test_finding_a_file_keeps_its_modification_time(folder: Path):
    """The cache in memory compares it."""
    loras = disk_cache.DiskCache(folder, 1000)
    path = loras.store("a", b"bytes")
    os.utime(path, ns=(1, 2))
    loras.find("a")
    assert path.stat().st_mtime_ns == 2
    assert path.stat().st_atime_ns > 2, "the newest use is not noted"


def test_partial_files_of_killed_workers_are_removed_and_current_ones_stay(
    folder: Path,
):
    loras = disk_cache.DiskCache(folder, 1000)
    loras.store("a", b"bytes")
    old = folder / ".old.part"
    new = folder / ".new.part"
    for path, seconds in ((old, DAY), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - seconds,) * 2)
    (folder / "notes.txt").write_text("not ours")
    loras.store("b", b"bytes")
    assert names(folder) == {"a", "b", ".new.part", "notes.txt"}


def test_a_failed_write_leaves_nothing_and_is_the_machines_fault(
    folder: Path, monkeypatch
):
    loras = disk_cache.DiskCache(folder, 1000)
    loras.store("a", b"first")

    def refuse(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(errors.NodeError, match=r"the disk of the cache .* is full"):
        loras.store("a", b"second")
    assert names(folder) == {"a"}
    assert (folder / "a.safetensors").read_bytes() == b"first"


def test_what_is_in_the_way_of_the_cache_is_for_the_operator(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        loras = disk_cache.DiskCache(folder, 1000)
        assert loras.find("a") is None
        with pytest.raises(errors.SetupError, match="file in the place of a folder"):
            loras.store("a", b"bytes")
    (tmp_path / "a.safetensors").mkdir()
    loras = disk_cache.DiskCache(tmp_path, 1000)
    for use in (
        lambda: loras.store("a", b"bytes"),
        lambda: loras.drop(tmp_path / "a.safetensors"),
    ):
        with pytest.raises(
            errors.SetupError, match=r"a\.safetensors is a file in the place"
        ):
            use()


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_a_clock_that_is_set_does_not_keep_old_files_for_ever(
    folder: Path, age: Age, jump: float
):
    """What was used before the clock was set back was used in the future."""
    loras = disk_cache.DiskCache(folder, 250)
    for name in ("a", "b"):
        loras.store(name, b"x" * 100)
        age(name, jump)
    loras.store("c", b"x" * 100)
    assert len(names(folder)) == 2
    assert "c" in names(folder)


def test_a_folder_deleted_while_a_worker_runs_is_made_again(folder: Path):
    loras = disk_cache.DiskCache(folder, 1000)
    loras.store("a", b"bytes")
    shutil.rmtree(folder)
    assert loras.find("a") is None
    assert loras.store("a", b"bytes").read_bytes() == b"bytes"


def test_workers_that_share_a_folder_see_only_complete_files(folder: Path):
    workers = [disk_cache.DiskCache(folder, 150) for _ in range(4)]
    contents = {bytes([letter]) * 100_000 for letter in b"abcd"}
    workers[0].store("a", next(iter(contents)))
    seen: set[bytes] = set()

    def work(worker: disk_cache.DiskCache, content: bytes) -> None:
        for _ in range(20):
            worker.store("a", content)
            path = worker.find("a")
            assert path is not None
            seen.add(path.read_bytes())

    threads = [
        threading.Thread(target=work, args=pair)
        for pair in zip(workers, contents, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen <= contents
    assert names(folder) == {"a"}
