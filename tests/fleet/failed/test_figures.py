"""Figures of campaigns whose failed jobs are mended and replayed, by real commands and workers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagefleet.records.ledger import Ledger
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from messages import draw_unless_broken

JOBS = (
    {"prompt": "a house", "id": "a", "campaign": "spring"},
    {"prompt": "something broken", "id": "b", "campaign": "spring"},
)

Run = Callable[..., Any]


@pytest.fixture
def run(in_process, storage_settings: StorageSettings, monkeypatch) -> Run:
    for name in ("storage", "queue", "container", "files_container"):
        value = str(getattr(storage_settings, name))
        monkeypatch.setenv(f"IMAGEFLEET_{name.upper()}", value)

    def run(*arguments: str) -> str:
        ended = in_process(*arguments)
        assert ended.returncode == 0, ended.stderr
        found: str = ended.stdout
        return found

    return run


@pytest.fixture
def work(run_worker, storage_settings: StorageSettings) -> Callable[[str], None]:
    """Runs a worker until the queue is empty."""

    async def until_empty(name: str) -> None:
        async with open_storage(storage_settings) as opened:
            await run_worker(name, draw_unless_broken, opened)

    return lambda name: asyncio.run(until_empty(name))


def figures(run: Run) -> dict[str, int]:
    """The row of the campaign, whose texts say that nothing is left out."""
    assert "not in these figures" not in run("status", "spring")
    (row,) = json.loads(run("status", "spring", "--json"))["campaigns"]
    report = json.loads(run("report", "spring", "--json"))
    assert (report["images"], report["failed"]) == (row["images"], row["failed"])
    assert report["damaged"] == 0
    names = ("sent", "completed", "failed", "pending", "unknown")
    return {name: row[name] for name in names}


@pytest.mark.parametrize("way", ["replay", "load", "load and discard"])
def test_rows_add_up_when_a_failed_job_is_mended(
    run,
    work: Callable[[str], None],
    storage_settings: StorageSettings,
    tmp_path: Path,
    way: str,
):
    lines = "".join(f"{json.dumps(each)}\n" for each in JOBS)
    (tmp_path / "jobs.jsonl").write_text(lines)
    run("load", "jobs.jsonl")
    work("w1")
    assert figures(run) == {
        "sent": 2, "completed": 1, "failed": 1, "pending": 0, "unknown": 0
    }  # fmt: skip

    if way == "replay":
        run("replay", "spring/b", "--set", "prompt=a castle", "--yes")
    else:
        mended = run("failed", "--export").replace("something broken", "a castle")
        (tmp_path / "fix.jsonl").write_text(mended)
        run("load", "fix.jsonl")
    if way == "load and discard":
        run("discard", "spring/b", "--yes")
    assert figures(run) == {
        "sent": 2, "completed": 1, "failed": 0, "pending": 1, "unknown": 0
    }  # fmt: skip

    async def sent() -> int | None:
        async with open_storage(storage_settings) as opened:
            return await Ledger(opened, "spring").count()

    assert asyncio.run(sent()) == 2

    work("w2")
    assert figures(run) == {
        "sent": 2, "completed": 2, "failed": 0, "pending": 0, "unknown": 0
    }  # fmt: skip
