"""A load of several campaigns: one is cancelled meanwhile, and each has its jobs counted."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from browsing import visible
from imagefleet import cancelled, errors, submit
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import LeasedMessage
from loadgen import sources
from loadgen.load import Load, Summary
from loadgen.settings import LoadSettings
from storages import local_only

JOBS = 2_000
TEMPLATE = "prompt: a cat\ncount: 1000000\njob: {campaign: spring}\n"


pytestmark = [
    pytest.mark.usefixtures("cancel_at_once"),
    local_only,
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch) -> None:
    monkeypatch.setattr(cancelled, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(cancelled, "LOAD_SECONDS", 2.0)


@pytest.fixture
def both(tmp_path) -> Path:
    """Jobs of spring and autumn in turn."""
    lines = (
        json.dumps({"prompt": "a cat", "campaign": campaign, "id": f"{number}"})
        for number in range(JOBS // 2)
        for campaign in ("spring", "autumn")
    )
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(lines))
    return path


def load_of(
    storage: Storage,
    file: Path,
    *,
    rate: float | None = None,
    concurrency: int = submit.BATCH,
    restart: bool = False,
) -> Load:
    settings = LoadSettings(storage=storage.url, rate=rate, concurrency=concurrency)
    return Load(storage, sources.open_source(str(file)), settings, restart=restart)


async def run(load: Load) -> Summary:
    return await load.run(lambda _confirmed: None)


async def cancelled_at(storage: Storage, load: Load, jobs: int) -> None:
    """Runs a load, and cancels spring once so many jobs are sent: that ends it."""
    enough = asyncio.Event()
    running = asyncio.create_task(
        load.run(lambda confirmed: enough.set() if confirmed >= jobs else None)
    )
    await enough.wait()
    await cancelled.cancel(storage, "spring")
    with pytest.raises(errors.SetupError, match="campaign spring was cancelled"):
        await running


async def in_queue(storage: Storage) -> Counter[str]:
    return Counter(
        [json.loads(each.body)["campaign"] async for each in visible(storage.queue)]
    )


async def test_a_load_whose_campaign_is_cancelled_ends_and_what_it_sent_is_cancelled(
    storage: Storage, both: Path
):
    await cancelled_at(storage, load_of(storage, both, rate=1_500), 100)
    sent = await in_queue(storage)
    assert 50 <= sent["spring"] < JOBS // 2
    found = cancelled.CancelledCampaigns(storage.files, storage.queue.name)
    await found.refresh()
    async for message in visible(storage.queue):
        campaign = json.loads(message.body)["campaign"]
        assert found.includes(campaign, message.enqueued_at) == (campaign == "spring")
    for campaign in ("spring", "autumn"):
        assert (await reader.counts(storage, campaign)).sent == sent[campaign]
    await run(load_of(storage, both))
    for campaign in ("spring", "autumn"):
        assert (await reader.counts(storage, campaign)).sent == JOBS // 2


async def test_a_template_of_a_cancelled_campaign_ends_and_a_later_load_runs(
    storage: Storage, tmp_path
):
    template = tmp_path / "t.yaml"
    template.write_text(TEMPLATE)
    await cancelled_at(storage, load_of(storage, template, rate=2_000), 100)
    template.write_text(TEMPLATE.replace("1000000", "100"))
    again = await run(load_of(storage, template, restart=True))
    assert again.sent == 100


async def test_a_load_that_the_storage_ends_has_its_count(
    storage: Storage, both: Path, monkeypatch
):
    queue = storage.queues["normal"]
    send = queue.send

    async def send_some(bodies: Iterable[str]) -> list[LeasedMessage]:
        if (await storage.queue.depth()).messages >= 5 * submit.BATCH:
            raise errors.FleetError("no answer")
        return await send(bodies)

    monkeypatch.setattr(queue, "send", send_some)
    with pytest.raises(errors.FleetError, match="no answer"):
        await run(load_of(storage, both, concurrency=1))
    sent = await in_queue(storage)
    for campaign in ("spring", "autumn"):
        assert (await reader.counts(storage, campaign)).sent == sent[campaign] == 80


async def test_a_load_that_is_stopped_and_goes_on_counts_each_job_once(
    storage: Storage, both: Path
):
    load = load_of(storage, both)
    await load.run(lambda confirmed: load.stop() if confirmed >= 500 else None)
    first = await reader.counts(storage, "spring")
    assert first.sent is not None
    assert 250 <= first.sent < JOBS // 2
    await run(load_of(storage, both))
    for campaign in ("spring", "autumn"):
        assert (await reader.counts(storage, campaign)).sent == JOBS // 2
    await run(load_of(storage, both, restart=True))
    assert (await reader.counts(storage, "spring")).sent == JOBS // 2, (
        "no job is another"
    )
