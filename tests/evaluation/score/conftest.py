"""A sweep whose images a program drew, in a local storage."""

import asyncio
import hashlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from demo_world import captions, world
from evaluation.score import metrics, plan, reference, run
from evaluation.score.networks import load
from evaluation.score.statistics import Statistics
from evaluation.sweep import manifest
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

#: In each group.
IMAGES = 24

CHUNK_IMAGES = 8

#: Of the groups; the images of the second one are noisier.
GUIDANCE = (1.5, 7.0)


@dataclass(frozen=True)
class Drawn:
    """Scenes and their captions."""

    pictures: Sequence[Image.Image]
    captions: Sequence[str]


@pytest.fixture(scope="session")
def drawn() -> Drawn:
    rng = random.Random(3)
    scenes = [
        world.sample_scene(rng, world.SceneOptions(emphasis_share=0))
        for _ in range(IMAGES)
    ]
    return Drawn(
        [world.draw_scene(scene) for scene in scenes],
        [captions.plain_caption(scene, rng) for scene in scenes],
    )


def png(picture: Image.Image, guidance: float, number: int) -> bytes:
    noise = np.random.default_rng(number).normal(0, 6 * guidance, (128, 128, 3))
    stored = io.BytesIO()
    pixels = (np.asarray(picture) + noise).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(stored, "PNG", compress_level=1)
    return stored.getvalue()


async def fill(
    settings: StorageSettings, drawn: Drawn, campaign: str, *, swept: bool
) -> None:
    """Stores *drawn* as a campaign's images, with their records."""
    groups = [
        manifest.Group(name=f"cfg-{each}", guidance=each, sampler="plms", steps=50)
        for each in GUIDANCE
    ]
    texts = manifest.digest(drawn.captions)
    async with open_storage(settings) as storage:
        await storage.create()
        if swept:
            swept = manifest.Sweep(
                campaign=campaign, captions=texts, groups=tuple(groups)
            )
            await manifest.write(storage, swept)
        records = []
        for group in groups if swept else groups[:1]:
            for number, picture in enumerate(drawn.pictures):
                name = manifest.job_id(group.name, number)
                data = png(picture, group.guidance, number)
                await storage.blobs.create(
                    f"{campaign}/{name}.png", data, "image/png", {}
                )
                records.append(
                    Record(
                        outcome="completed",
                        id=name,
                        campaign=campaign,
                        at=datetime.now(UTC),
                        blob=f"{campaign}/{name}.png",
                        size_bytes=len(data),
                        sha256=hashlib.sha256(data).hexdigest(),
                        prompt=f"{drawn.captions[number]}, <lora:night-palette:0.5>",
                        cfg_scale=group.guidance,
                    )
                )
        await RecordLog(storage.blobs, "w1").add(records)


@pytest.fixture(scope="session")
def stored(drawn: Drawn, tmp_path_factory) -> StorageSettings:
    """A storage with the sweep `curve` and the campaign `plain`; tests only read it."""
    folder = tmp_path_factory.mktemp("scored")
    settings = StorageSettings(storage=f"local:{folder / 'storage'}")
    asyncio.run(fill(settings, drawn, "curve", swept=True))
    asyncio.run(fill(settings, drawn, "plain", swept=False))
    return settings


@pytest.fixture
def score_command(in_process, stored: StorageSettings) -> Any:
    """Runs `imagefleet score ARGUMENTS` in one process."""

    def run(*arguments: str, storage: str = stored.storage) -> Any:
        return in_process("score", *arguments, "--storage", storage, "--processes", "1")

    return run


@pytest.fixture
def means_onnx(tmp_path) -> Path:
    """A network in an ONNX file: the mean of each colour of 20 x 20 pixels."""
    node = helper.make_node(
        "ReduceMean", ["images"], ["features"], axes=[2, 3], keepdims=0
    )
    graph = helper.make_graph(
        [node],
        "means",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 20, 20])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 3])],
    )
    path = tmp_path / "means.onnx"
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    beside = path.with_name("means.onnx.json")
    beside.write_text('{"size": 20, "mean": [0, 0, 0], "std": [1, 1, 1]}')
    return path


@pytest.fixture(scope="session")
def small_reference(drawn: Drawn, tmp_path_factory) -> str:
    """Statistics of the pictures without noise: less work than with the demo's 2,000."""
    extractor = load.load_extractor("demo")
    clip = load.load_text_extractor("demo")
    features = extractor.features(drawn.pictures)
    found = reference.Reference(
        "small",
        IMAGES,
        "0" * 64,
        Statistics.of(features),
        features,
        clip.features(drawn.pictures),
    )
    path = tmp_path_factory.mktemp("reference") / "small.npz"
    reference.write(found, path, extractor.facts, clip.facts)
    return str(path)


@pytest.fixture(autouse=True)
def _less_work(monkeypatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_IMAGES", CHUNK_IMAGES)
    monkeypatch.setattr(run, "_BATCH", CHUNK_IMAGES)
    monkeypatch.setattr(metrics, "KID_SUBSETS", 3)


@pytest.fixture
def pictures(drawn: Drawn, tmp_path) -> Path:
    """A folder with the pictures as they were drawn."""
    folder = tmp_path / "pictures" / "train"
    folder.mkdir(parents=True)
    for number, picture in enumerate(drawn.pictures):
        picture.save(folder / f"{number:03}.png", compress_level=1)
    return folder.parent
