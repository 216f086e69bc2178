"""Records that somebody made up: a worker's token is enough to add them to the poison queue."""

import json

import pytest

import signers
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage import dead_letter, dead_letter_queue
from imagefleet.storage.dead_letter import Check, Entry, FailedJob, Selection
from imagefleet.storage.open import Storage


@pytest.fixture
def key(tmp_path) -> SigningKey:
    return SigningKey.create(tmp_path / "key.pem")


async def fail(storage: Storage, body: str) -> None:
    await storage.queue.send([body])
    [message] = await storage.queue.receive(1, 60)
    try:
        job = read_job(message.body, message.id)
    except errors.JobError:
        job = None
    await dead_letter.add(storage, message, job, errors.JobError("too large"), "w")


async def entries(storage: Storage) -> list[Entry]:
    return [each async for each in dead_letter_queue.browse(storage, Selection())]


async def waiting(storage: Storage) -> list[str]:
    return [json.loads(each.body)["prompt"] async for each in storage.queue.browse()]


async def test_a_record_that_imitates_another_ones_source_does_not_get_that_one_deleted(
    storage: Storage,
):
    await fail(storage, Job(prompt="real", id="a").to_message())
    [real] = [each async for each in storage.poison.browse()]
    [leased] = await storage.poison.receive(1, 60)
    await storage.poison.delete(leased)
    forged = {**json.loads(real.body), "body": "no job"}
    await storage.poison.send([json.dumps(forged), real.body])

    assert len(await entries(storage)) == 2
    swept = await dead_letter_queue.replay(storage, Selection())
    assert (swept.done, len(swept.refused)) == (1, 1)
    assert await waiting(storage) == ["real"]


async def test_a_stored_message_must_be_the_one_that_its_name_says(
    storage: Storage,
):
    body = Job(prompt="a cat", id="a").to_message()
    await storage.blobs.create(
        f"failed/{'0' * 32}.txt", body.encode(), "text/plain", {}
    )
    await fail(storage, body)
    [entry] = await entries(storage)
    assert entry.record is not None
    record = FailedJob.model_validate(
        {
            **entry.record.model_dump(exclude={"body"}),
            "body_blob": f"failed/{'0' * 32}.txt",
        }
    )
    with pytest.raises(errors.JobError, match=r"0\.txt is not the message of job a"):
        await record.message(storage.blobs)


async def test_with_a_key_even_an_invalid_job_must_be_signed(
    storage: Storage, key: SigningKey
):
    """As workers of another version take it, or took it."""
    fields = {"prompt": "newer", "id": "n", "no_such_field": 1}
    signed = {**fields, "signature": JobSigner(key, storage.scope).sign(fields)}
    for body in (json.dumps(signed), json.dumps(fields), "no job", '["signature"]'):
        await fail(storage, body)
    check = Check(signers.trusted(key, storage.scope))
    preview = await dead_letter_queue.preview(storage, Selection(), check)
    assert (preview.count, preview.unsigned, preview.refused) == (0, 3, 1)
    assert [
        await check.is_signed(each, storage.blobs) for each in await entries(storage)
    ] == [
        True,
        *[False] * 3,
    ]
    refused = (
        await dead_letter_queue.replay(storage, Selection(), check=check)
    ).refused
    assert [each.is_unsigned for each in refused] == [False, True, True, True]
    assert "no_such_field: unknown key" in refused[0].reason


async def test_a_preview_counts_all_and_quotes_a_few(storage: Storage):
    for number in range(8):
        body = Job(
            prompt=f"p{number}", id=f"j{number}", campaign=f"c{number % 2}"
        ).to_message()
        await fail(storage, body)
        await fail(storage, "no job")
    preview = await dead_letter_queue.preview(storage, Selection(), Check())
    assert preview.kinds == {("c0", "JobError"): 4, ("c1", "JobError"): 4}
    assert (preview.count, preview.refused, preview.unsigned) == (8, 8, 0)
    assert (len(preview.prompts), len(preview.reasons)) == (5, 5)
    assert (await storage.poison.depth()).messages == 16
