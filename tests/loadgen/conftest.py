import io
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def stdin(monkeypatch) -> Callable[[bytes], None]:
    """Sets what standard input holds."""

    def hold(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return hold
