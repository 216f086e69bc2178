"""Kernels that workers share: who gets which, and what is refused."""

import asyncio
import contextlib
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

import polling
from fleet.keys import mint
from imagefleet import concurrency, errors
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from kernel_files import GRAPH, KEY, OTHER, compile_graph
from worker.files.kernels import archive, cache, shared
from worker.files.kernels.cache import KernelCache
from worker.files.kernels.shared import SharedKernels
from worker.settings import WorkerSettings

IMPATIENT = concurrency.RetryPolicy(
    tries=2, first_wait_seconds=0.001, longest_wait_seconds=0.001
)
UNET = "the UNet for 4 slots"


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(cache, "SETTLE_SECONDS", 0.0)


def sharing(
    storage: Storage, folder: Path, trusted: TrustedKeys | None = None
) -> SharedKernels:
    return SharedKernels(storage.files, folder, KEY, trusted, IMPATIENT)


@contextlib.asynccontextmanager
async def working(
    storage: Storage,
    folder: Path,
    *,
    trusted: TrustedKeys | None = None,
    signing: SigningKey | None = None,
    shares: bool = True,
) -> AsyncIterator[KernelCache]:
    """The kernels of a worker that runs."""
    kernels = KernelCache(folder, KEY)
    task = asyncio.create_task(
        kernels.exchange(storage.files, None, trusted, signing, shares=shares)
    )
    try:
        yield kernels
    finally:
        kernels.give_up()
        task.cancel()
        await asyncio.wait([task])


async def compile_here(kernels: KernelCache, what: str, graph: str) -> bool:
    """Compiles as the engine's thread does; returns whether anything had to be."""

    def run() -> bool:
        with kernels.compiling(what):
            is_there = any(kernels.folder.glob(f"fxgraph/*/{graph}/*"))
            if not is_there:
                compile_graph(kernels.folder, graph)
            return not is_there

    return await asyncio.to_thread(run)


async def numbers(storage: Storage) -> list[int]:
    prefix = f"kernels/{KEY.name}/"
    found = [name async for name in storage.files.names(prefix)]
    return sorted(int(name.removeprefix(prefix).partition(".")[0]) for name in found)


async def names_in(storage: Storage, number: int, folder: Path) -> set[str]:
    data = await storage.files.read(f"kernels/{KEY.name}/{number}.tar.xz")
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as tar:
        return set(tar.getnames()) - {archive.HEADER}


async def put(
    storage: Storage,
    number: int,
    data: bytes,
    signing: SigningKey | None = None,
    **changes: str,
) -> None:
    """Stores an archive by hand, signed as a worker does but for *changes* of its metadata."""
    sha256 = hashlib.sha256(data).hexdigest()
    metadata = {"sha256": sha256}
    if signing is not None:
        fields = {"name": f"{KEY.name}/{number}.tar.xz", "sha256": sha256}
        metadata["signature"] = signing.sign("kernels", fields)
    name = f"kernels/{KEY.name}/{number}.tar.xz"
    assert await storage.files.create(
        name, data, "application/x", {**metadata, **changes}
    )


def packed(folder: Path, graph: str, key: archive.Key = KEY) -> bytes:
    compile_graph(folder / graph, graph)
    archive.pack(folder / graph, key, folder / f"{graph}.xz")
    return (folder / f"{graph}.xz").read_bytes()


async def test_what_one_worker_compiles_no_other_does(storage: Storage, tmp_path):
    async with working(storage, tmp_path / "a") as first:
        assert await compile_here(first, UNET, "fabc")
        await polling.until(lambda: numbers(storage))
        assert first.origin == "compiled"
    async with working(storage, tmp_path / "b") as second:
        assert not await compile_here(second, UNET, "fabc")
        assert (second.origin, second.is_compiled(UNET)) == ("store", True)
    assert await numbers(storage) == [1]


