"""A load of what was sent before: the same, changed and new jobs are told apart."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from browsing import visible
from cli import console
from imagefleet.job.message import fields_if_any
from imagefleet.records import ledger
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from storages import flags, local_only

MONDAY = "id,prompt\n1,a red house\n2,a blue fish\n"
TUESDAY = "id,prompt\n1,a cat\n2,a dog\n"


@pytest.fixture
def load(
    in_process: Imagefleet, tmp_path, storage_settings: StorageSettings
) -> Imagefleet:
    """Writes a file and loads it: into the same storage, whatever the file."""

    def load(name: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).write_text(text)
        ours = ("--verify-share=0", "--campaign=spring", *flags(storage_settings))
        return in_process("load", name, *options, *ours)

    return load


def within(
    settings: StorageSettings, work: Callable[[Storage], Coroutine[Any, Any, Any]]
) -> Any:
    async def run() -> Any:
        async with open_storage(settings) as storage:
            return await work(storage)

    return asyncio.run(run())


def prompts_in(settings: StorageSettings) -> list[str]:
    async def browse(storage: Storage) -> list[str]:
        return [
            fields_if_any(each.body)["prompt"] async for each in visible(storage.queue)
        ]

    return sorted(within(settings, browse))


def sent_of(settings: StorageSettings) -> int:
    found: int = within(
        settings, lambda storage: ledger.Ledger(storage, "spring").count()
    )
    return found


def test_ids_of_monday_with_tuesdays_prompts_are_refused_at_the_first(
    load: Imagefleet, storage_settings: StorageSettings
):
    load("monday.csv", MONDAY)
    assert_refused(
        load("tuesday.csv", TUESDAY),
        "the job spring/1, number 1, was sent before with another content",
    )
    assert prompts_in(storage_settings) == ["a blue fish", "a red house"]
    assert sent_of(storage_settings) == 2


def test_one_changed_three_new_and_the_others_as_before(
    load: Imagefleet, storage_settings: StorageSettings
):
    rows = [f"{number},prompt {number}" for number in range(197)]
    load("jobs.csv", "\n".join(["id,prompt", *rows]))
    rows[5] = "5,another prompt"
    edited = "\n".join(
        ["id,prompt", *rows, *(f"new-{number},a" for number in range(3))]
    )
    dry = load("jobs.csv", edited, "--dry-run")
    done = load("jobs.csv", edited, "--new-only", "--json")

    assert "1 changed, 3 new, 196 as before" in dry.stderr
    summary = json.loads(done.stdout)
    figures = ("sent", "changed", "new", "as_before", "confirmed")
    assert [summary[name] for name in figures] == [3, 1, 3, 196, 200]
    assert "another prompt" not in prompts_in(storage_settings)
    assert sent_of(storage_settings) == 200


def test_a_row_that_is_added_to_a_loaded_file_is_one_new_job_with_or_without_ids(
    load: Imagefleet, storage_settings: StorageSettings
):
    load("prompts.txt", "a house\na fish\n")
    more = load("prompts.txt", "a house\na fish\na boat\n", "--json")

    assert [json.loads(more.stdout)[name] for name in ("sent", "new", "as_before")] == [
        1,
        1,
        2,
    ]
    assert prompts_in(storage_settings) == ["a boat", "a fish", "a house"]
    again = load("prompts.txt", "a house\na fish\na boat\n", "--restart", "--json")
    assert json.loads(again.stdout)["sent"] == 3
    assert sent_of(storage_settings) == 3, "jobs, not messages"


def test_a_file_of_changed_jobs_that_are_left_out_is_not_called_empty(
    load: Imagefleet,
):
    load("monday.csv", MONDAY)
    left_out = load("tuesday.csv", TUESDAY, "--new-only")
    assert left_out.returncode == console.EXIT_DONE
    assert left_out.stderr.split("\n")[:2] == [
        "2 changed, 0 new, 0 as before",
        "nothing was sent",
    ]


def test_the_second_row_of_one_id_is_refused_and_the_first_is_sent_once(
    load: Imagefleet, storage_settings: StorageSettings
):
    assert_refused(
        load("jobs.csv", "id,prompt\n1,a cat\n2,a fish\n1,a dog\n", "--restart"),
        "the job spring/1, number 3, was sent before with another content",
    )
    assert prompts_in(storage_settings) == ["a cat", "a fish"]


def test_the_same_row_twice_is_one_job(
    load: Imagefleet, storage_settings: StorageSettings
):
    twice = load("jobs.csv", "id,prompt\n1,a cat\n1,a cat\n", "--json")
    assert json.loads(twice.stdout)["sent"] == 1
    assert prompts_in(storage_settings) == ["a cat"]


def test_a_failed_job_that_was_exported_and_mended_is_sent(
    load: Imagefleet, storage_settings: StorageSettings
):
    load("monday.csv", MONDAY)
    mended = {"id": "1", "prompt": "a cat", "failure": {"error": "JobError"}}
    done = load("fix.jsonl", json.dumps(mended))
    assert done.returncode == console.EXIT_DONE, done.stderr
    assert "a cat" in prompts_in(storage_settings)


@local_only
def test_a_storage_that_was_deleted_is_loaded_anew(
    load: Imagefleet, storage_settings: StorageSettings
):
    load("monday.csv", MONDAY)
    shutil.rmtree(storage_settings.storage.removeprefix("local:"))

    again = load("monday.csv", MONDAY, "--json")

    assert again.returncode == console.EXIT_DONE
    assert json.loads(again.stdout)["sent"] == 2
    assert prompts_in(storage_settings) == ["a blue fish", "a red house"]
