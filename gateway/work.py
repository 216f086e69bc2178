"""One request's job: its payload, the images that it begins with, and what it comes to."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from aiohttp.web import AppKey, Request, RequestKey

from gateway.clients import Client
from gateway.jobs.desk import Desk
from gateway.jobs.ticket import Ticket
from imagefleet import errors, validation
from imagefleet.errors import JobError
from imagefleet.files import picture
from imagefleet.http import bodies, sent_images
from imagefleet.http.bodies import Bodies
from imagefleet.http.refused import Refused
from imagefleet.job.message import Job
from imagefleet.job.passes.img2img import INPUTS
from imagefleet.records.outcomes import JobFacts
from imagefleet.validation import JSONDict, JSONObject

#: What a key decides, and chains, whose stages are no field of A1111.
_NOT_THEIRS = ("campaign", "id", "verify", "then", "metadata")

#: The fields of A1111's payloads with images, wherever they are.
IMAGE_FIELDS = frozenset(
    {
        "init_images",
        "mask",
        "image",
        "input_image",
        "data",
        "controlnet_input_images",
    }
)

#: Images of one request: each is decoded here, and stored.
_MOST = 8

CLIENT = RequestKey("client", Client)
DESK = AppKey("desk", Desk)
BODIES = AppKey("bodies", Bodies)


@dataclass
class Given:
    """A payload with names in the place of its images, and these by their names."""

    campaign: str
    fields: JSONDict = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)

    def add(self, data: bytes) -> str:
        """Takes an image in, decoded once, so that none can surprise a worker; its name."""
        if len(self.images) >= _MOST:
            raise Refused(422, f"more than {_MOST} images in one request")
        try:
            data, suffix = picture.accepted(data)
        except picture.DamagedImageError as error:
            raise Refused(422, f"an image {error}") from None
        # By its content, so that what is sent again is stored once.
        name = f"{self.campaign}/{hashlib.sha256(data).hexdigest()}.{suffix}"
        self.images[name] = data
        return name

    def take(self, payload: JSONObject) -> None:
        """Takes in a payload's fields, and its images in base64; raises Refused."""
        bodies.check_values(payload, IMAGE_FIELDS)
        names = {}

        def replaced(value: Any, *, is_image: bool = False) -> Any:
            if isinstance(value, dict):
                return {
                    name: replaced(each, is_image=name in IMAGE_FIELDS)
                    for name, each in value.items()
                }
            if isinstance(value, list):
                return [replaced(each, is_image=is_image) for each in value]
            if not (is_image and isinstance(value, str) and value):
                return value
            if value not in names:
                names[value] = self.add(sent_images.from_base64(value))
            return names[value]

        self.fields = replaced(dict(payload))


@contextlib.asynccontextmanager
async def read(
    request: Request, parse: Callable[[bytearray, str], Given]
) -> AsyncIterator[Given]:
    """A payload; its images are in memory in the block alone, and not while they are drawn."""
    async with request.app[BODIES].read(request, request[CLIENT], parse) as given:
        try:
            yield given
        finally:
            given.images.clear()


def received(
    request: Request, ignored: Collection[str] = ()
) -> AbstractAsyncContextManager[Given]:
    """The JSON payload of a request, without *ignored* fields."""
    campaign = request[CLIENT].campaign

    def parse(body: bytearray, _: str) -> Given:
        given = Given(campaign)
        payload = bodies.json_object(body)
        for name in ignored:
            payload.pop(name, None)
        given.take(payload)
        return given

    return read(request, parse)


async def read_object(request: Request) -> JSONDict:
    """The JSON object of a request, as it is."""
    async with request.app[BODIES].read(
        request, request[CLIENT], bodies.json_object
    ) as found:
        return found


async def begin(
    request: Request,
    given: Given,
    fields: JSONDict,
) -> Ticket:
    """Sends the job of *fields*, in A1111's names; raises Refused or a FleetError."""
    client = request[CLIENT]
    desk = request.app[DESK]
    for name in _NOT_THEIRS:
        if fields.get(name):
            raise Refused(422, f"{name}: unknown key; the client's own key decides it")
    job = await asyncio.to_thread(_job, fields)
    if not set(job.sources) <= given.images.keys():
        raise Refused(422, "images are given in base64: names are not read")
    job = await desk.models.resolve(client, job)
    key = _key(request, fields, job)
    if (ticket := desk.known(client, job, key)) is not None:
        return ticket
    await desk.check(client, job)
    for name in job.sources:
        await desk.storage.files.create(
            INPUTS + name, given.images[name], sent_images.content_type(name), {}
        )
    return desk.take(client, job, key)


def _key(request: Request, fields: JSONObject, job: Job) -> str | None:
    """The name by which a client knows a request again; None: it does not."""
    if (key := request.headers.get("Idempotency-Key")) is not None:
        return key
    # A1111's programs may give one to many, each of its own.
    task = fields.get("force_task_id")
    return f"{task} {job.digest}" if task else None


async def finish(
    request: Request, ticket: Ticket, *, with_interrupted: bool = False
) -> tuple[Job, JobFacts, list[bytes]]:
    """Waits for a job; returns it with its images, or raises Refused or a FleetError.

    *with_interrupted*: what is drawn of an interrupted job is its result, and may be nothing.
    """
    desk = request.app[DESK]
    facts = await desk.wait(ticket)
    if not facts.blobs and not (with_interrupted and ticket.is_interrupted):
        # What can never succeed is told from what a machine has failed.
        kind = (
            getattr(errors, str(facts.records[-1].error), None)
            if facts.records
            else None
        )
        is_bad = facts.status == "dropped" or (
            isinstance(kind, type) and issubclass(kind, JobError)
        )
        status = 409 if facts.status == "cancelled" else 422 if is_bad else 500
        raise Refused(status, reason_of(facts) or f"the job was {facts.status}")
    images = [await desk.image(facts, index) for index in range(len(facts.blobs))]
    return ticket.job, facts, images


def _job(fields: JSONObject) -> Job:
    with validation.as_error(JobError, known=Job.model_fields):
        return Job.model_validate({**fields, "awaited": True})


def reason_of(facts: JobFacts) -> str | None:
    """Why a job has failed, as the words of the worker that says so: it may be a stranger's."""
    if facts.status == "failed" and facts.reason:
        return f"a worker reports: {facts.reason}"
    return facts.reason