async def test_what_is_compiled_later_is_stored_by_itself_and_found_before_it_is_compiled(
    storage: Storage, tmp_path
):
    async with (
        working(storage, tmp_path / "a") as first,
        working(storage, tmp_path / "b") as other,
    ):
        await compile_here(first, UNET, "fabc")
        await polling.until(lambda: numbers(storage))
        assert not await compile_here(other, UNET, "fabc"), (
            "it had looked before that was there"
        )
        await compile_here(other, "the UNet for a larger size", "fbcd")
        await polling.until(lambda: numbers(storage), lambda found: found == [1, 2])
        assert not await compile_here(first, "the UNet for a larger size", "fbcd")
    of_second = await names_in(storage, 2, tmp_path)
    assert {name for name in of_second if "fxgraph" in name} == {
        "fxgraph/bc/fbcd/entry"
    }


async def test_of_two_that_compile_the_same_at_once_one_adds_nothing(
    storage: Storage, tmp_path
):
    for name in "ab":
        compile_graph(tmp_path / name, "fabc", entry=f"named on {name}")
    compile_graph(tmp_path / "b", "fbcd")
    await asyncio.gather(
        *(sharing(storage, tmp_path / each).share(None) for each in "aac")
    )
    assert await numbers(storage) == [1]
    await asyncio.gather(
        *(sharing(storage, tmp_path / each).share(None) for each in "bb")
    )
    assert await numbers(storage) == [1, 2]
    assert await sharing(storage, tmp_path / "new").fetch()
    assert {path.parent.name for path in (tmp_path / "new").glob("fxgraph/*/*/*")} == {
        "fabc",
        "fbcd",
    }


async def test_an_upload_that_broke_off_is_seen_by_nobody_and_done_by_the_next(
    storage: Storage, tmp_path, monkeypatch
):
    compile_graph(tmp_path / "a", "fabc")
    create = type(storage.files).create

    async def breaks_off(*_: object) -> bool:
        raise errors.TransientError("the line is down")

    monkeypatch.setattr(type(storage.files), "create", breaks_off)
    with pytest.raises(errors.TransientError):
        await sharing(storage, tmp_path / "a").share(None)
    assert not list((tmp_path / "a").glob("*.part*"))
    (tmp_path / "a" / "killed.part").write_bytes(b"half an archive")
    monkeypatch.setattr(type(storage.files), "create", create)
    await sharing(storage, tmp_path / "a").share(None)
    assert await names_in(storage, 1, tmp_path) == {"fxgraph/ab/fabc/entry"}


async def test_with_a_trusted_key_only_what_it_signed_is_loaded(
    storage: Storage, tmp_path, caplog
):
    key, stranger = (
        SigningKey.create(tmp_path / f"{name}.pem") for name in ("own", "strangers")
    )
    trusted = TrustedKeys.read(key.public)
    other = packed(tmp_path, "fother")
    await put(storage, 1, packed(tmp_path, "fplain"))
    await put(storage, 2, packed(tmp_path, "fforged"), stranger)
    await put(
        storage, 3, other, key, sha256=hashlib.sha256(b"what was signed").hexdigest()
    )
    # Signed for another number: a signature is for one name.
    sha256 = hashlib.sha256(other).hexdigest()
    signed = key.sign("kernels", {"name": f"{KEY.name}/9.tar.xz", "sha256": sha256})
    await put(storage, 4, other, signature=signed)
    async with working(storage, tmp_path / "a", trusted=trusted, signing=key) as first:
        await compile_here(first, UNET, "fabc")
        await polling.until(lambda: numbers(storage), lambda found: found[-1] == 5)
    assert caplog.text.count("is not signed with the trusted key") == 4
    async with working(
        storage, tmp_path / "b", trusted=trusted, shares=False
    ) as second:
        assert not await compile_here(second, UNET, "fabc")
    graphs = {path.parent.name for path in (tmp_path / "b").glob("fxgraph/*/*/*")}
    assert graphs == {"fabc"}


