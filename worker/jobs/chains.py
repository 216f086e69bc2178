"""Sends the next stage of a job once the image of the one before is stored.

It is sent before the message of the stage before is deleted. A worker that dies in between leaves a
stage that is sent twice, never one that is not: who gets that message again finds the image and
sends the next stage once more, whose worker finds its image in turn.
"""

import logging

from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import JobCancelled
from imagefleet.job import chain
from imagefleet.job.message import DELIVERIES_FIELD, message_fields, message_text
from imagefleet.storage.routing.models import ModelQueues
from imagefleet.storage.settings import priority_of
from worker.jobs.in_flight import InFlightJob


async def send_next(
    models: ModelQueues, entry: InFlightJob, cancelled: CancelledCampaigns
) -> None:
    """Sends the stage after that of a job whose image is stored, with the job's priority.

    Raises LeaseLost if another worker has the job now, and sends it, and JobCancelled if its
    campaign is: sent later than that was, the stage would be drawn.
    """
    job = entry.job
    message = entry.lease.message
    assert job is not None  # noqa: S101 - its image is stored
    fields = message_fields(message.body)
    fields.pop(DELIVERIES_FIELD, None)
    fields["id"] = job.id
    fields[chain.STAGE_FIELD] = field = job.next_stage_field(message.id)
    following = job.whole.stage_of_message(field)
    entry.lease.check()
    if entry.is_of(cancelled):
        raise JobCancelled
    await models.send([message_text(fields)], priority_of(message.queue))
    stage = f"{following.stage} of {following.stages}"
    entry.log(logging.DEBUG, f"goes on with stage {stage}", "stage_sent", stage=stage)
