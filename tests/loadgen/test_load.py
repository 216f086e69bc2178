import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polling
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from loadgen.load import Load
from loadgen.settings import LoadSettings


class ManyJobs:
    """A source of jobs that are made at once."""

    campaign = "spring"
    path = Path("many")

    def __init__(self, count: int) -> None:
        self.count = count

    def bodies(self) -> Iterator[str]:
        rest = f'"campaign":"spring","digest":"{"0" * 64}"}}'
        return (f'{{"id":"{number}",{rest}' for number in range(self.count))


@pytest.mark.slow
async def test_ten_million_jobs_take_no_more_memory_than_ten_thousand(
    local_settings: StorageSettings,
):
    """Its objects are counted: a list of what was sent would show after a thousandth of them."""
    objects: dict[int, int] = {}

    async def instantly(_bodies: object, **_: object) -> None:
        await polling.turn()

    def count(confirmed: int) -> None:
        for mark in (1_600, 8_000):
            if confirmed >= mark and mark not in objects:
                gc.collect()
                objects[mark] = len(gc.get_objects())

    async with open_storage(local_settings) as storage:
        storage.models.send = instantly  # type: ignore[method-assign]
        settings = LoadSettings(storage=local_settings.storage)
        source: Any = ManyJobs(10_000)
        summary = await Load(storage, source, settings, restart=True).run(count)
    assert summary.sent == 10_000
    assert objects[8_000] - objects[1_600] < 500
