from pathlib import Path

import pytest

DASHBOARDS = Path(__file__).parents[2] / "dashboards"


@pytest.fixture(scope="session")
def dashboards() -> Path:
    """The folder of dashboards and rules."""
    return DASHBOARDS
