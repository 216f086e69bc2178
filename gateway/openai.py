"""OpenAI's API of images: https://platform.openai.com/docs/api-reference/images."""

import asyncio
import re
import time
from contextlib import AbstractAsyncContextManager

from aiohttp import web
from aiohttp.web import Request, Response, RouteTableDef

from gateway import work
from gateway.models import UnknownModelError
from gateway.work import Given
from imagefleet.http import bodies, sent_images
from imagefleet.http.refused import Refused
from imagefleet.validation import JSONDict, JSONObject

ROUTES = RouteTableDef()

#: Stands for no model in particular: workers draw with their own.
_DEFAULT_MODEL = "default"

#: Fields that change nothing here.
_WITHOUT_EFFECT = {"style", "user", "moderation", "input_fidelity"}

#: Fields of what is not there, and their values that ask for nothing.
_OFF = {
    "stream": (None, False, "false"),
    "partial_images": (None, 0, "0"),
    "background": (None, "", "auto", "opaque"),
}

#: Steps by `quality`; none: as many as jobs have.
_STEPS = dict.fromkeys((None, "", "auto", "standard", "medium")) | {
    "low": 12,
    "high": 40,
    "hd": 40,
}

_MOST_IMAGES = 10

#: The latents' cells: an image of another size would be drawn smaller.
_CELL = 8

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


@ROUTES.post("/v1/images/generations")
async def _generate(request: Request) -> Response:
    """Draws images of a prompt; fields of txt2img are taken beside OpenAI's own."""
    return await _drawn(request, work.received(request))


@ROUTES.post("/v1/images/edits")
async def _edit(request: Request) -> Response:
    """Draws an image anew, by a prompt; where the mask is transparent, if there is one."""
    campaign = request[work.CLIENT].campaign

    def parse(body: bytearray, content_type: str) -> Given:
        form = bodies.form(body, content_type)
        given = Given(campaign)
        if "image" not in form.files:
            raise Refused(400, "image: is required")
        if len(form.files["image"]) > 1:
            raise Refused(400, "image: several are not supported, one is drawn anew")
        (image,) = form.files["image"]
        given.fields = {**form.fields, "init_images": [given.add(image)]}
        (mask,) = form.files.get("mask", [image])[:1]
        if mask := sent_images.mask_of(mask):
            in_place = {"inpaint_full_res": False, "inpainting_fill": 1}
            given.fields = {**in_place, "mask": given.add(mask), **given.fields}
        return given

    return await _drawn(request, work.read(request, parse))


@ROUTES.get("/v1/models")
async def _list_models(request: Request) -> Response:
    """Lists the checkpoints that workers serve or the storage holds, and `default`: theirs."""
    return web.json_response(
        {
            "object": "list",
            "data": [_model(name) for name in await _models(request)],
        }
    )


@ROUTES.get("/v1/models/{model}")
async def _get_model(request: Request) -> Response:
    """One of the models."""
    name = request.match_info["model"]
    known = await _models(request)
    if name not in known:
        raise UnknownModelError(name, known)
    return web.json_response(_model(name))


async def _models(request: Request) -> list[str]:
    models = request.app[work.DESK].models
    await models.refresh()
    return [_DEFAULT_MODEL, *models.known]


def _model(name: str) -> JSONDict:
    return {"id": name, "object": "model", "created": 0, "owned_by": "imagefleet"}


async def _drawn(
    request: Request, payload: AbstractAsyncContextManager[Given]
) -> Response:
    """Draws the images of a payload, and answers with them."""
    async with payload as given:
        answer = given.fields.pop("response_format", None)
        ticket = await work.begin(request, given, _as_a1111(given.fields))
    _, facts, images = await work.finish(request, ticket)
    start = f"{request.url.origin()}/jobs/{facts.id}"
    data = [{"url": f"{start}/{index}"} for index in range(len(images))]
    if answer != "url":
        # Who asks for neither may look for either: older models have addresses, newer ones not.
        texts = await asyncio.to_thread(sent_images.in_base64, images)
        for each, text in zip(data, texts, strict=True):
            each["b64_json"] = text
    return web.json_response({"created": int(time.time()), "data": data})


def _as_a1111(payload: JSONObject) -> JSONDict:
    """A request's fields by A1111's names; raises Refused."""
    fields = {
        name: each for name, each in payload.items() if name not in _WITHOUT_EFFECT
    }
    for name, values in _OFF.items():
        if fields.pop(name, None) not in values:
            raise Refused(400, f"{name}: is not supported")
    quality = fields.pop("quality", None)
    if quality not in _STEPS:
        raise Refused(400, "quality: should be auto, low, medium or high")
    if steps := _STEPS[quality]:
        fields.setdefault("steps", steps)
    model = fields.pop("model", None)
    if model not in (None, "", _DEFAULT_MODEL):
        fields["model"] = model
    fields |= _sides(fields.pop("size", None))
    count = str(fields.pop("n", None) or 1)
    if not (count.isdecimal() and 1 <= int(count) <= _MOST_IMAGES):
        raise Refused(400, f"n: should be 1 to {_MOST_IMAGES}")
    fields["n_iter"] = int(count)
    output = {
        "format": fields.pop("output_format", None),
        "quality": fields.pop("output_compression", None),
    }
    if given := {name: value for name, value in output.items() if value is not None}:
        fields["output"] = given
    return fields


def _sides(size: object) -> dict[str, int]:
    """Width and height of a size as OpenAI writes it; raises Refused."""
    if size in (None, "", "auto"):
        return {}
    if not (found := _SIZE.fullmatch(str(size))):
        raise Refused(400, "size: should be WIDTHxHEIGHT, such as 512x512, or auto")
    sides = {"width": int(found[1]), "height": int(found[2])}
    if any(side % _CELL for side in sides.values()):
        raise Refused(400, f"size: should be multiples of {_CELL}")
    return sides
