import asyncio
import io
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import forks
import polling
from browsing import visible
from cli import console
from imagefleet.records.ledger import Ledger
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings, job_queue
from in_process import Imagefleet, assert_refused
from storages import flags

TEMPLATE = """
prompt: a {noun}
count: 250
lists: {noun: [cat, dog, fox]}
"""


@pytest.fixture
def template(tmp_path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(TEMPLATE)
    return path


def ids_in(settings: StorageSettings) -> Counter[str]:
    async def browse() -> Counter[str]:
        async with open_storage(settings) as storage:
            return Counter(
                [json.loads(each.body)["id"] async for each in visible(storage.queue)]
            )

    return asyncio.run(browse())


def settings_for(folder: Path) -> StorageSettings:
    return StorageSettings(storage=f"local:{folder / 'imagefleet-data'}")


def test_a_dry_run_prints_ten_jobs_and_touches_nothing(
    in_process: Imagefleet, template: Path, tmp_path
):
    first, again = (in_process("load", "t.yaml", "--dry-run") for _ in range(2))

    jobs = [json.loads(line) for line in first.stdout.splitlines()]
    assert len({job["id"] for job in jobs}) == 10
    assert first.stdout == again.stdout
    assert list(tmp_path.iterdir()) == [template]


def test_a_finished_load_is_repeated_only_on_request(
    in_process: Imagefleet, template: Path, tmp_path
):
    in_process("load", "t.yaml")
    again = in_process("load", "t.yaml")
    assert again.returncode == console.EXIT_DONE
    assert "0 new, 250 as before" in again.stderr
    assert "nothing was sent; --restart sends them again" in again.stderr
    assert ids_in(settings_for(tmp_path)).total() == 250

    more = in_process("load", "t.yaml", "--count", "260", "--json")
    assert json.loads(more.stdout)["sent"] == 10
    restarted = in_process("load", "t.yaml", "--restart", "--json")
    assert json.loads(restarted.stdout)["sent"] == 250
    assert set(ids_in(settings_for(tmp_path)).values()) == {1, 2}


def test_invalid_lines_are_refused_before_the_queue_is_created(
    in_process: Imagefleet, tmp_path
):
    (tmp_path / "jobs.jsonl").write_text('{"prompt":"a"}\nnonsense\n{"prompt":"b"}\n')
    assert_refused(in_process("load", "jobs.jsonl"), "line 2: the message is not JSON")
    assert [each.name for each in tmp_path.iterdir()] == ["jobs.jsonl"]

    skipped = in_process("load", "jobs.jsonl", "--skip-invalid", "--json")
    assert (
        json.loads(skipped.stdout)["sent"],
        json.loads(skipped.stdout)["invalid"],
    ) == (2, 1)
    assert "line 2 is skipped" in skipped.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.yaml"], "none.yaml cannot be read"),
        (["jobs.doc"], "must end in"),
        (
            ["jobs.txt", "--format", "word"],
            "--format word: should be jsonl|json|csv|txt|parquet",
        ),
        (["t.yaml", "--campaign", "../x"], "--campaign: use 1 to 128 letters"),
        (["jobs.csv"], "jobs.csv cannot be read: No such file"),
        (["t.yaml", "--rate", "0"], "--rate"),
        (["t.yaml", "--rate", "inf"], "--rate"),
        (["t.yaml", "--count", "0"], "--count"),
        (["t.yaml", "--concurrency", "many"], "--concurrency"),
        (["t.yaml", "--storage", "local:t.yaml"], "t.yaml is a file, not a folder"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    in_process: Imagefleet, template: Path, arguments: list[str], sentence: str
):
    result = in_process("load", *arguments)

    assert_refused(result, sentence)
    assert len(result.stderr.splitlines()) == 1


def wait_until_sent(settings: StorageSettings, jobs: int) -> None:
    """Waits until the ledger has so many jobs."""

    async def wait() -> None:
        async with open_storage(settings) as storage:

            async def count() -> int:
                return await Ledger(storage, "default").count() or 0

            await polling.until(count, lambda sent: sent >= jobs)

    asyncio.run(wait())


def test_a_killed_load_goes_on_where_it_was_and_loses_nothing(
    start: Callable[..., forks.Fork],
    in_process: Imagefleet,
    template: Path,
    storage_settings: StorageSettings,
):
    given = ("load", "t.yaml", "--count", "500", *flags(storage_settings))
    for sent in (50, 150):  # the second one goes on after the first
        process = start(*given, "--verify-share", "0", "--rate", "100")
        wait_until_sent(storage_settings, sent)
        process.kill()
        process.wait()
    resumed = in_process(*given, "--verify-share", "0")
    assert resumed.returncode == console.EXIT_DONE, resumed.stderr

    ids = ids_in(storage_settings)
    assert len(ids) == 500
    assert ids.total() < 1_000, "what was noted is not sent again"


def test_ctrl_c_notes_what_was_sent_and_says_how_to_go_on(
    start: Callable[..., forks.Fork], template: Path, tmp_path
):
    process = start("load", "t.yaml", "--count", "30000", "--rate", "1000")
    wait_until_sent(settings_for(tmp_path), 200)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()

    assert process.returncode == console.EXIT_INTERRUPTED
    sent = ids_in(settings_for(tmp_path)).total()
    assert f"stopped after {sent:,} jobs; the same command goes on there" in printed


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("", "jobs.jsonl is empty: nothing was sent"), ("\n \n", "no jobs in jobs.jsonl")],
)
def test_a_file_without_jobs_is_reported(
    in_process: Imagefleet, tmp_path, content: str, sentence: str
):
    (tmp_path / "jobs.jsonl").write_text(content)

    result = in_process("load", "jobs.jsonl")

    assert result.returncode == console.EXIT_DONE
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_load_that_runs_already_is_not_begun_again(
    in_process: Imagefleet, template: Path, tmp_path
):
    with console.only_one(tmp_path / "t.yaml", "jobs"):
        second = in_process("load", "t.yaml")
        elsewhere = in_process("load", "t.yaml", "--queue", "other")

    assert_refused(second, "another `imagefleet` is at work with t.yaml")
    assert elsewhere.returncode == console.EXIT_DONE
    refused = in_process("load", "t.yaml")
    assert "sent before, but there is no queue" in refused.stderr
    assert in_process("load", "t.yaml", "--restart").returncode == console.EXIT_DONE


