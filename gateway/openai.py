"""OpenAI's API of images: https://platform.openai.com/docs/api-reference/images."""

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway import work
from gateway.jobs.ticket import Ticket
from imagefleet.http import bodies
from imagefleet.http.refused import Refused
from imagefleet.storage.enqueue import stored_models

ROUTES = web.RouteTableDef()

#: Stands for no model in particular: workers draw with their own.
_DEFAULT_MODEL = "default"

#: Fields that change nothing here.
_WITHOUT_EFFECT = frozenset(
    (
        "quality",
        "style",
        "user",
        "background",
        "moderation",
        "input_fidelity",
        "partial_images",
        "output_compression",
    )
)

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


@ROUTES.post("/v1/images/generations")
async def _generate(request: web.Request) -> web.Response:
    """Draws images of a prompt; fields of txt2img are taken beside OpenAI's own."""
    async with work.received(request) as given:
        answer, ticket = await _begin(request, given)
    return await _answer(request, answer, ticket)


@ROUTES.post("/v1/images/edits")
async def _edit(request: web.Request) -> web.Response:
    """Draws an image anew, by a prompt; where the mask is transparent, if there is one."""
    campaign = request[work.CLIENT].campaign

    def parse(body: bytearray, content_type: str) -> work.Given:
        form = bodies.form(body, content_type)
        given = work.Given(campaign)
        if "image" not in form.files:
            raise Refused(400, "image: is required")
        if len(form.files["image"]) > 1:
            raise Refused(400, "image: several are not supported, one is drawn anew")
        (image,) = form.files["image"]
        given.fields = {**form.fields, "init_images": [given.add(image)]}
        (mask,) = form.files.get("mask", [image])[:1]
        if mask := work.mask_of(mask):
            in_place = {"inpaint_full_res": False, "inpainting_fill": 1}
            given.fields = {**in_place, "mask": given.add(mask), **given.fields}
        return given

    client = request[work.CLIENT]
    async with request.app[work.BODIES].read(request, client, parse) as given:
        answer, ticket = await _begin(request, given)
    return await _answer(request, answer, ticket)


@ROUTES.get("/v1/models")
async def _list_models(request: web.Request) -> web.Response:
    """Lists the checkpoints in the storage; `default` is the workers' own."""
    names = [
        _DEFAULT_MODEL,
        *sorted(await stored_models(request.app[work.DESK].storage.files)),
    ]
    kind = {"object": "model", "created": 0, "owned_by": "imagefleet"}
    return web.json_response(
        {"object": "list", "data": [{"id": each, **kind} for each in names]}
    )


async def _begin(request: web.Request, given: work.Given) -> tuple[str, Ticket]:
    """The form of the answer, and the job that is sent."""
    answer = given.fields.pop("response_format", None) or "b64_json"
    return answer, await work.begin(request, given, _as_a1111(given.fields))


async def _answer(request: web.Request, answer: str, ticket: Ticket) -> web.Response:
    _, facts, images = await work.finish(request, ticket)
    if answer == "url":
        start = f"{request.url.origin()}/jobs/{facts.id}"
        data = [{"url": f"{start}/{index}"} for index in range(len(images))]
    else:
        data = [
            {"b64_json": text}
            for text in await asyncio.to_thread(work.in_base64, images)
        ]
    return web.json_response({"created": int(time.time()), "data": data})


def _as_a1111(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields by A1111's names; raises Refused."""
    fields = {
        name: each for name, each in payload.items() if name not in _WITHOUT_EFFECT
    }
    if fields.pop("stream", None) not in (None, False, "false"):
        raise Refused(400, "stream: is not supported")
    model, size = fields.pop("model", None), fields.pop("size", None)
    if model not in (None, "", _DEFAULT_MODEL):
        fields["model"] = model
    if size not in (None, "", "auto"):
        if not (found := _SIZE.fullmatch(str(size))):
            raise Refused(400, "size: should be WIDTHxHEIGHT, such as 512x512, or auto")
        fields["width"] = int(found[1])
        fields["height"] = int(found[2])
    fields["n_iter"] = fields.pop("n", None) or 1
    if form := fields.pop("output_format", None):
        fields["output"] = {"format": form}
    return fields