async def test_what_is_damaged_hostile_or_for_another_torch_is_left_out_and_the_rest_taken(
    storage: Storage,
    tmp_path,
    monkeypatch,
    caplog,
):
    good = packed(tmp_path, "fgood")
    with tarfile.open(tmp_path / "hostile", "w:xz") as tar:
        archive._add(tar, archive.HEADER, json.dumps(asdict(KEY)).encode())
        archive._add(tar, "../../outside", b"a program")
    hostile = await asyncio.to_thread((tmp_path / "hostile").read_bytes)
    await put(storage, 1, good[:-20])
    await put(storage, 2, good, sha256=hashlib.sha256(b"another").hexdigest())
    await put(storage, 3, good, sha256="../../outside")
    await put(storage, 4, packed(tmp_path, "ftorch", OTHER))
    await put(storage, 5, hostile)
    await put(storage, 6, bytes(20_000))
    await put(storage, 7, good)
    monkeypatch.setattr(archive, "MAX_BYTES", 15_000)
    async with working(storage, tmp_path / "in" / "here") as kernels:
        assert not await compile_here(kernels, UNET, "fgood")
    for reason in (
        "is damaged, or no archive",
        "as in its metadata: one of the two is wrong",
        "states no SHA-256",
        "is for driver 595, torch 2.13.0",
        "an entry not its own",
        "has 20,000 bytes",
    ):
        assert caplog.text.count(reason) == 1, reason
    left = {
        path.name for path in await asyncio.to_thread(lambda: list(tmp_path.rglob("*")))
    }
    assert not [name for name in left if name == "outside" or ".part" in name]


async def test_a_fleets_archives_have_an_end(storage: Storage, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "MOST", 2)
    for graph in ("fabc", "fbcd"):
        compile_graph(tmp_path / "a", graph)
        await sharing(storage, tmp_path / "a").share(None)
    compile_graph(tmp_path / "a", "fcde")
    with pytest.raises(errors.SetupError, match="there are 2 archives"):
        await sharing(storage, tmp_path / "a").share(None)
    assert await numbers(storage) == [1, 2]


async def test_only_the_token_of_a_trusted_worker_shares_and_it_replaces_nothing(
    azurite_settings: StorageSettings, tmp_path, caplog
):
    caplog.set_level("INFO")
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        await put(owner, 1, packed(tmp_path, "fabc"))
        for role in ("worker", "trusted-worker"):
            tokens = mint.Minter(azurite_settings).mint(ROLES[role], timedelta(hours=1))
            own = {"storage": tokens.storage, "sas": SecretStr(tokens.sas)}
            settings = azurite_settings.model_copy(update=own)
            async with (
                open_storage(settings) as storage,
                working(storage, tmp_path / role) as kernels,
            ):
                assert not await compile_here(kernels, UNET, "fabc"), "either reads"
                await compile_here(kernels, "another size", "fbcd")
                if role == "worker":
                    await polling.until(lambda: "kernels are not shared" in caplog.text)
                    assert await numbers(owner) == [1]
                else:
                    await polling.until(
                        lambda: numbers(owner), lambda found: found == [1, 2]
                    )
                    name = f"kernels/{KEY.name}/1.tar.xz"
                    assert not await storage.files.create(
                        name, b"another", "text/plain", {}
                    )
                    assert not await storage.files.delete(name)
                    with pytest.raises(errors.SetupError):
                        await numbers(storage)


@pytest.mark.parametrize(
    "case", ["a stranger's machine", "no key that others trust", "may"]
)
async def test_who_shares(
    worker_settings: Callable[..., WorkerSettings],
    storage: Storage,
    tmp_path,
    monkeypatch,
    case: str,
):
    key = SigningKey.create(tmp_path / "key.pem")
    settings = worker_settings(
        trusted_key=key.public,
        signing_key=None
        if case == "no key that others trust"
        else tmp_path / "key.pem",
    )
    for name in (cache.TORCH_FOLDER, cache.TRITON_FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(cache, "find_key", lambda *_: KEY)
    asked: list[bool] = []
    exchange = KernelCache.exchange

    def noting(*arguments: object, shares: bool) -> object:
        asked.append(shares)
        return exchange(*arguments, shares=shares)  # type: ignore[arg-type]

    monkeypatch.setattr(KernelCache, "exchange", noting)
    may_share = case != "a stranger's machine"
    async with cache.fetching(settings, storage.files, may_share=may_share) as kernels:
        assert kernels is not None
        await compile_here(kernels, UNET, GRAPH.split("/")[2])
    assert asked == [case == "may"]
