"""After all that a stolen worker's token allows, the answers about honest jobs are as before."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import thief
from imagefleet import aio
from imagefleet.job.message import read_job
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings

Imagefleet = Callable[..., Any]
RunWorker = Callable[..., Awaitable[None]]


@pytest.fixture
def storage_settings(azurite_settings: StorageSettings) -> StorageSettings:
    """Tokens are Azure's."""
    return azurite_settings


@pytest.fixture
def ask(
    in_process: Imagefleet, storage_settings: StorageSettings, monkeypatch: pytest.MonkeyPatch
) -> Imagefleet:
    for name in ("storage", "queue", "container", "files_container"):
        monkeypatch.setenv(f"IMAGEFLEET_{name.upper()}", str(getattr(storage_settings, name)))

    def run(*arguments: str) -> Any:
        return in_process(*arguments)

    return run


def bodies(*ids: str, **fields: object) -> dict[str, str]:
    """Jobs of the campaign `spring`."""
    known = {"campaign": "spring", "steps": 20, **fields}
    return {each: json.dumps({"id": each, "prompt": f"a house {each}", **known}) for each in ids}


@pytest.fixture
async def loot(
    storage: Storage, storage_settings: StorageSettings, run_worker: RunWorker
) -> thief.Loot:
    """An honest campaign: some jobs drawn, all of them twice, one failed, and some that wait."""
    drawn = bodies("a", "b", "c", "d")
    failed = bodies("bad", prompt="a house <lora:none:1>")
    waiting = bodies("late", "later")
    async with aio.connect(**storage_settings.model_dump(exclude_defaults=True)) as fleet:
        for jobs in ({**drawn, **failed}, waiting):
            await fleet.submit([read_job(body, "none") for body in jobs.values()])
            if jobs is not waiting:
                await run_worker("w1")
                await storage.queue.send([*bodies(*drawn, verify=True).values()])
                await run_worker("w2")
    return thief.Loot("spring", drawn, failed, waiting, ("w1", "w2"))


#: What changes by itself, or is what a thief may change: the number of what does not fit.
VOLATILE = {
    *("misfits", "unfit", "unknown", "damaged", "folder", "at", "oldest_age_seconds", "damage"),
    *("unfit_records", "unrecorded", "messages"),
    *("images_per_second", "seconds", "made_at", "last_at", "first_at", "seconds_left"),
}


#: Of a report, what no second drawing changes: by whom, and for how long it was drawn, is what
#: its record says, as `SECURITY.md` has it.
COUNTED = ("jobs", "images", "images_redelivered", "failed")


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: stable(each) for name, each in value.items() if name not in VOLATILE}
    return [stable(each) for each in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The values that are others, by the way to them."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in {**before, **after}:
            found |= differences(before.get(name), after.get(name), f"{where}/{name}")
        return found
    return {} if before == after else {where: (before, after)}


def pictures(folder: Path) -> dict[str, str]:
    """The hash of each picture that was written."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.png"))
    }


def answers(ask: Imagefleet, loot: thief.Loot, tmp_path: Path, run: str) -> dict[str, Any]:
    """What each command says about the honest campaign and its jobs."""
    found: dict[str, Any] = {}
    honest = {*loot.drawn, *loot.failed, *loot.waiting}

    def told(*arguments: str) -> Any:
        result = ask(*arguments, "--json")
        assert result.returncode in {0, 4}, (arguments, result.stderr)
        return stable(json.loads(result.stdout))

    for job_id in sorted(honest):
        found[f"job {job_id}"] = told("job", f"spring/{job_id}")
    status = told("status", "spring")
    found["status spring"] = {name: status[name] for name in status if name != "queues"}
    found["campaigns"] = [
        each for each in told("status")["campaigns"] if each.get("campaign", "spring") == "spring"
    ]
    lines = ask("results", "spring", "--json").stdout.splitlines()
    rows = [stable(row) for row in map(json.loads, lines) if row["id"] in honest]
    found["results"] = sorted(rows, key=lambda row: (row["id"], row["outcome"]))
    ask("results", "spring", "--download", f"images-{run}")
    found["download"] = pictures(tmp_path / f"images-{run}")
    ask("export", "spring", f"shards-{run}", "--format", "imagefolder")
    found["export"] = pictures(tmp_path / f"shards-{run}")
    text = next((tmp_path / f"shards-{run}").rglob("metadata.jsonl")).read_text()
    exported = [stable(json.loads(line)) for line in text.splitlines()]
    found["exported"] = [
        {name: row[name] for name in ("id", "prompt", "worker")} for row in exported
    ]
    report = told("report", "spring")
    found["report"] = {name: report[name] for name in COUNTED}
    found["failed"] = told("failed", "spring")
    verify = told("verify", "spring")
    found["accused"] = [
        each["worker"]
        for each in verify["workers"]
        if each["draws_wrong"]
        and each["compared"] == each["different"]
        and each["worker"] in loot.workers
    ]
    return found


#: One after the other in one storage.
TOGETHER = pytest.param([*thief.ATTACKS], "worker", id="all of them")


def alone() -> list[Any]:
    return [
        pytest.param([attack], role, id=f"{attack}-{role}", marks=pytest.mark.slow)
        for attack in thief.ATTACKS
        for role in ("worker", "chains")
    ]


@pytest.mark.parametrize(("attacks", "role"), [TOGETHER, *alone()])
async def test_no_answer_about_honest_jobs_changes(
    attacks: list[str],
    role: str,
    ask: Imagefleet,
    loot: thief.Loot,
    storage: Storage,
    storage_settings: StorageSettings,
    tmp_path: Path,
) -> None:
    worker = ROLES["worker"]
    before = await asyncio.to_thread(answers, ask, loot, tmp_path, "before")
    async with thief.stealing(
        storage_settings, worker.for_chains() if role == "chains" else worker
    ) as stolen:
        for attack in attacks:
            await thief.ATTACKS[attack](stolen, loot)

    after = await asyncio.to_thread(answers, ask, loot, tmp_path, "after")

    assert before["download"].keys() == {f"{each}.png" for each in loot.drawn}
    assert not differences(before, after)


async def test_the_second_job_of_a_name_fails_and_the_first_keeps_its_picture(
    storage: Storage, run_worker: RunWorker
) -> None:
    first, second = (json.dumps({"id": "a", "prompt": text}) for text in ("a fox", "an owl"))
    await storage.create()
    for body in (first, second):
        await storage.queue.send([body])
        await run_worker("w1")

    [message] = [each async for each in storage.poison.browse()]
    failure = json.loads(message.body)
    assert "NameTakenError" in message.body
    assert "an owl" in message.body
    assert failure
    found = await storage.blobs.metadata("default/a.png") or {}
    assert found["digest"] == read_job(first, "none").stage_digest
