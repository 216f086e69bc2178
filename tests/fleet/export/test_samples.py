"""What an export says of an image is true: its bytes, its pixels and its caption."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import exported
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import AsyncImagefleet

Add = Callable[..., Awaitable[Any]]


async def test_one_changed_byte_is_noticed_and_so_is_what_is_stored_as_recorded_but_no_image(
    stored: list[Any],
    export: AsyncImagefleet,
    local_settings: StorageSettings,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        data = bytearray(await storage.blobs.read("spring/2.png") or b"")
        data[len(data) // 2] ^= 1
        told = {"sha256": str(next(each.sha256 for each in stored if each.id == "2"))}
        await storage.blobs.delete("spring/2.png")
        await storage.blobs.create("spring/2.png", bytes(data), "image/png", told)
        half = bytes(data[: len(data) // 2])
        digest = hashlib.sha256(half).hexdigest()
        await storage.blobs.create(
            "spring/6.png", half, "image/png", {"sha256": digest}
        )
        sixth = {
            "id": "6",
            "blob": "spring/6.png",
            "size_bytes": len(half),
            "sha256": digest,
        }
        await RecordLog(storage.blobs, "w1").add([stored[0].model_copy(update=sixth)])

    result = await export(code=4)

    named = "error: 2 images not as recorded or damaged: spring/2.png, spring/6.png"
    assert named in result.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["images"], manifest["changed"]) == (4, 2)


async def test_captions_are_as_they_were_drawn_without_escapes_or_lower_case_operators(
    export: AsyncImagefleet,
    local_settings: StorageSettings,
    tmp_path,
    store_images: Add,
):
    async with open_storage(local_settings) as storage:
        swept = {
            "prompt": "a boat break and sea",
            "metadata": {"caption": "a boat BREAK AND sea"},
        }
        await store_images(storage, "1", **swept)
        await store_images(
            storage, "2", prompt=r"a \(very\) red boat, <lora:outline-style:0.8>"
        )

    await export()

    captions = [sample.text for sample in exported.samples(tmp_path / "out")]
    assert captions == ["a boat BREAK AND sea", "a (very) red boat"]
