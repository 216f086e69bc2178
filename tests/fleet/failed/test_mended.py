"""Failed jobs that are mended: exported and loaded again, or changed as they are replayed."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

import made_records
import signers
from browsing import visible
from cli import console
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.records import ledger
from imagefleet.records.log import RecordLog
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused

Result = TypeVar("Result")
Within = Callable[[Callable[[Storage], Coroutine[Any, Any, Result]]], Result]

TOO_MANY_STEPS = (
    '{"prompt":"a cat","id":"cat","campaign":"spring",'
    '"steps":500,"sampler_index":"DDIM"}'
)


@pytest.fixture
def within(tmp_path) -> Within[Any]:
    """Runs a coroutine function with the storage of the test's folder."""

    def run(work: Callable[[Storage], Coroutine[Any, Any, Any]]) -> Any:
        async def do() -> Any:
            settings = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")
            async with open_storage(settings) as storage:
                await storage.create()
                return await work(storage)

        return asyncio.run(do())

    return run


async def fail(storage: Storage, *bodies: str) -> None:
    """As a worker does it: the poison queue, the record, the message."""
    log = RecordLog(storage.blobs, "worker-1")
    for body in bodies:
        await storage.queue.send([body])
        (message,) = await storage.queue.receive(1, 60)
        job = None
        error = errors.FleetError("out of memory")
        try:
            job = read_job(message.body, message.id)
        except errors.JobError as invalid:
            error = invalid
        failed = await made_records.dead_letter(
            storage, message, job, error, "worker-1"
        )
        await log.add([failed])
        await storage.queue.delete(message)


async def queued(storage: Storage) -> list[Job]:
    return [read_job(each.body, each.id) async for each in visible(storage.queue)]


def test_exported_jobs_are_loaded_again_under_their_ids(
    in_process: Imagefleet, within: Within[Any], tmp_path
):
    bodies = [TOO_MANY_STEPS, '{"prompt":"a dog","deliveries":{"failed":4}}', "no job"]
    within(lambda storage: fail(storage, *bodies))
    ended = in_process("failed", "--export")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert "2 failed jobs exported" in ended.stderr
    assert "is left out: its message is no job in JSON" in ended.stderr
    cat, dog = sorted(lines, key=lambda each: each["prompt"])
    failure = cat.pop("failure")
    assert cat == json.loads(TOO_MANY_STEPS)
    assert failure["error"] == "InvalidMessageError"
    assert "steps" in failure["reason"]
    assert (failure["attempts"], failure["worker"]) == (1, "worker-1")
    assert set(failure) == {"error", "reason", "attempts", "worker", "at", "source"}
    assert dog["id"], "a job without an id keeps its message's"
    assert "deliveries" not in dog

    fixed = [json.loads(line) | {"steps": 20} for line in ended.stdout.splitlines()]
    file = tmp_path / "fix.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in fixed))
    assert in_process("load", "fix.jsonl").returncode == console.EXIT_DONE
    jobs = within(queued)
    assert {job.id for job in jobs} == {"cat", dog["id"]}
    assert {job.steps for job in jobs} == {20}

    discarded = in_process(
        "discard", "--error", "InvalidMessageError", "--yes", "--json"
    )
    assert json.loads(discarded.stdout)["discarded"] >= 2
    assert within(queued) == jobs, "the mended jobs stay in the queue"


def test_a_mended_job_leaves_the_list_once_it_is_completed(
    in_process: Imagefleet, within: Within[Any], tmp_path
):
    other = Job(prompt="a dog", id="dog", campaign="spring").to_message()
    within(lambda storage: fail(storage, TOO_MANY_STEPS, other))
    lines = map(json.loads, in_process("failed", "--export").stdout.splitlines())
    file = tmp_path / "fix.jsonl"
    file.write_text("".join(f"{json.dumps(each | {'steps': 20})}\n" for each in lines))
    with file.open("a") as more:
        more.write('{"prompt": "a fox"}\n')
    loaded = in_process("load", "fix.jsonl")
    assert "2 of them had failed and may stay on the list" in loaded.stderr
    again = in_process("load", "fix.jsonl", "--restart", "--json")
    assert json.loads(again.stdout)["mended"] == 2

    facts = {"job": "cat"}
    within(
        lambda storage: storage.blobs.create("spring/cat.png", b"", "image/png", facts)
    )
    listing = json.loads(in_process("failed", "--json").stdout)
    assert [each["id"] for each in listing["jobs"]] == ["dog"]


def trusting(key: SigningKey) -> Callable[[Storage], Coroutine[Any, Any, Job]]:
    """Reads the one job in the queue, which has to be signed with the key."""

    async def read(storage: Storage) -> Job:
        (message,) = [each async for each in visible(storage.queue)]
        return read_job(message.body, message.id, signers.trusted(key, storage.scope))

    return read


def signed(storage: Storage, job: Job, key: SigningKey) -> str:
    return job.to_message(JobSigner(key, storage.scope))


