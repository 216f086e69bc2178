"""Loads and clients whose storage is far away, and loses replies: sent is what there is to send.

FAR_TIMES=20 pytest tests/loadgen/test_far_storage.py      # each of them twenty times
"""

import asyncio
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import imagefleet
from evaluation.sweep.source import CaptionFile, SweepSource, all_groups
from imagefleet import aio, errors
from imagefleet.records import reader
from imagefleet.records.ledger import Ledger
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from loadgen import sources
from loadgen.load import Load
from loadgen.rejects import Report
from loadgen.settings import LoadSettings
from proxy import Fault, FaultProxy

JOBS = 240

#: Share of the replies that are lost on their way back.
LOST = 0.1

#: Seconds that a request is on its way.
DELAYS = (0.0, 0.05, 0.2, 1.0)

KINDS = ("sweep", "template", "file", "client")

#: Rounds of each kind at each delay, all at the same time: most of their time is waiting.
TIMES = int(os.environ.get("FAR_TIMES", "1"))


def source(kind: str, folder: Path) -> Any:
    if kind == "sweep":
        captions = folder / "captions.txt"
        captions.write_text(
            "".join(f"caption {number}\n" for number in range(JOBS // 2))
        )
        combined = all_groups(["5", "7"], ["Euler a"], ["20"], [None], None, [None])
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


async def load(kind: str, far: StorageSettings, folder: Path) -> None:
    """Sends the jobs of the campaign `spring`."""
    if kind == "client":
        names = ("storage", "queue", "container", "files_container")
        options = {name: getattr(far, name) for name in names}
        ids = map(str, range(JOBS))
        jobs = [imagefleet.Job(id=job, prompt=f"house {job}") for job in ids]
        async with aio.connect(**options) as fleet:
            await fleet.submit(jobs, campaign="spring")
        return
    async with open_storage(far) as storage:
        settings = LoadSettings(storage=far.storage, rate=200)
        await Load(storage, source(kind, folder), settings).run(lambda _: None)


@pytest.mark.slow
@pytest.mark.timeout(600 * TIMES)
async def test_sent_is_what_there_is_to_send_however_far_the_storage_is(
    azurite_settings: StorageSettings,
    delete_queues: Callable[[str], None],
    tmp_path: Path,
):
    wrong: list[str] = []

    async def run(number: int, kind: str, delay_seconds: float) -> None:
        name = f"{azurite_settings.queue}-{number:03}"
        own = {"queue": name, "container": name, "files_container": f"{name}-files"}
        settings = azurite_settings.model_copy(update=own)
        (folder := tmp_path / str(number)).mkdir()
        chance = random.Random(number)

        def fault() -> Fault:
            return "lose reply" if chance.random() < LOST else "delay"

        behind = FaultProxy(fault, delay_seconds=delay_seconds)
        async with behind.running(settings.storage):
            far = settings.model_copy(update={"storage": behind.address})
            gave_up = 0
            while True:  # a call of half a minute, on a busy machine, is given up
                try:
                    await load(kind, far, folder)
                    break
                except errors.TransientError:
                    gave_up += 1
            found = await sent(settings)
        # The ledger's last frame counts exactly what one writer noted that ended well.
        is_right = found[1] == JOBS if gave_up else found == (JOBS, JOBS)
        if not is_right:
            run_of = f"{kind}, {delay_seconds} s away, seed {number}"
            wrong.append(f"{run_of}, given up {gave_up} times: {found}")
        # Azurite slows down with every message in any queue.
        await asyncio.to_thread(delete_queues, name)

    numbers = itertools.count()
    for _ in range(TIMES):
        async with asyncio.TaskGroup() as runs:
            for kind, delay_seconds in itertools.product(KINDS, DELAYS):
                runs.create_task(run(next(numbers), kind, delay_seconds))
    assert wrong == []
