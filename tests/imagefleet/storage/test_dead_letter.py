import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import made_records
from browsing import visible
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.job.sizes import MAX_MESSAGE_BYTES, message_bytes
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.storage.settings import StorageSettings


async def lease(storage: Storage, body: str) -> LeasedMessage:
    await storage.queue.send([body])
    [message] = await storage.queue.receive(1, 60)
    return message


async def add(storage: Storage, body: str, job: Job | None = None) -> FailedJob:
    """Dead-letters a message; returns its record from the poison queue."""
    message = await lease(storage, body)
    await made_records.dead_letter(
        storage, message, job, errors.UnusableFileError("does not fit"), "worker-1"
    )
    [poisoned] = [each async for each in visible(storage.poison)]
    assert message_bytes(poisoned.body) <= MAX_MESSAGE_BYTES
    record = FailedJob.parse(poisoned.body)
    assert record is not None
    return record


def noise(size: int) -> str:
    """Text that zlib cannot compress."""
    return base64.b64encode(random.Random(1).randbytes(size)).decode()


async def test_a_record_holds_the_job_its_error_the_attempts_and_the_worker(
    storage: Storage,
):
    message = await lease(storage, '{"prompt":"a cat","campaign":"spring"}')
    job = read_job(message.body, message.id)

    await made_records.dead_letter(
        storage, message, job, errors.MissingFileError("no LoRA 'x'"), "worker-1"
    )

    [poisoned] = [each async for each in visible(storage.poison)]
    record = FailedJob.parse(poisoned.body)
    assert record is not None
    assert (record.id, record.campaign) == (message.id, "spring")
    assert (record.error, record.reason) == ("MissingFileError", "no LoRA 'x'")
    assert (record.attempts, record.worker) == (1, "worker-1")
    assert read_job(record.body or "", "other") == job
    assert (await storage.queue.depth()).messages == 1, "the caller deletes the message"


@pytest.mark.parametrize(
    "body", ["no job", '{"prompt":5}', "ü & <b> \u2028 \U0001f408"]
)
async def test_an_invalid_message_is_kept_unchanged(storage: Storage, body: str):
    record = await add(storage, body)

    assert record.body == body
    assert record.campaign == "default"


async def test_a_message_too_large_for_the_poison_queue_is_in_the_record_alone(
    storage: Storage,
):
    job = Job(prompt="é" * 30_000, id="a", seed=5)
    message = await lease(storage, job.to_message())
    error = errors.UnusableFileError("does not fit")

    record = await made_records.dead_letter(storage, message, job, error, "worker-1")

    assert read_job(record.body or "", "other") == job
    [poisoned] = [each async for each in visible(storage.poison)]
    shown = FailedJob.parse(poisoned.body)
    assert shown == record.model_copy(update={"body": None})


async def test_a_full_message_that_its_id_would_make_too_large_can_be_replayed(
    storage: Storage,
):
    prompt = noise(49_200)[: MAX_MESSAGE_BYTES - len('{"prompt":""}')]
    body = json.dumps({"prompt": prompt}, separators=(",", ":"))
    assert message_bytes(body) == MAX_MESSAGE_BYTES

    message = await lease(storage, body)
    job = read_job(body, "message-1")
    record = await made_records.dead_letter(
        storage, message, job, errors.JobError(), "w"
    )

    await storage.queue.send([record.body or ""])


@pytest.mark.parametrize(
    "reason",
    ["x" * 100_000, "\U0001f408" * 50_000, "<&>" * 10_000, "\ud800", "\0\x1b[31m"],
)
async def test_any_error_text_fits_into_a_record(tmp_path, reason: str):
    async with open_storage(StorageSettings(storage=f"local:{tmp_path}")) as storage:
        await storage.create()
        message = await lease(storage, noise(49_140))

        await made_records.dead_letter(
            storage, message, None, errors.JobError(reason), "w" * 10_000
        )

        [poisoned] = [each async for each in visible(storage.poison)]
        assert FailedJob.parse(poisoned.body) is not None


@given(st.text() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_reading_an_arbitrary_message_does_not_raise(text: str):
    assert FailedJob.parse(text) is None
