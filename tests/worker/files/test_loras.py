"""Where a LoRA's file comes from, and what happens to a damaged one."""

import asyncio
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import polling
from benchmarks.stand_in import StandInEngine, StandInPrepared
from imagefleet import errors
from imagefleet.files.kinds import LORA
from imagefleet.job import prompt
from imagefleet.storage.open import Storage
from messages import message
from worker.engine import contract
from worker.files.library import FileLibrary, Source

LoraBytes = Callable[[str], bytes]  # the fixture of conftest.py


class Watched:
    """The reads of LoRAs in the storage, which wait for *answer*, and replaced files."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read = storage.files.read
        self.reads: list[str] = []
        self.answer = asyncio.Event()
        self.answer.set()
        self.replaced: dict[str, bytes] = {}
        monkeypatch.setattr(storage.files, "read", self.read)

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        if not name.endswith(".json"):
            self.reads.append(name)
            await self.answer.wait()
        return self.replaced.get(name) or await self._read(name, max_bytes)

    def replace(self, name: str, data: bytes) -> None:
        self.replaced[f"loras/{name}.safetensors"] = data

    def state(self, **hashes: str) -> None:
        self.replaced["loras/manifest.json"] = json.dumps(hashes).encode()


@pytest.fixture
def watched(storage: Storage, monkeypatch) -> Watched:
    return Watched(storage, monkeypatch)


Library = Callable[..., FileLibrary]


@pytest.fixture
def library(storage: Storage, tmp_path) -> Library:
    source = Source(storage.files, tmp_path / "cache", cache_bytes=10_000)
    kind = dataclasses.replace(LORA, max_bytes=1000)
    return functools.partial(FileLibrary, source, kind)


async def put(storage: Storage, name: str, data: bytes) -> None:
    blob = f"loras/{name}.safetensors"
    assert await storage.files.create(blob, data, "application/octet-stream", {})


def kept(folder: Path) -> set[str]:
    """The LoRAs in the cache, with partial files; beside them are the locks alone."""
    return {
        path.stem
        for path in (folder / "cache" / "loras").iterdir()
        if path.suffix != ".lock"
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_a_lora_is_fetched_once_for_all_jobs_that_need_it(
    storage: Storage, watched: Watched, library: Library, lora_bytes: LoraBytes
):
    await put(storage, "style", lora_bytes("style"))
    watched.answer.clear()
    loras = library()
    waiting = [asyncio.create_task(loras.resolve("style")) for _ in range(5)]
    await polling.until(lambda: watched.reads)
    watched.answer.set()
    paths = set(await asyncio.gather(*waiting))
    assert [path.read_bytes() for path in paths] == [lora_bytes("style")]
    await loras.resolve("style")
    await library().resolve("style")  # as a later run
    assert watched.reads == ["loras/style.safetensors"]
    assert loras.lookups == {"miss": 5, "hit": 1}


async def test_a_fetch_whose_job_is_cancelled_is_begun_anew_by_the_next_that_waits(
    storage: Storage, watched: Watched, library: Library, lora_bytes: LoraBytes
):
    await put(storage, "style", lora_bytes("style"))
    watched.answer.clear()
    loras = library()
    first, second = (asyncio.create_task(loras.resolve("style")) for _ in range(2))
    await polling.until(lambda: watched.reads)
    first.cancel()
    watched.answer.set()
    assert (await second).read_bytes() == lora_bytes("style")


async def test_a_failed_fetch_is_not_remembered(
    storage: Storage, library: Library, lora_bytes: LoraBytes
):
    loras = library()
    with pytest.raises(
        errors.MissingFileError, match=r"style\.safetensors in loras/ of the container"
    ):
        await loras.resolve("style")
    await put(storage, "style", lora_bytes("style"))
    assert (await loras.resolve("style")).read_bytes() == lora_bytes("style")


@pytest.mark.parametrize(
    "name", ["a b", "a+b", "a(b)", "_a", "a.b", "A-1.", "a..b", "x" * 128]
)
async def test_every_name_allowed_in_a_prompt_works_in_both_storages_and_on_the_disk(
    storage: Storage, library: Library, lora_bytes: LoraBytes, name: str, tmp_path
):
    assert prompt.SAFE_NAME.fullmatch(name)
    await put(storage, name, lora_bytes(name))
    path = await library().resolve(name)
    assert path.read_bytes() == lora_bytes(name)
    assert path.parent == tmp_path / "cache" / "loras"


async def test_the_folder_comes_before_the_storage(
    storage: Storage, library: Library, lora_bytes: LoraBytes, tmp_path
):
    await put(storage, "style", lora_bytes("store"))
    await put(storage, "other", lora_bytes("other"))
    mine = tmp_path / "mine" / "style.safetensors"
    mine.parent.mkdir()
    mine.write_bytes(lora_bytes("mine"))
    loras = library(mine.parent)
    assert await loras.resolve("style") == mine
    assert (await loras.resolve("other")).read_bytes() == lora_bytes("other")
    with pytest.raises(
        errors.MissingFileError,
        match=r"nowhere\.safetensors in .*mine or loras/ of the container",
    ):
        await loras.resolve("nowhere")


async def test_a_file_above_the_limit_is_refused_unread_wherever_it_is(
    storage: Storage, library: Library, lora_bytes: LoraBytes, tmp_path
):
    await put(storage, "large", lora_bytes("x" * 1001))
    mine = tmp_path / "mine" / "huge.safetensors"
    mine.parent.mkdir()
    with mine.open("wb") as file:
        file.truncate(10**12)
    loras = library(mine.parent)
    for name in ("large", "huge"):
        with pytest.raises(
            errors.UnusableFileError,
            match=rf"{name}\.safetensors is too large: .* at most",
        ):
            await loras.resolve(name)
    assert not kept(tmp_path)


async def test_what_is_not_a_lora_is_refused_and_a_truncated_one_is_retried(
    storage: Storage,
    watched: Watched,
    library: Library,
    lora_bytes: LoraBytes,
    tmp_path,
):
    await put(storage, "page", b"<html>not found</html>")
    loras = library()
    with pytest.raises(
        errors.UnusableFileError, match=r"page\.safetensors is not a safetensors"
    ):
        await loras.resolve("page")
    watched.replace("style", lora_bytes("style")[:-1])
    with pytest.raises(errors.TransientError, match=r"style\.safetensors is truncated"):
        await loras.resolve("style")
    assert not kept(tmp_path)
    watched.replace("style", lora_bytes("style"))
    assert (await loras.resolve("style")).read_bytes() == lora_bytes("style")


async def test_a_bad_file_is_refused_before_it_evicts_good_ones(
    storage: Storage, watched: Watched, lora_bytes: LoraBytes, tmp_path
):
    await put(storage, "good", lora_bytes("good"))
    loras = FileLibrary(Source(storage.files, tmp_path / "cache", 100), LORA)
    path = await loras.resolve("good")
    os.utime(path, (0, path.stat().st_mtime))
    watched.replace("bad", lora_bytes("bad")[:-1])
    with pytest.raises(errors.TransientError, match="is truncated"):
        await loras.resolve("bad")
    assert kept(tmp_path) == {"good"}


async def test_a_damaged_file_in_the_cache_is_fetched_again(
    storage: Storage, library: Library, lora_bytes: LoraBytes
):
    await put(storage, "style", lora_bytes("style"))
    path = await library().resolve("style")
    for damage in (b"", lora_bytes("style")[:-1], b"<html>not found</html>", None):
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        assert await library().resolve("style") == path
        assert path.read_bytes() == lora_bytes("style")


async def test_a_replaced_lora_is_fetched_again_once_the_manifest_names_it(
    watched: Watched,
    library: Library,
    lora_bytes: LoraBytes,
    monkeypatch,
):
    watched.replace("style", lora_bytes("old"))
    watched.state(style=sha256(lora_bytes("old")))
    loras = library()
    assert (await loras.resolve("style")).read_bytes() == lora_bytes("old")

    watched.replace("style", lora_bytes("new"))
    watched.state(style=sha256(lora_bytes("new")))
    assert (await loras.resolve("style")).read_bytes() == lora_bytes("old"), "too early"
    monkeypatch.setattr("worker.files.manifest.READ_AGAIN_SECONDS", -1.0)
    path = await loras.resolve("style")
    assert path.read_bytes() == lora_bytes("new")
    assert len(watched.reads) == 2
    assert (await loras.resolve("style")).read_bytes() == lora_bytes("new")
    assert len(watched.reads) == 2


async def test_a_job_is_retried_between_the_replacements_of_a_lora_and_its_manifest(
    watched: Watched, library: Library, lora_bytes: LoraBytes
):
    watched.state(style=sha256(lora_bytes("old")))
    watched.replace("style", lora_bytes("new"))
    loras = library()
    with pytest.raises(errors.TransientError, match=r"SHA-256 .* is not the one"):
        await loras.resolve("style")
    watched.state(style=sha256(lora_bytes("new")))
    assert (await loras.resolve("style")).read_bytes() == lora_bytes("new"), (
        "read again at once"
    )


class ReadingEngine(StandInEngine):
    """Reads each LoRA when it prepares a request, and keeps the order in which requests came in."""

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self.lora_lookups = {"hit": 1, "miss": 3}
        self.events: list[str] = []

    def prepare(self, request: contract.ImageRequest) -> StandInPrepared:
        self.events += [
            f"read {lora.path.read_bytes()[-5:].decode()}" for lora in request.loras
        ]
        return super().prepare(request)

    def tick(self) -> list[contract.Finished]:
        self.events += [f"drawn {request.prompt}" for _, request in self._admitted]
        return super().tick()


async def test_a_lora_is_fetched_and_read_while_the_gpu_draws_other_jobs(
    storage: Storage,
    watched: Watched,
    run_pipeline,
    lora_bytes: LoraBytes,
):
    watched.replace("style", lora_bytes("style"))
    watched.answer.clear()
    engine = ReadingEngine()
    await storage.queue.send([message(prompt="styled<lora:style:1>")] * 2)
    await storage.queue.send(message(prompt="plain") for _ in range(6))

    async def answer_late() -> None:
        await polling.until(lambda: engine.events.count("drawn plain") >= 6)
        watched.answer.set()

    pipeline, _ = await asyncio.gather(run_pipeline(engine), answer_late())
    assert engine.events[:6] == ["drawn plain"] * 6
    assert sorted(engine.events[6:]) == ["drawn styled"] * 2 + ["read style"] * 2
    assert watched.reads == ["loras/style.safetensors"]
    for cache, result, count in (
        ("disk", "miss", 2),
        ("memory", "hit", 1),
        ("memory", "miss", 3),
    ):
        labels = {"cache": cache, "result": result}
        counted = pipeline.metrics.registry.get_sample_value(
            "imagefleet_lora_cache_total", labels
        )
        assert counted == count


async def test_a_lora_in_a_folder_within_the_folder_of_loras_is_found_by_its_name(
    library: Library, lora_bytes: LoraBytes, tmp_path
):
    outside = tmp_path / "outside"
    for path in ("mine/style/fox", "mine/a/twin", "mine/b/twin", "outside/linked"):
        file = tmp_path / f"{path}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(lora_bytes(path))
    (tmp_path / "mine" / "link").symlink_to(outside)
    (outside / "circle").symlink_to(tmp_path / "mine")
    found = library(directory=tmp_path / "mine")
    assert await found.resolve("fox") == tmp_path / "mine/style/fox.safetensors"
    assert (await found.resolve("linked")).read_bytes() == lora_bytes("outside/linked")
    with pytest.raises(errors.MissingFileError, match="several files of the LoRA 'twi"):
        await found.resolve("twin")


async def test_a_lora_in_a_folder_of_the_storage_is_found_where_it_is_a_folder(
    storage: Storage, library: Library, lora_bytes: LoraBytes
):
    await put(storage, "style/fox", lora_bytes("fox"))
    if storage.settings.is_local:
        assert (await library().resolve("fox")).read_bytes() == lora_bytes("fox")
    else:  # a worker's token cannot list; `imagefleet load --check` says where it is
        with pytest.raises(errors.MissingFileError, match="no LoRA fox"):
            await library().resolve("fox")
