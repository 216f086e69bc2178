"""The webdataset and datasets libraries read what `imagefleet export` writes."""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.export import command
from fleet.export.plan import ExportPlan
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

os.environ["HF_HUB_OFFLINE"] = "1"

Add = Callable[..., Awaitable[Any]]


@pytest.fixture
async def exported(
    local_settings: StorageSettings, store_images: Add, tmp_path
) -> Path:
    """A folder with the export of five images in three shards."""
    async with open_storage(local_settings) as storage:
        await store_images(storage, "1", "2", "3", "4", metadata={"order": 7})
        await store_images(storage, "5", loras=(), model=None, negative_prompt=None)

    folder: Path = tmp_path / "out"
    plan = ExportPlan(campaign="spring", shard_size=2)
    await command._export(local_settings, folder, plan, quiet=True)
    return folder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_webdataset_reads_the_shards(exported: Path):
    webdataset = pytest.importorskip("webdataset")

    def load(folder: Path) -> list[Any]:
        shards = webdataset.WebDataset(
            f"{folder}/{{00000..00002}}.tar", shardshuffle=False
        )
        samples = list(shards.decode("pil").to_tuple("__key__", "png", "txt", "json"))
        gc.collect()  # it leaves its files open
        return samples

    samples = await asyncio.to_thread(load, exported)

    assert [key for key, *_ in samples] == [
        f"0000{n}" for n in ("00000", "00001", "10000", "10001", "20000")
    ]
    _, image, text, meta = samples[0]
    assert (image.size, text, meta["id"], meta["seed"]) == (
        (32, 32),
        "a house 1",
        "1",
        0,
    )
    assert meta["loras"] == [{"name": "outline-style", "weight": 0.8}]


async def test_datasets_reads_images_with_their_parameters(exported: Path, tmp_path):
    datasets = pytest.importorskip("datasets")

    def load(folder: Path) -> Any:
        return datasets.load_dataset(
            "webdataset",
            data_files=f"{folder}/*.tar",
            cache_dir=str(tmp_path / "cache"),
            split="train",
        )

    found = await asyncio.to_thread(load, exported)

    assert type(found.features["png"]).__name__ == "Image"
    rows = list(found)
    assert [row["json"]["id"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["png"].size for row in rows] == [(32, 32)] * 5
    first = rows[0]["json"]
    assert (rows[0]["txt"], first["seed"], first["steps"]) == ("a house 1", 0, 20)
    assert first["cfg_scale"] == 7.5
    assert first["loras"] == [{"name": "outline-style", "weight": 0.8}]
    assert rows[4]["json"]["loras"] == []
