"""Files in folders that others write: each is read whole, or waited for without an attempt."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import tiny_model
from imagefleet import errors
from imagefleet.files import kinds, picture, safetensors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from worker import process, progress
from worker.engine import load
from worker.files import check, library
from worker.settings import WorkerSettings

JOBS = 60

Pixels = npt.NDArray[np.int16]

#: A safetensors file without tensors.
EMPTY = (2).to_bytes(8, "little") + b"{}"


def age(path: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


@pytest.fixture
def rests(monkeypatch) -> None:
    monkeypatch.setattr(safetensors, "REST_SECONDS", 3.0)


@pytest.mark.usefixtures("rests")
def test_a_file_that_was_just_written_is_waited_for_and_one_at_rest_is_not(
    tmp_path,
):
    path = tmp_path / "x"
    path.write_bytes(b"1")
    with pytest.raises(
        errors.UnsettledFileError, match=r"x was written within the last 3 seconds"
    ):
        safetensors.rested(path)

    age(path, 4)

    assert safetensors.rested(path) == safetensors.identify(path)


def test_a_file_of_a_clock_that_is_ahead_is_not_waited_for_for_ever(
    tmp_path, monkeypatch
):
    now = 1_000.0
    monkeypatch.setattr(safetensors, "REST_SECONDS", 3.0)
    monkeypatch.setattr(safetensors.time, "monotonic", lambda: now)
    path = tmp_path / "x"
    path.write_bytes(b"1")
    age(path, -10_000)
    with pytest.raises(errors.UnsettledFileError):
        safetensors.rested(path)
    now += 2.9
    path.write_bytes(b"2")
    age(path, -10_001)
    with pytest.raises(errors.UnsettledFileError):
        safetensors.rested(path)
    now += 2.9
    with pytest.raises(errors.UnsettledFileError):
        safetensors.rested(path)

    now += 0.1

    assert safetensors.rested(path) == safetensors.identify(path)


def overwritten(path: Path) -> None:
    path.write_bytes(b"2")


def replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


@pytest.mark.parametrize("change", [overwritten, replaced, Path.unlink])
@pytest.mark.parametrize("error", [None, errors.UnusableFileError("damaged")])
def test_what_was_read_of_a_file_that_changes_meanwhile_does_not_count(
    tmp_path, change: Callable[[Path], None], error: Exception | None
):
    path = tmp_path / "x"
    path.write_bytes(b"1")
    age(path, 100)

    def read() -> None:
        with safetensors.whole(safetensors.identify(path)):
            change(path)
            if error is not None:
                raise error

    with pytest.raises(
        errors.UnsettledFileError, match="x was written or removed while it was"
    ):
        read()


@pytest.mark.usefixtures("rests")
async def test_a_file_whose_name_is_the_hash_of_its_bytes_is_read_at_once(
    local_settings: StorageSettings,
):
    async with open_storage(local_settings) as storage:
        await storage.create()
        name = f"inputs/a/{hashlib.sha256(EMPTY).hexdigest()}.png"
        path = library.local_path(storage.files, name)
        assert path is not None
        path.parent.mkdir(parents=True)
        path.write_bytes(EMPTY[:5])
        with pytest.raises(errors.UnsettledFileError):
            await library.read_whole(storage.files, name)
        path.write_bytes(EMPTY)

        assert await library.read_whole(storage.files, name) == EMPTY


@pytest.mark.usefixtures("rests")
@pytest.mark.parametrize(
    "kind", [kinds.LORA, kinds.CONTROLNET, kinds.UPSCALER, kinds.TEXT]
)
async def test_a_file_that_somebody_copies_into_the_local_storage_is_waited_for(
    local_settings: StorageSettings, tmp_path, kind: kinds.FileKind
):
    async with open_storage(local_settings) as storage:
        await storage.create()
        path = library.local_path(storage.files, f"{kind.folder}/x.safetensors")
        assert path is not None
        path.parent.mkdir()
        path.write_bytes(b"half")
        own = library.FileLibrary(
            library.Source(storage.files, tmp_path / "cache", 10**9), kind
        )
        with pytest.raises(errors.UnsettledFileError):
            await own.resolve("x")
        path.write_bytes(EMPTY)
        age(path, 4)

        assert (await own.resolve("x")).read_bytes() == EMPTY


@pytest.mark.usefixtures("rests")
def test_a_model_that_is_still_being_copied_is_waited_for_and_one_that_is_cut_off_is_not(
    tmp_path,
):
    path = tmp_path / "x.safetensors"
    path.write_bytes((100).to_bytes(8, "little") + b"{")
    settings = WorkerSettings(model=str(path), storage="local:x")

    check.check(settings)

    age(path, 4)
    with pytest.raises(errors.SetupError, match="is cut off"):
        check.check(settings)


#: Overwrites a LoRA in place, a piece at a time, and lets it rest in between.
REWRITE = """
import itertools, os, sys, time
path, pause, *files = sys.argv[1:]
contents = [open(each, "rb").read() for each in files]
for content in itertools.islice(itertools.cycle(contents), 1, None):
    with open(path, "r+b", buffering=0) as file:
        for at in range(0, len(content), len(content) // 16):
            file.write(content[at : at + len(content) // 16])
            time.sleep(0.01)
        file.truncate()
    time.sleep(float(pause))
"""


async def jobs_are_sent(storage: Storage, jobs: int) -> None:
    await storage.create()
    message = {
        "prompt": "a house <lora:style:1>",
        "steps": 2,
        "width": 64,
        "height": 64,
        "seed": 7,
    }
    await storage.queue.send(
        [json.dumps(message | {"id": f"{at:03}"}) for at in range(jobs)]
    )


def drawn(folder: Path) -> Iterator[tuple[str, Pixels]]:
    """The hash that each image states, and its pixels."""
    for path in folder.rglob("*.png"):
        with Image.open(path) as image:
            text = picture.parameters(image, 10_000)
            stated = text.partition('Lora hashes: "style: ')[2][:12]
            yield stated, np.asarray(image).astype(np.int16)


def distance(one: Pixels, two: Pixels) -> float:
    return float(np.abs(one - two).mean())


@pytest.mark.slow
async def test_a_lora_that_is_overwritten_in_place_is_drawn_whole_with_its_own_hash(
    tmp_path, monkeypatch
):
    """By one of its own size, whose header tells no half, and by one of another."""
    monkeypatch.setattr(safetensors, "REST_SECONDS", 1.0)
    model = tiny_model.build_tiny_checkpoint(tmp_path / "model")
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "two", "large")]
    wanted: dict[str, Pixels] = {}
    for at, (path, its_rank) in enumerate(zip(files, (4, 4, 6), strict=True)):
        tiny_model.build_tiny_lora(path, model, rank=its_rank, seed=at)
        folder = tmp_path / path.stem
        folder.mkdir()
        shutil.copyfile(path, folder / "style.safetensors")
        await worker_draws(folder, model, 1)
        wanted |= drawn(folder / "storage")
    different = min(
        distance(one, two) for one, two in itertools.combinations(wanted.values(), 2)
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    shutil.copyfile(files[0], shared / "style.safetensors")
    command = [
        sys.executable,
        "-c",
        REWRITE,
        shared / "style.safetensors",
        "2.5",
        *files,
    ]

    with subprocess.Popen(command) as rewriting:  # noqa: ASYNC220 - it begins at once
        try:
            report = await worker_draws(shared, model, JOBS)
        finally:
            rewriting.kill()

    assert report.jobs["completed"] == JOBS
    assert report.jobs.keys() <= {"completed", "handed_back"}
    found = list(drawn(shared / "storage"))
    assert len(found) == JOBS
    # Images beside others differ in rounding; half of any LoRA makes another image.
    assert (
        max(distance(wanted[stated], pixels) for stated, pixels in found)
        < 0.1 * different
    )


async def worker_draws(folder: Path, model: Path, jobs: int) -> progress.WorkerReport:
    settings = WorkerSettings(
        model=str(model),
        storage=f"local:{folder / 'storage'}",
        lora_directory=folder,
        cache=folder / "cache",
        device="cpu",
        until_empty=True,
        max_attempts=1,
    )
    async with open_storage(settings) as storage:
        await jobs_are_sent(storage, jobs)
    return await process.run_worker(settings)


def test_a_model_that_is_overwritten_while_it_is_read_is_read_again(
    tmp_path, monkeypatch
):
    model = tiny_model.build_tiny_checkpoint(tmp_path / "model")
    (weights,) = (model / "unet").glob("*.safetensors")
    read = load._read
    reads = 0

    def overwritten_meanwhile(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        made = read(*arguments)
        if reads == 1:
            weights.write_bytes(weights.read_bytes())
        return made

    monkeypatch.setattr(load, "_read", overwritten_meanwhile)
    load.load_engine(load.EngineSettings(model, "cpu")).close()
    assert reads == 2
