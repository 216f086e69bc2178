"""Signed messages that somebody has kept, and sends again: later, elsewhere, or as they are."""

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

import made_records
import signers
from benchmarks.stand_in import StandInEngine
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.records.log import RecordLog
from imagefleet.signing import JobSigner, Scope, SigningKey
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Check, FailedJob, Selection
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from messages import failed_jobs

JOB = Job(prompt="a house", id="hut", campaign="c")


@pytest.fixture
async def elsewhere(
    storage_settings: StorageSettings, tmp_path
) -> AsyncIterator[Storage]:
    """Another fleet's storage: another folder, or another container of the same account."""
    other = {"container": f"{storage_settings.container}-2"}
    if storage_settings.is_local:
        other = {"storage": f"local:{tmp_path / 'elsewhere'}"}
    async with open_storage(storage_settings.model_copy(update=other)) as storage:
        yield storage


async def failed(storage: Storage) -> FailedJob:
    (record,) = await failed_jobs(storage)
    assert record.error == "UntrustedJobError"
    return record


def scoped(key: SigningKey, scope: Scope, **changes: Any) -> JobSigner:
    return JobSigner(key, dataclasses.replace(scope, **changes))


async def test_a_captured_message_that_is_sent_again_is_a_duplicate(
    storage: Storage, run_pipeline, key: SigningKey
):
    body = JOB.to_message(JobSigner(key, storage.scope))
    await run_pipeline(sent=[body], trusted_key=key.public)
    stored = await storage.blobs.read("c/hut.png")

    pipeline = await run_pipeline(sent=[body], trusted_key=key.public)

    assert "failed" not in pipeline.metrics.outcomes
    assert (await storage.poison.depth()).messages == 0
    assert await storage.blobs.read("c/hut.png") == stored


async def test_a_captured_message_of_another_fleet_or_queue_of_the_same_key_is_not_drawn(
    storage: Storage, elsewhere: Storage, run_pipeline, key: SigningKey
):
    for signer, at in (
        (JobSigner(key, elsewhere.scope), f"the fleet {elsewhere.scope.fleet()}"),
        (scoped(key, storage.scope, queue="tests"), "the queue tests, not for "),
    ):
        pipeline = await run_pipeline(
            trusted_key=key.public, sent=[JOB.to_message(signer)]
        )
        assert pipeline.engine_thread.clock.images == 0
        assert f"is signed for {at}" in (await failed_jobs(storage))[-1].reason


async def test_a_message_is_not_drawn_after_its_date_until_a_replay_signs_it_again(
    storage: Storage, run_pipeline, key: SigningKey
):
    pipeline = await run_pipeline(
        sent=[JOB.to_message(scoped(key, storage.scope, now=signers.ahead(-31)))],
        trusted_key=key.public,
    )
    assert pipeline.engine_thread.clock.images == 0
    record = await failed(storage)
    assert "the job's signature held until " in record.reason
    assert "`imagefleet replay`" in record.reason
    assert (record.id, record.campaign) == ("hut", "c"), "who has signed it is trusted"

    trusted = signers.trusted(key, storage.scope)
    with_public_key = Check(dataclasses.replace(trusted, at_any_time=True))
    preview = await dead_letter_queue.preview(storage, Selection(), with_public_key)
    assert (preview.kinds.total(), preview.refused) == (0, 1)
    swept = await dead_letter_queue.replay(storage, Selection(), check=with_public_key)
    assert "held until" in swept.refused[0].reason

    check = dataclasses.replace(with_public_key, signer=JobSigner(key, storage.scope))
    assert check.is_signed(record), "not among the unsigned"
    assert (await dead_letter_queue.replay(storage, Selection(), check=check)).done == 1
    await run_pipeline(trusted_key=key.public)
    assert await storage.blobs.exists("c/hut.png")


async def test_a_replay_signs_nothing_that_was_captured_elsewhere(
    storage: Storage, elsewhere: Storage, key: SigningKey
):
    """Whoever may write to the poison queue would have it signed for this fleet."""
    body = JOB.to_message(JobSigner(key, elsewhere.scope))
    await storage.queue.send([body])
    (message,) = await storage.queue.receive(1, 60)
    job = read_job(body, "m")
    record = await made_records.dead_letter(
        storage, message, job, errors.JobError(), "w"
    )
    await RecordLog(storage.blobs, "w").add([record])
    trusted = signers.trusted(key, storage.scope)
    check = Check(trusted, signer=JobSigner(key, storage.scope))

    swept = await dead_letter_queue.replay(storage, Selection(), check=check)

    assert swept.done == 0
    assert [each.reason for each in swept.refused] == ["it is not signed with your key"]


@pytest.mark.parametrize("days", [400, 40_000])
async def test_a_signature_of_another_program_does_not_hold_for_ever(
    storage: Storage, run_pipeline, key: SigningKey, days: float
):
    await run_pipeline(
        sent=[JOB.to_message(scoped(key, storage.scope, now=signers.ahead(days)))],
        trusted_key=key.public,
    )
    assert "366 days are the most" in (await failed(storage)).reason


async def test_a_signature_outlasts_priorities_and_moves_between_models_queues(
    storage: Storage, run_pipeline, key: SigningKey
):
    signer = JobSigner(key, storage.scope)
    await storage.models.send([JOB.to_message(signer)], "high")
    of_model = JOB.model_copy(update={"id": "b", "model": StandInEngine.model_name})
    await storage.models.send([of_model.to_message(signer)], "low")
    strays = [JOB.model_copy(update={"id": "c", "model": StandInEngine.model_name})]

    pipeline = await run_pipeline(
        sent=[each.to_message(signer) for each in strays], trusted_key=key.public
    )

    assert pipeline.metrics.outcomes == {"completed": 3}
