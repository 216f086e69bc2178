"""On which storages a test runs, where not on each."""

import pytest

#: What does not depend on the storage.
local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)

azurite_only = pytest.mark.parametrize("storage_settings", ["azurite"], indirect=True)

#: Of the first set of tests on Azurite, too, beside what only Azure does.
on_both = pytest.mark.parametrize(
    "storage_settings", ["local", "azurite"], indirect=True
)
