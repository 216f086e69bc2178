"""On which storages a test runs, where not on each, and the options of commands that act on one."""

import pytest

from imagefleet.storage.settings import StorageSettings

#: What does not depend on the storage.
local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)

azurite_only = pytest.mark.parametrize("storage_settings", ["azurite"], indirect=True)

#: Of the first set of tests on Azurite, too, beside what only Azure does.
on_both = pytest.mark.parametrize(
    "storage_settings", ["local", "azurite"], indirect=True
)


def flags(settings: StorageSettings) -> list[str]:
    names = ("storage", "queue", "container", "files_container")
    return [
        part
        for name in names
        for part in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))
    ]
