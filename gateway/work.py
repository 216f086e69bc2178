"""One request's job: its body, the images that it begins with, and what it comes to."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import io
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web
from PIL import Image

from gateway.clients import Client, Refused
from gateway.jobs.desk import Desk
from imagefleet import errors, validation
from imagefleet.files import picture
from imagefleet.job.message import SUFFIXES, Job
from imagefleet.job.passes.img2img import INPUTS
from imagefleet.records.outcomes import JobFacts

#: What a key decides, and chains, whose stages are no field of A1111.
_NOT_THEIRS = ("campaign", "id", "verify", "then", "metadata")

#: The longest body: eight images of 2,048 x 2,048 pixels.
MAX_BODY_BYTES = 64 * 2**20

#: Seconds within which a body has to arrive.
_BODY_SECONDS = 60.0

#: The fields of A1111's payloads with images, wherever they are.
_FIELDS = frozenset({"init_images", "mask", "image", "input_image"})

#: Images of one request: each is decoded here, and stored.
_MOST = 8


CLIENT = web.RequestKey("client", Client)
DESK = web.AppKey("desk", Desk)


@contextlib.asynccontextmanager
async def arriving(what: str) -> AsyncIterator[None]:
    """A body is read in the block; raises Refused if it is late, or not *what* it should be."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            yield
    except TimeoutError:
        raise Refused(
            408, f"the body has not arrived in {_BODY_SECONDS:g} seconds"
        ) from None
    except (ValueError, LookupError, RecursionError, AssertionError):
        raise Refused(400, f"the body is not {what}") from None


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; raises Refused."""
    async with arriving("JSON"):
        found = json.loads(await request.text() or "{}")
    if not isinstance(found, dict):
        raise Refused(422, "the body should be a JSON object")
    return found


async def draw(
    request: web.Request, payload: Mapping[str, Any]
) -> tuple[Job, JobFacts, list[bytes]]:
    """The job of a payload in A1111's fields, and its images; raises Refused or a FleetError."""
    client, desk = request[CLIENT], request.app[DESK]
    for name in _NOT_THEIRS:
        if payload.get(name):
            raise Refused(422, f"{name}: unknown key; the client's own key decides it")
    fields, images = await asyncio.to_thread(_named, payload, client.campaign)
    with validation.as_error(errors.JobError, known=Job.model_fields):
        job = Job.model_validate({**fields, "awaited": True})
    if not set(job.sources) <= images.keys():
        raise Refused(422, "images are given in base64: names are not read")
    job = await desk.models.resolve(client, job)
    await desk.check(client, job)
    for name, data in images.items():
        await desk.storage.files.create(INPUTS + name, data, content_type(name), {})
    facts = await desk.wait(desk.take(client, job))
    if not facts.blobs:
        # What can never succeed is told from what a machine has failed.
        kind = (
            getattr(errors, str(facts.records[-1].error), None)
            if facts.records
            else None
        )
        is_bad = isinstance(kind, type) and issubclass(kind, errors.JobError)
        status = 409 if facts.status == "cancelled" else 422 if is_bad else 500
        raise Refused(status, reason_of(facts) or f"the job was {facts.status}")
    return (
        job,
        facts,
        [await desk.image(facts, index) for index in range(len(facts.blobs))],
    )


def reason_of(facts: JobFacts) -> str | None:
    """Why a job has failed, as the words of the worker that says so: it may be a stranger's."""
    if facts.status == "failed" and facts.reason:
        return f"a worker reports: {facts.reason}"
    return facts.reason


def content_type(name: str) -> str:
    """MIME type of an image by its name, which ends in one of `SUFFIXES`."""
    return f"image/{name.rpartition('.')[2].replace('jpg', 'jpeg')}"


def _named(
    payload: Mapping[str, Any], campaign: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The payload with names in the place of its images, and these by their names.

    Each image is decoded once, so that none can surprise a worker. Raises Refused.
    """
    names: dict[str, str] = {}
    images: dict[str, bytes] = {}

    def replaced(value: Any, *, is_image: bool) -> Any:
        if isinstance(value, dict):
            return {
                name: replaced(each, is_image=name in _FIELDS)
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [replaced(each, is_image=is_image) for each in value]
        if not (is_image and isinstance(value, str) and value):
            return value
        if value not in names:
            if len(names) >= _MOST:
                raise Refused(422, f"more than {_MOST} images in one request")
            data = from_base64(value)
            with opened(data) as image:
                image.load()
                suffix = SUFFIXES[str(image.format).lower()]
            # By their content, so that what is sent again is stored once.
            names[value] = f"{campaign}/{hashlib.sha256(data).hexdigest()}.{suffix}"
            images[names[value]] = data
        return names[value]

    return replaced(dict(payload), is_image=False), images


def from_base64(text: str) -> bytes:
    """The bytes of an image in base64, which may come after the prefix of a data URL."""
    try:
        return base64.b64decode(text.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise Refused(
            422, "an image is not base64: names and addresses are not read"
        ) from None


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """An image that somebody sent; raises Refused for what is none, in the block as well."""
    try:
        with picture.opened(data) as image:
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
