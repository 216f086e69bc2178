"""Loads and clients whose storage is far away, and loses replies: sent is what there is to send."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import imagefleet
import proxy
from imagefleet import aio
from imagefleet.records import reader
from imagefleet.records.ledger import Ledger
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from loadgen import sources
from loadgen.caption_sweep import CaptionFile, SweepSource, groups
from loadgen.load import Load
from loadgen.rejects import Report
from loadgen.settings import LoadSettings
from proxy import Fault, FaultProxy

JOBS = 240

#: Share of the replies that are lost on their way back.
LOST = 0.1


@pytest.fixture
async def far_settings(
    azurite_settings: StorageSettings, monkeypatch, request
) -> AsyncIterator[StorageSettings]:
    """Azurite so many seconds away, and a tenth of its replies lost."""
    delay_seconds, seed = request.param
    monkeypatch.setattr(proxy, "DELAY_SECONDS", delay_seconds)
    chance = random.Random(seed)

    def fault() -> Fault:
        return "lose reply" if chance.random() < LOST else "delay"

    behind = FaultProxy(fault)
    async with behind.running(azurite_settings.storage):
        yield azurite_settings.model_copy(update={"storage": behind.address})


def source(kind: str, folder: Path) -> Any:
    if kind == "sweep":
        captions = folder / "captions.txt"
        captions.write_text("".join(f"caption {number}\n" for number in range(120)))
        combined = groups(["5", "7"], ["Euler a"], ["20"], [None], None, [None])
        return SweepSource(CaptionFile(captions), combined, "spring")
    if kind == "template":
        file = folder / "jobs.yaml"
        file.write_text(f"count: {JOBS}\nprompt: a house\n")
    else:
        file = folder / "jobs.jsonl"
        file.write_text("".join(f'{{"prompt": "{job}"}}\n' for job in range(JOBS)))
    return sources.open_source(
        str(file),
        campaign="spring",
        report=Report(False, lambda _: None, lambda _: None, ""),
    )


async def sent(settings: StorageSettings) -> tuple[int | None, int | None]:
    """What the ledger's last frame says, and what the figures are made of."""
    async with open_storage(settings) as storage:
        counted = await reader.counts(storage, "spring")
        return await Ledger(storage, "spring").count(), counted.sent


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "template", "file", "client"])
@pytest.mark.parametrize(
    "far_settings",
    [(0.0, 1), (0.2, 2), (1.0, 3)],
    ids="{0[0]} s".format,
    indirect=True,
)
async def test_sent_is_what_there_is_to_send_however_far_the_storage_is(
    far_settings: StorageSettings,
    azurite_settings: StorageSettings,
    tmp_path: Path,
    kind: str,
):
    if kind == "client":
        names = ("storage", "queue", "container", "files_container")
        options = {name: getattr(far_settings, name) for name in names}
        jobs = [imagefleet.Job(prompt=str(number)) for number in range(JOBS)]
        async with aio.connect(**options) as fleet:
            await fleet.submit(jobs, campaign="spring")
    else:
        async with open_storage(far_settings) as storage:
            load = Load(
                storage,
                source(kind, tmp_path),
                LoadSettings(storage=far_settings.storage, rate=200),
            )
            await load.run(lambda _: None)
    assert await sent(azurite_settings) == (JOBS, JOBS)
