"""Fixtures of the tests of tokens."""

import asyncio

import pytest

from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings


@pytest.fixture
def created(azurite_settings: StorageSettings) -> None:
    """Creates the queues and the container; for synchronous tests."""

    async def create() -> None:
        async with open_storage(azurite_settings) as storage:
            await storage.create()

    asyncio.run(create())
