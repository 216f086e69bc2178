"""Operations on a storage that are counted of a worker in this process."""

import contextlib
from collections.abc import Iterator
from typing import Any

from imagefleet.storage.open import Storage
from worker import process


@contextlib.contextmanager
def opened() -> Iterator[list[Storage]]:
    """The storages that a worker opens meanwhile."""
    found: list[Storage] = []
    opening = process.open_storage

    def noting(*given: Any, **named: Any) -> Storage:
        found.append(opening(*given, **named))
        return found[-1]

    process.open_storage = noting  # type: ignore[assignment]
    try:
        yield found
    finally:
        process.open_storage = opening
