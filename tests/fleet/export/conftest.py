"""The command `imagefleet export`, and images for it."""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import AsyncImagefleet, Imagefleet

Add = Callable[..., Awaitable[Any]]


@pytest.fixture
def export(in_process: Imagefleet, local_settings: StorageSettings) -> AsyncImagefleet:
    """Runs the command for the campaign `spring`, with two images in a shard."""

    async def run(
        folder: str = "out", *arguments: str, code: int = 0, size: int = 2
    ) -> subprocess.CompletedProcess[str]:
        result = await asyncio.to_thread(
            in_process,
            "export",
            "spring",
            "--storage",
            local_settings.storage,
            "--shard-size",
            str(size),
            folder,
            *arguments,
        )
        assert result.returncode == code, result.stderr
        return result

    return run


@pytest.fixture
async def stored(local_settings: StorageSettings, store_images: Add) -> list[Any]:
    """Five images, in an order that is not that of their names."""
    async with open_storage(local_settings) as storage:
        return list(
            await store_images(storage, "3", "1", "5", "2", "4", metadata={"order": 7})
        )
