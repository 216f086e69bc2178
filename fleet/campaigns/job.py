"""`imagefleet status CAMPAIGN/ID`: where one job is, and how it ended."""

from datetime import UTC

from cli import console, target
from imagefleet.errors import JobError
from imagefleet.job.message import job_key, read_job
from imagefleet.records import columns, decisions, ledger, outcomes
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict

_WHY = {
    "unknown": "some of its images are missing, and it has no record and no message",
    "queued or in flight": "it has no image and no record: Azure does not show which jobs wait",
}


async def show(storage: Storage, campaign: str, job_id: str, *, as_json: bool) -> None:
    """Prints where a job is, since when, its attempts, and its images or why it failed."""
    found = await look_up(storage, campaign, job_id)
    if found["state"] == "unknown" and not found["images"]:
        raise await target.unknown_job(storage, target.Target(campaign, job_id))
    since = found["since"]
    state = found["state"]
    error = found["error"]
    facts = {
        "job": job_key(found["campaign"], found["id"]),
        "state": state,
        "since": f"{since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if since else "-",
        "stage": found["stage"],
        "attempts": found["attempts"],
        "worker": found["worker"] or "-",
    }
    if reason := _WHY.get(state, found["reason"]):
        facts["reason"] = f"{error}: {reason}" if error else reason
    images = ({"image": image["address"]} for image in found["images"])
    console.show(found, facts, *images, as_json=as_json)


async def look_up(storage: Storage, campaign: str, job_id: str) -> JSONDict:
    """Searches its images' names, then the queue's messages, then the campaign's records.

    The state is its record's outcome, `queued`, `in flight`, either of both, or `unknown`, *since*
    when; the stage, of a job with several, is the last stored, or that which waits or has failed.
    """
    # Before the images: a job that completes in between must not be taken for an unknown one.
    messages = (await storage.queue.depth()).messages
    digest = await ledger.digest_of(storage, campaign, job_id)
    stored = await decisions.job_images(storage, campaign, job_id, digest)
    address = columns.addresses(storage)
    found = {
        "id": job_id,
        "campaign": campaign,
        "state": "unknown",
        **dict.fromkeys(("since", "stage", "attempts", "worker", "error", "reason")),
        "images": [
            {
                "blob": image.blob,
                "address": address(image),
                "size_bytes": image.size_bytes or 0,
            }
            for image in stored
        ],
    }
    if decisions.are_all(stored):
        record = stored[-1] if stored[0].stages > 1 else stored[0]
        found |= _recorded(record) | {"since": max(each.at for each in stored)}
        if record.seconds is None:  # somebody has changed its metadata
            found |= {"attempts": None, "worker": None}
    elif in_queue := await target.find_message(
        storage, target.Target(campaign, job_id)
    ):
        message, is_leased = in_queue
        found |= {
            "state": "in flight" if is_leased else "queued",
            "since": message.enqueued_at,
            "stage": _stage(message.body),
            "attempts": message.delivery_count,
        }
    elif end := await outcomes.last_end(storage, outcomes.JobFacts(job_id, campaign)):
        found |= _recorded(end)
    elif messages > 0 and not storage.queue.is_local:
        # Azure shows no more than the first of the messages that wait, and none in flight.
        found["state"] = "queued or in flight"
    return found


def _recorded(record: Record) -> JSONDict:
    return {
        "state": record.outcome,
        "since": record.at,
        "stage": record.stage if record.stages > 1 else None,
        **{
            name: getattr(record, name)
            for name in ("attempts", "worker", "error", "reason")
        },
    }


def _stage(body: str) -> int | None:
    """The stage that a message asks for, if its job has several."""
    try:
        job = read_job(body, "none")
    except JobError:
        return None
    return job.stage if job.stages > 1 else None
