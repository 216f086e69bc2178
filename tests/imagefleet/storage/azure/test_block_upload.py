"""An upload in blocks that breaks off, and goes on where it was."""

import os
from typing import Any

import pytest
from azure.storage.blob.aio import BlobClient

from imagefleet.storage.azure import blobs as azure_blobs
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings


async def test_an_upload_that_broke_off_sends_only_what_is_missing(
    azurite_settings: StorageSettings, tmp_path, monkeypatch
):
    monkeypatch.setattr(azure_blobs, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(azure_blobs, "_CONCURRENT_BLOCKS", 1)
    content = os.urandom(6500)
    file = tmp_path / "model"
    file.write_bytes(content)
    sent: list[bytes] = []
    most = 3
    stage_block = BlobClient.stage_block

    async def stage_some(self: BlobClient, name: str, data: Any, **options: Any) -> Any:
        if len(sent) == most:
            raise RuntimeError("killed")
        sent.append(data)
        return await stage_block(self, name, data, **options)

    monkeypatch.setattr(BlobClient, "stage_block", stage_some)
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        with pytest.raises(RuntimeError, match="killed"):
            await storage.blobs.upload("models/a", file, "text/plain", {})
        assert await storage.blobs.read("models/a") is None
        most = 99
        progress: list[int] = []

        # Another file under the same name has other blocks.
        file.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
        assert await storage.blobs.upload(
            "models/a", file, "text/plain", {}, progress.append
        )

        assert await storage.blobs.read("models/a") == file.read_bytes()
    assert [len(data) for data in sent] == [1000] * 3 + [1000] * 4 + [500]
    assert progress[-1] == 6500