def test_only_signed_jobs_are_exported_to_be_signed_again(
    in_process: Imagefleet,
    within: Within[Any],
    tmp_path,
    monkeypatch,
):
    """Else whoever stores records could have anything signed."""
    key = SigningKey.create(tmp_path / "key.pem")
    job = Job(prompt="a cat", id="cat")
    forged = Job(prompt="a thief's house", id="x").to_message()
    within(lambda storage: fail(storage, signed(storage, job, key), forged))
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    ended = in_process("failed", "--export")
    (line,) = ended.stdout.splitlines()
    assert json.loads(line)["id"] == "cat"
    assert "signature" not in json.loads(line)
    assert "1 are left out" in ended.stderr


def test_a_replay_sets_fields_by_their_types(
    in_process: Imagefleet, within: Within[Any]
):
    other = Job(
        prompt="a dog", id="dog", campaign="spring", steps=40, sampler_name="DPM++ 2M"
    )
    within(lambda storage: fail(storage, TOO_MANY_STEPS, other.to_message()))
    changes = (
        "steps=20",
        "prompt=a <red> house=1",
        "sampler_name=Euler",
        'output={"format":"webp"}',
    )
    options = [word for each in changes for word in ("--set", each)]
    text = in_process("replay", "--all", *options, "--dry-run").stdout
    assert "2 jobs would be replayed" in text
    ended = in_process("replay", "--all", *options, "--yes")
    assert "2 jobs replayed" in ended.stdout
    known = within(lambda storage: ledger.Ledger(storage, "spring").read())
    for job in within(queued):
        assert known.entry(ledger.id_hash(job.id)) == ledger.entry_of(
            job.id, job.digest
        )
        assert (job.steps, job.prompt, job.sampler_name) == (
            20,
            "a <red> house=1",
            "Euler",
        )
        assert (job.output.format, job.campaign) == ("webp", "spring")
    assert json.loads(in_process("failed", "--json").stdout)["count"] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("stepz=20", "set stepz: a job has no such field; did you mean 'steps'?"),
        ("id=other", "set id: a replay keeps it"),
        ("steps", "--set steps: should be NAME=VALUE"),
    ],
)
def test_a_wrong_change_is_refused_before_anything_is_sent(
    in_process: Imagefleet, within: Within[Any], change: str, reason: str
):
    within(lambda storage: fail(storage, TOO_MANY_STEPS))
    ended = in_process("replay", "--all", "--yes", "--set", "seed=1", "--set", change)
    assert_refused(ended, reason)
    assert within(queued) == []


def test_a_job_that_stays_invalid_with_the_change_stays(
    in_process: Imagefleet, within: Within[Any]
):
    within(lambda storage: fail(storage, TOO_MANY_STEPS, "no job"))
    ended = in_process("replay", "--all", "--yes", "--set", "seed=x")
    assert "0 jobs replayed" in ended.stdout
    assert "not valid even with the change: steps" in ended.stdout
    assert "seed: should be a valid integer" in ended.stdout
    assert "its message is no job in JSON" in ended.stdout
    assert within(queued) == []


def test_a_changed_job_is_signed_again_or_stays(
    in_process: Imagefleet,
    within: Within[Any],
    tmp_path,
    monkeypatch,
):
    key = SigningKey.create(tmp_path / "key.pem")
    job = Job(prompt="a cat", id="cat")
    within(lambda storage: fail(storage, signed(storage, job, key)))
    arguments = ("replay", "--all", "--yes", "--set", "steps=30")
    unsigned = "changed it has to be signed again: give your signing key"
    assert unsigned in in_process(*arguments).stdout
    monkeypatch.setenv("IMAGEFLEET_TRUSTED_KEY", key.public)
    assert unsigned in in_process(*arguments).stdout
    assert within(queued) == []
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    assert "1 job replayed" in in_process(*arguments).stdout
    assert within(trusting(key)).steps == 30


@pytest.mark.parametrize("words", [(), ("--set", "steps=30")])
def test_a_job_whose_signature_has_ended_is_yours_and_is_signed_again_with_the_key_alone(
    in_process: Imagefleet,
    within: Within[Any],
    tmp_path,
    monkeypatch,
    words: tuple[str, ...],
):
    key = SigningKey.create(tmp_path / "key.pem")
    job = Job(prompt="a cat", id="cat")

    async def fail_late(storage: Storage) -> None:
        then = dataclasses.replace(storage.scope, now=signers.ahead(-31))
        await fail(storage, job.to_message(JobSigner(key, then)))

    within(fail_late)
    monkeypatch.setenv("IMAGEFLEET_TRUSTED_KEY", key.public)
    (listed,) = json.loads(in_process("failed", "--json").stdout)["jobs"]
    assert listed["signed"] is True
    assert "cat stays" in in_process("replay", "--all", "--yes", *words).stdout
    assert within(queued) == []
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    assert "1 job replayed" in in_process("replay", "--all", "--yes", *words).stdout
    assert within(trusting(key)).prompt == "a cat"


def test_a_change_takes_the_place_of_other_names_for_a_field(
    in_process: Imagefleet, within: Within[Any]
):
    settings = {"CLIP_stop_at_last_layers": 2, "sd_model_checkpoint": "dreams"}
    fields = {"prompt": "a cat", "steps": 500, "override_settings": settings}
    within(lambda storage: fail(storage, json.dumps(fields)))
    in_process("replay", "--all", "--set", "steps=20", "--set", "clip_skip=1")
    (job,) = within(queued)
    assert (job.steps, job.clip_skip, job.model) == (20, 1, "dreams")