def standard_input(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def test_jobs_come_from_standard_input(in_process: Imagefleet, tmp_path, monkeypatch):
    given = '{"prompt":"a"}\n{"prompt":"b","id":"mine"}\n'
    monkeypatch.setattr(sys, "stdin", standard_input(given))
    printed = in_process("load", "-", "--json").stdout

    assert json.loads(printed)["sent"] == 2
    assert "mine" in ids_in(settings_for(tmp_path))


def test_an_invalid_line_of_standard_input_ends_the_load_before_it_begins(
    in_process: Imagefleet, monkeypatch
):
    given = '{"prompt":"a"}\n' * 130 + "bad\n"
    monkeypatch.setattr(sys, "stdin", standard_input(given))

    assert_refused(
        in_process("load", "-"),
        "standard input has invalid jobs; nothing was sent",
        "line 131: ",
    )


def test_a_priority_chooses_the_queue(
    in_process: Imagefleet, template: Path, storage_settings: StorageSettings
):
    result = in_process(
        "load", "t.yaml", "--priority", "high", "--json", *flags(storage_settings)
    )

    summary = json.loads(result.stdout)
    high = storage_settings.queues_of(None)["high"]
    assert (summary["sent"], summary["queue"]) == (250, high)

    async def filled() -> list[str]:
        async with open_storage(storage_settings) as storage:
            depth = await storage.queue.depth()
            return [name for name, each in depth.by_queue.items() if each.messages]

    assert asyncio.run(filled()) == [high]
    again = in_process("load", "t.yaml", *flags(storage_settings))
    assert "250 as before" in again.stderr


def test_the_queues_that_jobs_of_models_are_sent_to_are_named(
    in_process: Imagefleet, storage_settings: StorageSettings, tmp_path
):
    models = [None, "one", "one", *(f"m{number}" for number in range(6))]
    jobs = [{"prompt": "a"} | ({"model": model} if model else {}) for model in models]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    ours = ("--verify-share", "0", *flags(storage_settings))
    result = in_process("load", str(file), *ours)

    of_one = job_queue(storage_settings.queue, "one")
    assert result.returncode == 0, result.stderr
    assert (
        f"9 jobs sent to {of_one} (2), {storage_settings.queue} (1), " in result.stderr
    )
    result = in_process("load", str(file), "--restart", "--json", *ours)
    queues = json.loads(result.stdout)["queues"]
    assert (len(queues), sum(queues.values()), queues[of_one]) == (8, 9, 2)


def test_a_workers_priority_on_saladcloud_is_not_that_of_the_jobs(
    in_process: Imagefleet, template: Path, monkeypatch
):
    monkeypatch.setenv("IMAGEFLEET_PRIORITY", "high")
    assert json.loads(in_process("load", "t.yaml", "--json").stdout)["queue"] == "jobs"
