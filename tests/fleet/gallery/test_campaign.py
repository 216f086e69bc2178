"""The newest records are there at once, and all of them in the end, whatever goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fleet.gallery import campaign as campaigns
from fleet.gallery.campaign import Campaign, Pace
from fleet.gallery.index import Filter, Index
from fleet.gallery.thumbnails import Thumbnails
from imagefleet.records.record import Record
from imagefleet.records.writer import RecordLog
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
COUNT = 600


def image(number: int) -> Record:
    fields = {"id": f"{number:04}", "campaign": "spring", "blob": f"spring/{number}.png"}
    at = NOON + timedelta(seconds=number)
    prompt = str(pow(7, 200 + number))  # it cannot be compressed to nothing
    return Record.model_validate(fields | {"outcome": "completed", "at": at, "prompt": prompt})


@pytest.fixture
async def storage(
    local_settings: StorageSettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Storage]:
    """A campaign of three workers that takes many polls to read."""
    monkeypatch.setattr(campaigns, "_NEWEST", 40)
    monkeypatch.setattr("imagefleet.records.stored._END_BYTES", 8_000)
    async with open_storage(local_settings) as opened:
        await opened.create()
        logs = itertools.cycle([RecordLog(opened.blobs, f"worker-{each}") for each in range(3)])
        for first in range(0, COUNT, 10):
            await next(logs).add([image(number) for number in range(first, first + 10)])
        yield opened


def opened(storage: Storage, folder: Path) -> Campaign:
    index = Index(folder / "index.sqlite")
    return Campaign(storage, "spring", index, Pace(0, 60, records_at_once=50, part_bytes=8_000))


async def jobs(campaign: Campaign) -> list[int]:
    view = await campaign.view(Filter())
    return [int(row.job) for row in campaign.index.rows(view.seqs.tolist())]


async def read_all(campaign: Campaign) -> int:
    """Returns the polls that it took."""
    for polls in itertools.count():
        if campaign.is_complete:
            return polls
        await campaign.poll()
    raise AssertionError


async def test_the_newest_are_first_and_the_others_come_in_order(
    storage: Storage, tmp_path: Path
) -> None:
    campaign = opened(storage, tmp_path)
    await campaign.poll()
    assert await jobs(campaign) == list(range(COUNT - 40, COUNT))
    assert campaign.is_behind
    while not campaign.is_complete:
        await campaign.poll()
        shown = await jobs(campaign)
        assert shown == sorted(shown)
        assert shown[-40:] == list(range(COUNT - 40, COUNT))
    assert await jobs(campaign) == list(range(COUNT))
    assert campaign.index.counts().jobs == COUNT
    campaign.index.close()


async def test_an_index_that_knows_nearly_all_reads_only_the_rest(
    storage: Storage, tmp_path: Path
) -> None:
    first = opened(storage, tmp_path)
    await read_all(first)
    first.index.close()
    await RecordLog(storage.blobs, "worker-4").add([image(COUNT)])
    reads = storage.operations.blob_reads

    second = opened(storage, tmp_path)
    assert await read_all(second) == 1
    assert await jobs(second) == list(range(COUNT + 1))
    assert storage.operations.blob_reads - reads == 1
    second.index.close()


async def test_rows_are_those_that_the_page_knows_until_it_asks_what_is_new(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the rows would be too expensive to be read again so soon.
    monkeypatch.setattr(campaigns, "_REBUILD_SHARE", math.inf)
    campaign = opened(storage, tmp_path)
    await campaign.poll()
    generation = (await campaign.view(Filter())).generation
    await campaign.poll()
    known = await campaign.view(Filter(), is_new=False)
    assert (known.generation, len(known.seqs)) == (generation, 40)
    assert (await campaign.view(Filter())).generation > generation
    campaign.index.close()


async def test_a_full_disk_loses_no_record(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Index.add, itertools.count()

    def add(self: Index, records: Iterable[Record], position: dict[str, int]) -> None:
        if next(calls) in {1, 3, 4}:
            raise sqlite3.OperationalError("database or disk is full")
        real(self, records, position)

    monkeypatch.setattr(Index, "add", add)
    campaign = opened(storage, tmp_path)
    problems = set()
    while not campaign.is_complete:
        await campaign.poll()
        problems.add(campaign.problem)
    assert await jobs(campaign) == list(range(COUNT))
    assert problems == {
        "",
        "The index in the cache cannot be written: database or disk is full",
    }
    campaign.index.close()


async def test_two_galleries_at_once_share_an_index(storage: Storage, tmp_path: Path) -> None:
    both = [opened(storage, tmp_path) for _ in range(2)]
    await asyncio.gather(*map(read_all, both))
    for campaign in both:
        assert await jobs(campaign) == list(range(COUNT))
        assert campaign.index.counts().jobs == COUNT
        assert campaign.index.record(17) == image(int(campaign.index.rows([17])[0].job))
    for campaign in both:
        campaign.index.close()


def test_many_galleries_may_start_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        indices = list(threads.map(lambda _: Index(tmp_path / "index.sqlite"), range(8)))
        kept = list(threads.map(lambda _: Thumbnails(tmp_path / "t.sqlite", 1000), range(8)))
    assert len({each.birth() for each in indices}) == 1
    for each in (*indices, *kept):
        each.close()


@pytest.mark.parametrize("damage", [b"no database", bytes(5000)])
def test_a_cache_that_a_power_failure_has_damaged_is_made_anew(
    tmp_path: Path, damage: bytes
) -> None:
    for name in ("index.sqlite", "t.sqlite"):
        (tmp_path / name).write_bytes(damage)
    index = Index(tmp_path / "index.sqlite")
    index.add([image(1)], {})
    assert index.counts().jobs == 1
    index.close()
    kept = Thumbnails(tmp_path / "t.sqlite", 1000)
    kept.keep(b"key", b"data")
    assert kept.read(b"key") == b"data"
    kept.close()


#: Writes to a cache until it is killed.
WRITER = """
import sys
from pathlib import Path
from datetime import UTC, datetime
from fleet.gallery.index import Index
from fleet.gallery.thumbnails import Thumbnails
from imagefleet.records.record import Record
folder = Path(sys.argv[1])
index, kept = Index(folder / "index.sqlite"), Thumbnails(folder / "t.sqlite", 10**9)
for number in range(10**6):
    fields = {"id": str(number), "outcome": "completed", "at": datetime.now(UTC)}
    records = [Record(blob=f"spring/{number}-{each}.png", **fields) for each in range(20)]
    index.add(records, {"shard": 20 * (number + 1)})
    kept.keep(bytes([number % 256]), bytes([number % 256]) * 50_000)
    if number == 30:
        print("writing", flush=True)
"""


def test_a_gallery_that_is_killed_leaves_a_cache_that_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.kill()
    index = Index(tmp_path / "index.sqlite")
    assert index.position() == {"shard": index.counts().jobs}
    assert index.last() == index.counts().jobs > 600
    assert index.record(index.last()) is not None
    index.close()
    kept = Thumbnails(tmp_path / "t.sqlite", 10**9)
    for number in range(30):
        assert kept.read(bytes([number])) == bytes([number]) * 50_000
    kept.close()
