from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet import console
from imagefleet import errors
from imagefleet.job.message import read_job
from imagefleet.storage import dead_letter
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]

MISSING = errors.MissingFileError("there is no LoRA 'forest' [bold]")


@pytest.fixture
def failed_jobs(tmp_path: Path) -> StorageSettings:
    """Three failed jobs, one with an invalid message, and a message that is not a record."""
    settings = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")

    async def prepare() -> None:
        async with open_storage(settings) as storage:
            await storage.create()
            await add(storage, '{"prompt":"a cat","id":"cat","campaign":"spring"}')
            await add(storage, '{"prompt":"a \\u001b[31mdog [red]","id":"dog"}')
            await add(storage, "no job")
            await storage.poison.send(["what is this?"])

    asyncio.run(prepare())
    return settings


async def add(storage: Storage, body: str) -> None:
    await storage.queue.send([body])
    [message] = await storage.queue.receive(1, 60)
    try:
        job = read_job(message.body, message.id)
    except errors.JobError as error:
        await dead_letter.add(storage, message, None, error, "worker-1")
    else:
        await dead_letter.add(storage, message, job, MISSING, "worker-1")


def depths(settings: StorageSettings) -> tuple[int, int]:
    """Messages in the job queue and in the poison queue."""

    async def ask() -> tuple[int, int]:
        async with open_storage(settings) as storage:
            depths = [await queue.depth() for queue in (storage.queue, storage.poison)]
            return depths[0].messages, depths[1].messages

    return asyncio.run(ask())


def read(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == console.EXIT_DONE, result.stderr
    return json.loads(result.stdout)


def test_the_list_counts_errors_and_then_lists_jobs(
    in_process: Imagefleet, failed_jobs: StorageSettings
) -> None:
    listing = read(in_process("failed", "list", "--json", "--limit", "3"))

    assert listing["count"] == 4
    assert listing["errors"][0] == {
        "error": "MissingFileError",
        "reason": MISSING.message,
        "count": 2,
    }
    assert [job["id"] for job in listing["jobs"][:2]] == ["cat", "dog"]
    assert len(listing["jobs"]) == 3

    shown = in_process("failed", "list", "--limit", "1").stdout
    assert "4 failed jobs" in shown
    assert "[bold]" in shown
    assert "cat" in shown
    assert "dog" not in shown


def test_filters_narrow_the_list(in_process: Imagefleet, failed_jobs: StorageSettings) -> None:
    arguments = ["failed", "list", "--json", "--error", "FOREST", "--campaign", "spring"]

    assert [job["id"] for job in read(in_process(*arguments))["jobs"]] == ["cat"]
    assert "no failed jobs" in in_process("failed", "list", "--id", "none").stdout


def test_show_prints_the_job_itself(in_process: Imagefleet, failed_jobs: StorageSettings) -> None:
    [shown] = read(in_process("failed", "show", "cat", "--json"))["jobs"]

    assert shown["job"]["prompt"] == "a cat"
    assert (shown["error"], shown["attempts"], shown["worker"]) == (
        "MissingFileError",
        1,
        "worker-1",
    )


def test_a_prompt_cannot_send_control_sequences_to_the_terminal(
    imagefleet: Imagefleet, failed_jobs: StorageSettings
) -> None:
    shown = imagefleet("failed", "show", "dog", FORCE_COLOR="1").stdout

    assert "\x1b[31m" not in shown
    assert "dog [red]" in shown


def test_invalid_messages_and_foreign_messages_can_be_shown(
    in_process: Imagefleet, failed_jobs: StorageSettings
) -> None:
    jobs = read(in_process("failed", "list", "--json"))["jobs"]

    for job, body in zip(jobs[2:], ["no job", "what is this?"], strict=True):
        [shown] = read(in_process("failed", "show", job["id"], "--json"))["jobs"]
        assert shown["job"] == body


def test_an_unknown_id_is_one_line_and_exit_code_2(
    in_process: Imagefleet, failed_jobs: StorageSettings
) -> None:
    result = in_process("failed", "show", "none")

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "no failed job 'none'" in result.stderr


def test_replay_moves_only_the_selected_job(
    in_process: Imagefleet, failed_jobs: StorageSettings
) -> None:
    assert read(in_process("failed", "replay", "--id", "dog", "--dry-run", "--json")) == {
        "count": 1
    }
    assert depths(failed_jobs) == (0, 4)

    assert read(in_process("failed", "replay", "--id", "dog", "--json")) == {
        "replayed": 1,
        "refused": [],
    }
    assert depths(failed_jobs) == (1, 3)


def test_replaying_all_leaves_foreign_messages_and_reports_them(
    in_process: Imagefleet, failed_jobs: StorageSettings
) -> None:
    result = in_process("failed", "replay", "--all")

    assert "3 failed jobs replayed" in result.stdout
    assert "stays: it is not a record of a failed job" in result.stdout
    assert depths(failed_jobs) == (3, 1)


@pytest.mark.parametrize("command", ["replay", "discard"])
@pytest.mark.parametrize("filters", [[], ["--all", "--error", "x"]])
def test_an_unclear_selection_changes_nothing(
    in_process: Imagefleet, failed_jobs: StorageSettings, command: str, filters: list[str]
) -> None:
    result = in_process("failed", command, *filters)

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "choose the failed jobs" in result.stderr
    assert depths(failed_jobs) == (0, 4)


def test_discard_asks_before_it_deletes(
    in_process: Imagefleet, failed_jobs: StorageSettings
) -> None:
    unasked = in_process("failed", "discard", "--campaign", "spring")
    assert unasked.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "--yes" in unasked.stderr
    assert depths(failed_jobs) == (0, 4)

    assert read(in_process("failed", "discard", "--campaign", "spring", "--yes", "--json")) == {
        "discarded": 1,
        "refused": [],
    }
    assert depths(failed_jobs) == (0, 3)


def test_missing_storage_is_one_line_and_exit_code_2(in_process: Imagefleet) -> None:
    result = in_process("failed", "list", "--storage", "local:none")

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert len(result.stderr.splitlines()) == 1
