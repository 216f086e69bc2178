"""The webdataset and datasets libraries read what `imagefleet export` writes."""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.export import command, plan
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

os.environ["HF_HUB_OFFLINE"] = "1"

datasets = pytest.importorskip("datasets")
webdataset = pytest.importorskip("webdataset")

Add = Callable[..., Awaitable[Any]]


@pytest.fixture
async def exported(
    local_settings: StorageSettings, store_images: Add, tmp_path
) -> Callable[[str], Path]:
    """A folder with the export of five images in three shards, in a format."""
    async with open_storage(local_settings) as storage:
        await store_images(storage, "1", "2", "3", "4", metadata={"order": 7})
        await store_images(storage, "5", loras=(), model=None, negative_prompt=None)

    async def run(form: Any) -> Path:
        folder = tmp_path / form
        await command._export(
            local_settings,
            folder,
            plan.ExportPlan(campaign="spring", format=form, shard_size=2),
            quiet=True,
        )
        return folder

    return lambda form: asyncio.run(run(form))


async def read(
    exported: Callable[[str], Path], form: str, load: Callable[[Path], Any]
) -> Any:
    return await asyncio.to_thread(lambda: load(exported(form)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_webdataset_reads_the_shards(exported: Callable[[str], Path]):
    def load(folder: Path) -> list[Any]:
        shards = webdataset.WebDataset(
            f"{folder}/{{00000..00002}}.tar", shardshuffle=False
        )
        samples = list(shards.decode("pil").to_tuple("__key__", "png", "txt", "json"))
        gc.collect()  # it leaves its files open
        return samples

    samples = await read(exported, "webdataset", load)

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


async def test_datasets_reads_images_with_their_parameters(
    exported: Callable[[str], Path], tmp_path
):
    def load(folder: Path) -> Any:
        return datasets.load_dataset(
            str(folder), cache_dir=str(tmp_path / "cache"), split="train"
        )

    found = await read(exported, "parquet", load)

    assert type(found.features["image"]).__name__ == "Image"
    rows = sorted(found, key=lambda row: str(row["id"]))
    assert [row["id"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["image"].size for row in rows] == [(32, 32)] * 5
    assert (rows[0]["caption"], rows[0]["seed"], rows[0]["steps"]) == (
        "a house 1",
        0,
        20,
    )
    assert rows[0]["cfg_scale"] == 7.5
    assert rows[0]["loras"] == [{"name": "outline-style", "weight": 0.8}]
    assert rows[4]["loras"] == []
