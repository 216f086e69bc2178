"""Records that somebody made up: a worker's token is enough to add them."""

import json
from collections import Counter
from datetime import UTC, datetime

import made_records
import signers
from browsing import visible
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.keeping.rule import Keep
from imagefleet.records.log import RecordLog
from imagefleet.records.record import DroppedImage, Record
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.dead_letter import Check, Selection
from imagefleet.storage.open import Storage


async def fail(storage: Storage, body: str) -> None:
    await storage.queue.send([body])
    [message] = await storage.queue.receive(1, 60)
    try:
        job = read_job(message.body, message.id)
    except errors.JobError:
        job = None
    error = errors.JobError("too large")
    failed = await made_records.dead_letter(storage, message, job, error, "w")
    await RecordLog(storage.blobs, "w").add([failed])


async def listed(storage: Storage) -> list[Record]:
    return [each async for each in dead_letter_queue.recorded(storage, Selection())]


async def waiting(storage: Storage) -> list[str]:
    return [json.loads(each.body)["prompt"] async for each in visible(storage.queue)]


async def test_what_somebody_adds_to_the_poison_queue_alone_is_never_sent(
    storage: Storage,
):
    await fail(storage, Job(prompt="real", id="a").to_message())
    [real] = [each async for each in visible(storage.poison)]
    forged = {"body": Job(prompt="forged", id="a").to_message()}
    await storage.poison.send([json.dumps(json.loads(real.body) | forged)])

    assert (await dead_letter_queue.replay(storage, Selection())).done == 1
    assert await waiting(storage) == ["real"]
    assert (await storage.poison.depth()).messages == 0


async def test_with_a_key_even_an_invalid_job_must_be_signed(
    storage: Storage, key: SigningKey
):
    """As workers of another version take it, or took it."""
    fields = {"prompt": "newer", "id": "n", "no_such_field": 1}
    signed = {**fields, "signature": JobSigner(key, storage.scope).sign(fields)}
    for body in (
        json.dumps(signed),
        json.dumps(fields | {"id": "m"}),
        "no job",
        '["signature"]',
    ):
        await fail(storage, body)
    check = Check(signers.trusted(key, storage.scope))
    preview = await dead_letter_queue.preview(storage, Selection(), check)
    assert (preview.kinds.total(), preview.refused) == (0, 4)
    signed_ones = [each.id for each in await listed(storage) if check.is_signed(each)]
    assert signed_ones == ["n"]
    refused = (
        await dead_letter_queue.replay(storage, Selection(), check=check)
    ).refused
    reasons = Counter(each.reason for each in refused)
    assert reasons.pop("it is not signed with your key") == 3
    assert "no_such_field: unknown key" in min(reasons)


async def test_a_preview_counts_all_and_quotes_a_few(storage: Storage):
    for number in range(8):
        body = Job(
            prompt=f"p{number}", id=f"j{number}", campaign=f"c{number % 2}"
        ).to_message()
        await fail(storage, body)
        await fail(storage, "no job")
    preview = await dead_letter_queue.preview(storage, Selection(), Check())
    assert preview.kinds == {("c0", "JobError"): 4, ("c1", "JobError"): 4}
    assert preview.refused == 8
    assert (len(preview.prompts), len(preview.reasons)) == (5, 5)
    assert (await storage.poison.depth()).messages == 16


def test_a_near_duplicate_which_is_stored_is_no_dropped_job_to_send_again():
    other = DroppedImage(0, "clip 2 is below 3", {"clip": 2})
    moment = datetime(2026, 12, 1, tzinfo=UTC)
    image = Record(outcome="completed", id="j0", at=moment, dropped=(other,))
    selection = Selection(keep=Keep(minimum={"clip": 1}))
    assert not selection.matches(image.as_near_duplicate("j1"))
