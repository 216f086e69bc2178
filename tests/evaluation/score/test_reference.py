"""A reference is its content: neither names nor times of files stand for what is in them."""

import asyncio
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evaluation.score import run
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import told

pytestmark = pytest.mark.slow

Figures = Callable[..., list[JSONDict]]


@pytest.fixture
def figures(score_command, means_onnx: Path) -> Figures:
    """The groups of `imagefleet score plain --reference FOLDER`, in one state folder or another."""
    networks = ("--extractor", str(means_onnx), "--reference")

    def score(
        reference: Path, *arguments: str, state: str = "state", **where: str
    ) -> Any:
        given = ("--state", state, "--json", *arguments)
        ended = score_command("plain", *networks, str(reference), *given, **where)
        return told(ended)["groups"]

    return score


def noise(pictures: Path) -> None:
    """Overwrites each picture with another of the same name and time."""
    for number, path in enumerate(sorted(pictures.rglob("*.png"))):
        before = path.stat()
        pixels = np.random.default_rng(number).integers(0, 60, (128, 128, 3), np.uint8)
        Image.fromarray(pixels).save(path, compress_level=1)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_new_pictures_under_old_names_and_times_are_another_reference(
    figures: Figures, pictures: Path, tmp_path
):
    first = figures(pictures)
    noise(pictures)

    second = figures(pictures, "--write-reference", "noise.npz")

    assert second == figures(pictures, state="fresh")
    assert second[0]["fid"] > first[0]["fid"] + 100
    written = figures(tmp_path / "noise.npz", state="file")
    assert written[0]["fid"] == pytest.approx(second[0]["fid"], rel=1e-9)


def test_a_picture_that_changes_after_it_was_hashed_is_left_out(
    score_command,
    pictures: Path,
    means_onnx: Path,
    monkeypatch,
):
    (first, *_) = sorted(pictures.rglob("*.png"))
    extract = run.extract

    def change(*arguments: Any) -> None:
        first.write_bytes(max(pictures.rglob("*.png")).read_bytes())
        extract(*arguments)

    monkeypatch.setattr(run, "extract", change)
    networks = ("--extractor", str(means_onnx), "--reference", str(pictures))
    ended = score_command("plain", *networks, "--json")
    assert json.loads(ended.stdout)["reference_images"] == 23
    assert f"or changed meanwhile: train/{first.name}" in ended.stderr


@pytest.mark.parametrize("hashed", [True, False])
def test_an_image_drawn_again_in_as_many_bytes_is_computed_again(
    figures: Figures, pictures: Path, tmp_path, hashed: bool
):
    """One whose record has no hash is never taken for what it was."""
    address = f"local:{tmp_path / 'drawn'}"
    files = [path.read_bytes() for path in sorted(pictures.rglob("*.png"))[:4]]
    size = max(map(len, files))
    padded = [data + bytes(size - len(data)) for data in files]

    async def store(drawn: list[bytes], *, known: bool) -> None:
        async with open_storage(StorageSettings(storage=address)) as storage:
            await storage.create()
            records = []
            for number, data in enumerate(drawn):
                name = f"plain/{number}.png"
                await storage.blobs.delete(name)
                found = sha256(data).hexdigest()
                await storage.blobs.create(name, data, "image/png", {"sha256": found})
                record = Record(
                    outcome="completed",
                    id=f"{number}",
                    at=datetime.now(UTC),
                    campaign="plain",
                    blob=name,
                    size_bytes=size,
                    sha256=found if hashed else None,
                )
                records.append(record)
            if hashed or not known:
                await RecordLog(storage.blobs, f"w{known}").add(records)

    asyncio.run(store(padded[:3], known=False))
    before = figures(pictures, storage=address)
    asyncio.run(store(padded[1:], known=True))
    after = figures(pictures, storage=address)
    assert after != before
    assert after == figures(pictures, state="fresh", storage=address)
