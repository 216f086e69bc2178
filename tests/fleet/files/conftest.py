"""The storage of a test of `imagefleet files`, as flags."""

import pytest

import storage_flags
from imagefleet.storage.settings import StorageSettings


@pytest.fixture
def flags(storage_settings: StorageSettings) -> list[str]:
    """A folder, then Azurite."""
    return storage_flags.flags(storage_settings)
