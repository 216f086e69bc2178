"""One request's job: its payload, the images that it begins with, and what it comes to."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from PIL import Image

from gateway.clients import Client
from gateway.jobs.desk import Desk
from gateway.jobs.ticket import Ticket
from imagefleet import errors, validation
from imagefleet.files import picture
from imagefleet.http import bodies
from imagefleet.http.bodies import Bodies
from imagefleet.http.refused import Refused
from imagefleet.job.message import MAX_IMAGE_BYTES, Job
from imagefleet.job.passes.img2img import INPUTS
from imagefleet.records.outcomes import JobFacts

#: What a key decides, and chains, whose stages are no field of A1111.
_NOT_THEIRS = ("campaign", "id", "verify", "then", "metadata")

#: The fields of A1111's payloads with images, wherever they are.
IMAGE_FIELDS = frozenset({"init_images", "mask", "image", "input_image", "data"})

#: Images of one request: each is decoded here, and stored.
_MOST = 8

#: The longest image in base64, and how much of it is decoded in one step.
_MAX_BASE64 = MAX_IMAGE_BYTES * 4 // 3 + 4
_STEP = 2**20

CLIENT = web.RequestKey("client", Client)
DESK = web.AppKey("desk", Desk)
BODIES = web.AppKey("bodies", Bodies)


@dataclass(slots=True)
class Given:
    """A payload with names in the place of its images, and these by their names."""

    campaign: str
    fields: dict[str, Any] = field(default_factory=dict)
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

    def take(self, payload: Mapping[str, Any]) -> None:
        """Takes in a payload's fields, and its images in base64; raises Refused."""
        bodies.check_values(payload, IMAGE_FIELDS)
        names: dict[str, str] = {}

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
                names[value] = self.add(from_base64(value))
            return names[value]

        self.fields = replaced(dict(payload))


@contextlib.asynccontextmanager
async def received(
    request: web.Request, ignored: Collection[str] = ()
) -> AsyncIterator[Given]:
    """The JSON payload of a request, without *ignored* fields.

    Its images are in memory in the block alone.
    """
    campaign = request[CLIENT].campaign

    def parse(body: bytearray, _: str) -> Given:
        given = Given(campaign)
        payload = bodies.json_object(body)
        for name in ignored:
            payload.pop(name, None)
        given.take(payload)
        return given

    async with request.app[BODIES].read(request, request[CLIENT], parse) as given:
        yield given


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request, as it is."""
    parse = bodies.json_object
    async with request.app[BODIES].read(request, request[CLIENT], parse) as found:
        return found


async def begin(
    request: web.Request,
    given: Given,
    fields: dict[str, Any],
) -> Ticket:
    """Sends the job of *fields*, in A1111's names; raises Refused or a FleetError."""
    client, desk = request[CLIENT], request.app[DESK]
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
        data = given.images[name]
        await desk.storage.files.create(INPUTS + name, data, content_type(name), {})
    return desk.take(client, job, key)


def _key(request: web.Request, fields: Mapping[str, Any], job: Job) -> str | None:
    """The name by which a client knows a request again; None: it does not."""
    if (key := request.headers.get("Idempotency-Key")) is not None:
        return key
    # A1111's programs may give one to many, each of its own.
    task = fields.get("force_task_id")
    return f"{task} {job.digest}" if task else None


async def finish(
    request: web.Request, ticket: Ticket, *, with_interrupted: bool = False
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
        is_bad = isinstance(kind, type) and issubclass(kind, errors.JobError)
        status = 409 if facts.status == "cancelled" else 422 if is_bad else 500
        raise Refused(status, reason_of(facts) or f"the job was {facts.status}")
    images = [await desk.image(facts, index) for index in range(len(facts.blobs))]
    return ticket.job, facts, images


def _job(fields: Mapping[str, Any]) -> Job:
    with validation.as_error(errors.JobError, known=Job.model_fields):
        return Job.model_validate({**fields, "awaited": True})


def reason_of(facts: JobFacts) -> str | None:
    """Why a job has failed, as the words of the worker that says so: it may be a stranger's."""
    if facts.status == "failed" and facts.reason:
        return f"a worker reports: {facts.reason}"
    return facts.reason


def content_type(name: str) -> str:
    """MIME type of an image by its name, which ends in one of `SUFFIXES`."""
    return f"image/{name.rpartition('.')[2].replace('jpg', 'jpeg')}"


def from_base64(text: str) -> bytes:
    """The bytes of an image in base64, which may come after the prefix of a data URL."""
    data = text.rpartition(",")[2]
    if len(data) > _MAX_BASE64:
        raise Refused(422, f"an image has more than {MAX_IMAGE_BYTES:,} bytes")
    # In steps, between which the event loop has its turn.
    steps = (data[at : at + _STEP] for at in range(0, len(data), _STEP))
    try:
        return b"".join(binascii.a2b_base64(step, strict_mode=True) for step in steps)
    except (binascii.Error, ValueError):
        raise Refused(
            422, "an image is not base64: names and addresses are not read"
        ) from None


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """An image that somebody sent; raises Refused for what is none, in the block as well."""
    try:
        with picture.opened(data, also=picture.CONVERTED) as image:
            yield image
    except picture.DamagedImageError as error:
        raise Refused(422, f"an image {error}") from None


def text_of(data: bytes) -> str:
    """A1111's text in an image."""
    with opened(data) as image:
        return picture.parameters(image, picture.MAX_MESSAGE_BYTES)


def mask_of(data: bytes) -> bytes:
    """A1111's mask, white where to draw, of OpenAI's, transparent there; empty without any."""
    with opened(data) as image:
        alpha = image.convert("RGBA").getchannel("A")
    if alpha.getextrema()[0] == 255:  # noqa: PLR2004 - opaque everywhere
        return b""
    made = io.BytesIO()
    Image.eval(alpha, lambda value: 255 - value).save(made, "PNG")
    return made.getvalue()


def in_base64(images: Iterable[bytes]) -> list[str]:
    return [base64.b64encode(data).decode() for data in images]
