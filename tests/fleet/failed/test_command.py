import asyncio
import json
import re

import pytest

import made_records
from browsing import visible
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.records import reader
from imagefleet.records.log import RecordLog
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import PRIORITIES, StorageSettings
from in_process import Imagefleet, assert_refused, told

MISSING = errors.MissingFileError("there is no LoRA 'forest' [bold]")


@pytest.fixture
def failed_jobs(tmp_path) -> StorageSettings:
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
        failed = await made_records.dead_letter(
            storage, message, None, error, "worker-1"
        )
    else:
        failed = await made_records.dead_letter(
            storage, message, job, MISSING, "worker-1"
        )
    await RecordLog(storage.blobs, "worker-1").add([failed])
    await storage.queue.delete(message)


def depths(settings: StorageSettings) -> tuple[int, int]:
    """Messages in the job queue and in the poison queue."""

    async def ask() -> tuple[int, int]:
        async with open_storage(settings) as storage:
            depths = [await queue.depth() for queue in (storage.queue, storage.poison)]
            return depths[0].messages, depths[1].messages

    return asyncio.run(ask())


def test_the_list_counts_errors_and_then_lists_jobs(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    listing = told(in_process("failed", "--json", "--limit", "2"))

    assert listing["count"] == 3
    assert listing["errors"][0] == {
        "error": "MissingFileError",
        "reason": MISSING.message,
        "count": 2,
    }
    assert len(listing["jobs"]) == 2

    shown = in_process("failed", "--limit", "1", "spring").stdout
    assert "1 failed job" in shown
    assert "[bold]" in shown
    assert "cat" in shown
    assert "dog" not in shown


def test_errors_that_are_all_different_are_counted_without_a_line_for_each(
    in_process: Imagefleet,
    failed_jobs: StorageSettings,
    monkeypatch,
):
    monkeypatch.setattr("fleet.failed.jobs.MOST_KINDS", 1)

    listing = told(in_process("failed", "--json"))
    by_error = {each["error"]: each["count"] for each in listing["errors"]}
    assert len(by_error) == 2
    assert listing["count"] == sum(by_error.values()) == 3
    shown = in_process("failed").stdout
    assert re.search(
        rf"\(others\) +{by_error['(others)']} +--error narrows the list", shown
    )
    assert "3 failed jobs" in shown


def test_filters_narrow_the_list(in_process: Imagefleet, failed_jobs: StorageSettings):
    arguments = ["failed", "--json", "--error", "FOREST", "spring"]

    assert [job["id"] for job in told(in_process(*arguments))["jobs"]] == ["cat"]
    assert "no failed jobs" in in_process("failed", "spring", "--error", "none").stdout


def test_show_prints_the_job_itself(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    [shown] = told(in_process("failed", "spring/cat", "--json"))["jobs"]

    assert shown["job"]["prompt"] == "a cat"
    assert (shown["error"], shown["attempts"], shown["worker"]) == (
        "MissingFileError",
        1,
        "worker-1",
    )


def test_a_prompt_cannot_send_control_sequences_to_the_terminal(
    imagefleet: Imagefleet, failed_jobs: StorageSettings
):
    shown = imagefleet("failed", "default/dog", FORCE_COLOR="1").stdout

    assert "\x1b[31m" not in shown
    assert "dog [red]" in shown


def test_an_unknown_id_is_one_line_and_exit_code_2(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    assert_refused(in_process("failed", "spring/none"), "no failed job 'spring/none'")


def test_replay_moves_only_the_selected_job(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    preview = told(in_process("replay", "default/dog", "--dry-run", "--json"))
    assert preview == {
        "count": 1,
        "jobs": [{"campaign": "default", "error": "MissingFileError", "count": 1}],
        "prompts": ["a \x1b[31mdog [red]"],
        "refused": 0,
    }
    assert depths(failed_jobs) == (0, 4)

    assert told(in_process("replay", "default/dog", "--json")) == {
        "replayed": 1,
        "refused": [],
    }
    assert depths(failed_jobs) == (1, 3)


def test_a_replay_of_several_jobs_shows_them_and_asks(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    unasked = in_process("replay", "--all")
    assert_refused(unasked, "--yes")
    shown = in_process("replay", "--all", "--dry-run").stdout
    for printed in (unasked.stderr, shown):
        assert "2 jobs would be replayed" in printed
        assert re.search(r"spring +1 +MissingFileError", printed)
        assert "a \ufffd[31mdog [red]" in printed, "no control sequence"
        assert (
            "stays: its job is not valid for this version: the message is not JSON"
            in printed
        )
    assert depths(failed_jobs) == (0, 4)


def test_replaying_all_leaves_what_is_no_job_and_says_why(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    result = in_process("replay", "--all", "--yes")

    assert "2 jobs replayed" in result.stdout
    assert "stays: its job is not valid for this version" in result.stdout
    assert depths(failed_jobs) == (2, 2)


@pytest.mark.parametrize("command", ["replay", "discard"])
@pytest.mark.parametrize("filters", [[], ["--all", "--error", "x"]])
def test_an_unclear_selection_changes_nothing(
    in_process: Imagefleet,
    failed_jobs: StorageSettings,
    command: str,
    filters: list[str],
):
    assert_refused(in_process(command, *filters), "choose the failed jobs")
    assert depths(failed_jobs) == (0, 4)


def test_discard_asks_before_it_deletes(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    assert_refused(in_process("discard", "spring"), "--yes")
    assert depths(failed_jobs) == (0, 4)

    assert told(in_process("discard", "spring", "--yes", "--json")) == {
        "discarded": 1,
        "refused": [],
    }
    assert depths(failed_jobs) == (0, 3)


# With a signing key


THIEFS = "a thief's house"


@pytest.fixture
def signed_jobs(
    failed_jobs: StorageSettings, tmp_path
) -> tuple[StorageSettings, SigningKey]:
    """As `failed_jobs`, with two signed jobs and what a thief of a worker's token adds."""
    key = SigningKey.create(tmp_path / "key.pem")

    async def prepare() -> None:
        async with open_storage(failed_jobs) as storage:
            signer = JobSigner(key, storage.scope)
            other = JobSigner(SigningKey.create(tmp_path / "x"), storage.scope)
            for name in ("fox", "owl"):
                body = Job(prompt=f"a {name}", id=name, campaign="c").to_message(signer)
                await add(storage, body)
            [real] = [
                record
                async for record in reader.ended(storage, "c")
                if record.id == "fox"
            ]
            signed = json.loads(real.body or "")
            forged = [
                Job(prompt=THIEFS, id="unsigned").to_message(),
                json.dumps({**signed, "prompt": THIEFS}),
                json.dumps({**signed, "id": "another"}),
                Job(prompt=THIEFS, id="x").to_message(other),
            ]
            records = [
                real.model_copy(
                    update={"source": f"m{number}", "id": f"f{number}", "body": body}
                )
                for number, body in enumerate(forged)
            ]
            await RecordLog(storage.blobs, "thief").add(records)

    asyncio.run(prepare())
    return failed_jobs, key


def prompts(settings: StorageSettings) -> list[str]:
    async def read_all() -> list[str]:
        async with open_storage(settings) as storage:
            return sorted(
                [
                    json.loads(each.body)["prompt"]
                    async for each in visible(storage.queue)
                ]
            )

    return asyncio.run(read_all())


@pytest.mark.parametrize("variable", ["SIGNING", "TRUSTED"])
def test_what_a_thief_put_there_does_not_come_back_as_jobs(
    in_process: Imagefleet,
    signed_jobs: tuple[StorageSettings, SigningKey],
    tmp_path,
    monkeypatch,
    variable: str,
):
    settings, key = signed_jobs
    value = str(tmp_path / "key.pem") if variable == "SIGNING" else key.public
    monkeypatch.setenv(f"IMAGEFLEET_{variable}_KEY", value)

    preview = told(in_process("replay", "--all", "--dry-run", "--json"))
    assert (preview["count"], preview["refused"]) == (2, 7)
    assert sorted(preview["prompts"]) == ["a fox", "a owl"]

    result = in_process("replay", "--all", "--yes")
    assert "2 jobs replayed" in result.stdout
    assert result.stdout.count("stays: it is not signed with your key") == 7
    assert prompts(settings) == ["a fox", "a owl"]

    assert "--yes" in in_process("discard", "--all").stderr
    assert told(in_process("discard", "--all", "--dry-run", "--json"))["count"] == 7
    assert told(in_process("discard", "--all", "--yes", "--json")) == {
        "discarded": 7,
        "refused": [],
    }
    assert depths(settings) == (2, 0)


def test_a_replay_chooses_the_priority_and_is_normal_without(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    async def waiting() -> dict[str, int]:
        async with open_storage(failed_jobs) as storage:
            return {
                name: (await each.depth()).messages
                for name, each in storage.queues.items()
            }

    before = asyncio.run(waiting())
    assert_refused(
        in_process("replay", "spring/cat", "--priority", "urgent"),
        "--priority: 'urgent' is not one of 'high', 'normal', 'low'",
    )
    for arguments in (("spring/cat", "--priority", "low"), ("default/dog",)):
        assert (
            told(in_process("replay", *arguments, "--yes", "--json"))["replayed"] == 1
        )
    after = asyncio.run(waiting())
    sent = {name: after[name] - before[name] for name in PRIORITIES}
    assert sent == {"high": 0, "normal": 1, "low": 1}


def test_a_preview_shows_the_beginning_of_a_prompt_without_spaces(
    in_process: Imagefleet, failed_jobs: StorageSettings
):
    async def prepare() -> None:
        async with open_storage(failed_jobs) as storage:
            await add(storage, json.dumps({"prompt": "紅" * 200, "id": "red"}))

    asyncio.run(prepare())
    shown = in_process("replay", "default/red", "--dry-run").stdout
    assert "紅" * 150 + "…" in shown.replace("\n", "")
