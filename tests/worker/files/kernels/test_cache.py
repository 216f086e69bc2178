"""Where a worker finds its kernels; whatever keeps it from them is a log line, and it compiles."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import polling
from imagefleet import concurrency, errors
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.open import Storage
from kernel_files import CUBIN, GRAPH, KEY, OTHER, compile_into
from worker.files import manifest
from worker.files.kernels import archive, cache
from worker.files.kernels.cache import KernelCache
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings

IMPATIENT = concurrency.RetryPolicy(
    tries=2, first_wait_seconds=0.001, longest_wait_seconds=0.001
)
NAME = f"{KEY.name}{archive.SUFFIX}"


@pytest.fixture
def packed(tmp_path) -> Path:
    """In a folder as the image has it."""
    target = tmp_path / "image" / NAME
    archive.pack(compile_into(tmp_path / "there"), KEY, target)
    return target


@pytest.fixture
def kernels(tmp_path) -> KernelCache:
    return KernelCache(tmp_path / "here", KEY)


async def put(storage: Storage, packed: Path, listed: bytes | None = None) -> None:
    """Stores an archive, and a list with its hash or that of *listed*."""
    data = await asyncio.to_thread(packed.read_bytes)
    content = manifest.encode(
        "kernels", {NAME: hashlib.sha256(listed or data).hexdigest()}, None
    )
    await storage.files.create(f"kernels/{NAME}", data, "application/x", {})
    await storage.files.create("kernels/manifest.json", content, "application/json", {})


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def fetch(
    kernels: KernelCache,
    storage: Storage,
    image: Path | None = None,
    trusted: TrustedKeys | None = None,
) -> cache.Origin | None:
    await kernels.fetch(storage.files, image, trusted, IMPATIENT)
    with kernels.compiling("the UNet"):  # and the worker compiles in any case
        pass
    return kernels.origin


async def test_kernels_in_the_storage_are_fetched_once_and_then_on_the_disk(
    storage: Storage, packed: Path, kernels: KernelCache
):
    await put(storage, packed)
    assert await fetch(kernels, storage) == "store"
    assert (kernels.folder / GRAPH).read_bytes() == b"a graph"
    assert not list(kernels.folder.glob("*.part*")), "the archive is still there"

    reads = storage.operations.blob_reads
    assert await fetch(KernelCache(kernels.folder, KEY), storage) == "disk"
    assert storage.operations.blob_reads <= reads + 4, "but what other workers share"


async def test_kernels_in_the_image_come_before_those_in_the_storage(
    storage: Storage, packed: Path, kernels: KernelCache
):
    await put(storage, packed)
    assert await fetch(kernels, storage, packed.parent) == "image"
    assert (kernels.folder / CUBIN).exists()


async def test_a_truncated_file_in_the_image_is_named_and_the_storage_asked(
    storage: Storage,
    packed: Path,
    kernels: KernelCache,
    caplog,
):
    await put(storage, packed)
    cut_off(packed)
    assert await fetch(kernels, storage, packed.parent) == "store"
    assert f"left out: {packed} is damaged" in caplog.text


async def test_a_file_that_was_changed_in_the_storage_is_not_unpacked(
    storage: Storage,
    packed: Path,
    kernels: KernelCache,
    caplog,
):
    await put(storage, packed, listed=b"what was pushed")
    assert await fetch(kernels, storage) is None
    assert "as in kernels/manifest.json: one of the two is wrong" in caplog.text
    assert not (kernels.folder / GRAPH).exists()
    assert not list(kernels.folder.glob("*.part*"))


async def test_a_file_that_no_list_names_is_not_even_downloaded(
    storage: Storage, packed: Path, kernels: KernelCache
):
    await put(storage, packed)
    part = await storage.files.read_part("kernels/manifest.json", 0, 10_000)
    assert part is not None
    empty = manifest.encode("kernels", {}, None)
    await storage.files.replace(
        "kernels/manifest.json", empty, "application/json", part.version
    )
    assert await fetch(kernels, storage) is None
    assert not (kernels.folder / GRAPH).exists()


async def test_with_a_trusted_key_only_kernels_of_a_signed_list_are_loaded(
    storage: Storage, packed: Path, tmp_path, caplog
):
    key = SigningKey.create(tmp_path / "key.pem")
    trusted = TrustedKeys.read(key.public)
    await put(storage, packed)
    assert (
        await fetch(KernelCache(tmp_path / "plain", KEY), storage, trusted=trusted)
        is None
    )
    assert "must be signed with the trusted key, but it is plain" in caplog.text
    assert not (tmp_path / "plain" / GRAPH).exists()

    part = await storage.files.read_part("kernels/manifest.json", 0, 10_000)
    assert part is not None
    signed = manifest.encode("kernels", {NAME: sha256_of(packed)}, key)
    await storage.files.replace(
        "kernels/manifest.json", signed, "application/json", part.version
    )
    assert (
        await fetch(KernelCache(tmp_path / "signed", KEY), storage, trusted=trusted)
        == "store"
    )


async def test_an_unreachable_storage_leaves_the_worker_to_compile(
    storage: Storage,
    kernels: KernelCache,
    monkeypatch,
    caplog,
):
    async def read(*_: object) -> bytes:
        raise errors.TransientError("the storage does not answer")

    monkeypatch.setattr(storage.files, "read", read)
    await kernels.fetch(storage.files, retry_policy=IMPATIENT)
    assert "stored kernels cannot be used: the storage does not answer" in caplog.text
    with kernels.compiling("the UNet"):
        compile_into(kernels.folder)
    assert kernels.origin == "compiled"


async def test_a_worker_killed_while_unpacking_leaves_it_to_the_next(
    storage: Storage, packed: Path, kernels: KernelCache
):
    await put(storage, packed)
    (kernels.folder / GRAPH).parent.mkdir(parents=True)
    (kernels.folder / GRAPH).write_bytes(b"a graph")  # unpacked before the kill
    (kernels.folder / f"{NAME}.part").write_bytes(b"half")
    assert await fetch(kernels, storage) == "store"
    assert (kernels.folder / CUBIN).exists()


async def test_compiling_waits_for_the_download_but_not_for_ever(
    storage: Storage,
    packed: Path,
    kernels: KernelCache,
    monkeypatch,
    caplog,
):
    await put(storage, packed)
    found: list[bool] = []

    def compiles() -> None:
        with kernels.compiling("the UNet"):
            found.append((kernels.folder / GRAPH).exists())

    waits, wait = threading.Event(), kernels._is_settled.wait

    def noting(seconds: float) -> bool:
        waits.set()
        return wait(seconds)

    monkeypatch.setattr(kernels._is_settled, "wait", noting)
    early = threading.Thread(target=compiles)
    early.start()
    await polling.until(waits.is_set)
    assert not found
    await kernels.fetch(storage.files, retry_policy=IMPATIENT)
    await asyncio.to_thread(early.join, 10)
    assert found == [True]

    caplog.set_level("INFO")
    monkeypatch.setattr(cache, "LONGEST_WAIT_SECONDS", 0.05)
    late = KernelCache(kernels.folder, OTHER)
    for _ in range(2):
        with late.compiling("the VAE"):
            pass
    assert caplog.text.count("compiling the VAE: stored kernels have not arrived") == 1


async def test_kernels_that_did_not_fit_count_as_compiled(
    storage: Storage, packed: Path, tmp_path, caplog
):
    caplog.set_level("INFO")
    await put(storage, packed)
    metrics = WorkerMetrics()
    kernels = KernelCache(tmp_path / "here", KEY, metrics.set_kernels)

    def value(origin: str) -> float | None:
        return metrics.registry.get_sample_value(
            "imagefleet_kernels", {"origin": origin}
        )

    await kernels.fetch(storage.files, retry_policy=IMPATIENT)
    assert (value("store"), value("compiled")) == (1, 0)
    assert "kernels=store for h200-sm90-driver580" in caplog.text
    with kernels.compiling("the UNet for 6 slots"):
        another = kernels.folder / "fxgraph/cd/fcde/entry"
        another.parent.mkdir(parents=True)
        another.write_bytes(b"a graph for other slots")
    assert (value("store"), value("compiled")) == (0, 1)
    assert "kernels=compiled for h200-sm90-driver580" in caplog.text


@pytest.fixture
def no_folders(monkeypatch) -> None:
    """Without torch's and Triton's variables, which are as before after the test."""
    for name in (cache.TORCH_FOLDER, cache.TRITON_FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_folders")
def test_each_key_has_a_folder_of_its_own_unless_the_operator_chose_one(
    tmp_path, monkeypatch
):
    folder = cache.use_folder(tmp_path, KEY)
    assert folder == tmp_path / "kernels" / KEY.name
    assert os.environ[cache.TORCH_FOLDER] == str(folder)
    assert os.environ[cache.TRITON_FOLDER] == str(folder / "triton")
    assert cache.use_folder(tmp_path, OTHER) == folder, "torch has begun to use it"

    monkeypatch.setenv(cache.TORCH_FOLDER, str(tmp_path / "mine"))
    assert cache.use_folder(tmp_path, KEY) == tmp_path / "mine"


@pytest.mark.usefixtures("no_folders")
async def test_a_cache_that_cannot_be_written_leaves_torch_its_own_folder(
    worker_settings: Callable[..., WorkerSettings],
    storage: Storage,
    tmp_path,
    monkeypatch,
    caplog,
):
    monkeypatch.setattr(cache, "find_key", lambda *_: KEY)
    (tmp_path / "cache").touch()
    async with cache.fetching(worker_settings(), storage.files) as found:
        assert found is None
    assert "not kept in --cache" in caplog.text
    assert cache.TORCH_FOLDER not in os.environ


async def test_a_worker_that_compiles_nothing_looks_for_nothing(
    worker_settings: Callable[..., WorkerSettings], storage: Storage
):
    for changes in ({"compile": "off"}, {"device": "cpu"}):
        reads = storage.operations.blob_reads
        async with cache.fetching(worker_settings(**changes), storage.files) as found:
            assert found is None
        assert storage.operations.blob_reads == reads
