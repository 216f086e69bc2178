"""The cache of LoRA files: concurrent reads, size and eviction."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polling
from imagefleet import errors
from worker.engine import contract
from worker.engine.lora import file as lora_file


def named(path: Path) -> contract.Lora:
    return contract.Lora("some-style", path, 1.0, 1.0)


def slowed(calls: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Records the reads of files, the first of which lasts until there were so many calls."""
    reads = []
    called = []
    read = lora_file.read_lora
    identify = lora_file.identify

    def slow_read(*arguments: Any) -> lora_file.LoraFile:
        reads.append(arguments)
        polling.until_in_thread(lambda: len(called) >= calls)
        return read(*arguments)

    monkeypatch.setattr(
        lora_file, "identify", lambda path: called.append(path) or identify(path)
    )

    monkeypatch.setattr(lora_file, "read_lora", slow_read)
    return reads


def in_threads(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_concurrent_reads_of_one_file_read_it_once(
    cache: lora_file.LoraCache, lora_paths: list[Path], monkeypatch
):
    reads = slowed(6, monkeypatch)
    got = []
    in_threads(6, lambda: got.append(cache.get(named(lora_paths[0]))))
    assert len(reads) == 1
    assert len(got) == 6
    assert len({id(file) for file in got}) == 1
    assert cache.lookups == {"miss": 1, "hit": 5}


def test_concurrent_reads_of_a_bad_file_all_fail_and_the_next_read_retries(
    cache: lora_file.LoraCache,
    lora_paths: list[Path],
    tmp_path,
    monkeypatch,
):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"bad")
    slowed(6, monkeypatch)
    refusals = []

    def get() -> None:
        with pytest.raises(errors.UnusableFileError) as refusal:
            cache.get(named(path))
        refusals.append(refusal.value.message)

    in_threads(6, get)
    assert len(refusals) == 6
    times = path.stat()
    path.write_bytes(lora_paths[0].read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.get(named(path)).size_bytes


def test_different_files_are_read_concurrently(
    cache: lora_file.LoraCache, lora_paths: list[Path], monkeypatch
):
    meeting = threading.Barrier(2)
    read = lora_file.read_lora

    def read_together(*arguments: Any) -> lora_file.LoraFile:
        meeting.wait()
        return read(*arguments)

    monkeypatch.setattr(lora_file, "read_lora", read_together)
    paths = iter(lora_paths[:2])
    in_threads(2, lambda: cache.get(named(next(paths))))
    assert cache.lookups == {"miss": 2}


def test_a_file_larger_than_the_cache_is_not_kept(
    layers: lora_file.Layers, lora_paths: list[Path]
):
    cache = lora_file.LoraCache(layers, cache_bytes=1)
    first = cache.get(named(lora_paths[0]))
    assert cache.get(named(lora_paths[0])) is not first
    assert cache.lookups == {"miss": 2}


def test_a_replaced_file_is_read_again(
    cache: lora_file.LoraCache, lora_paths: list[Path], tmp_path
):
    path = tmp_path / "x.safetensors"
    path.write_bytes(lora_paths[0].read_bytes())
    first = cache.get(named(path))
    path.write_bytes(lora_paths[1].read_bytes())
    os.utime(path, ns=(0, 1))
    second = cache.get(named(path))
    assert first.identity != second.identity
    layer = next(iter(first.deltas["unet"]))
    ups = [file.deltas["unet"][layer].tensors["up"] for file in (first, second)]
    assert not torch.equal(*ups)
