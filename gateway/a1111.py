"""AUTOMATIC1111's API: https://github.com/AUTOMATIC1111/stable-diffusion-webui/wiki/API."""

import asyncio
import time
from typing import Any

from aiohttp import web

from gateway import info, payloads, work
from gateway.lists import STYLES
from gateway.models import UnknownModelError
from gateway.work import CLIENT, DESK
from imagefleet import errors, validation
from imagefleet.files import picture
from imagefleet.http.refused import Refused
from imagefleet.job import override_settings, settings_table
from imagefleet.job.message import Job

ROUTES = web.RouteTableDef()

#: What clients have set, by their keys; forgotten when the gateway stops.
OPTIONS = web.AppKey("options", dict[str, dict[str, Any]])

#: The values of fields that a payload leaves out.
DEFAULTS = web.AppKey("defaults", dict[str, object])

#: What `options` has before anybody sets something, of what clients look at.
_DEFAULTS = {
    "sd_model_checkpoint": "",
    "CLIP_stop_at_last_layers": 1,
    "samples_format": "png",
}

#: Seconds of a job before the first has ended.
_GUESSED_SECONDS = 10.0


@ROUTES.post("/sdapi/v1/txt2img")
@ROUTES.post("/sdapi/v1/img2img")
async def _draw(request: web.Request) -> web.Response:
    """Draws images, and answers with them in base64."""
    is_img2img = request.path.endswith("img2img")
    styles = request.app[STYLES]
    ignored = payloads.IGNORED[is_img2img]
    async with work.received(request, ignored) as given:
        payload = given.fields
        if is_img2img and not payload.get("init_images"):
            raise Refused(404, "Init image not found")
        options = _options_of(request)
        fields = payloads.fields_of(payload, options, styles)
        for name, value in request.app[DEFAULTS].items():
            if name not in fields["override_settings"]:
                fields.setdefault(name, value)
        ticket = await work.begin(request, given, fields)
    drawn = await work.finish(request, ticket, with_interrupted=True)
    body = await asyncio.to_thread(info.answer, payload, *drawn)
    return web.Response(body=body, content_type="application/json")


@ROUTES.post("/sdapi/v1/extra-single-image")
async def _enlarge(request: web.Request) -> web.Response:
    """Enlarges an image."""
    async with work.received(request) as given:
        payload = given.fields
        ticket = await work.begin(request, given, _enlarging(payload, payload["image"]))
    _, _, images = await work.finish(request, ticket)
    return web.json_response({"image": work.in_base64(images)[0], "html_info": ""})


@ROUTES.post("/sdapi/v1/extra-batch-images")
async def _enlarge_all(request: web.Request) -> web.Response:
    """Enlarges several images."""
    async with work.received(request) as given:
        payload = given.fields
        files = [each["data"] for each in payload.pop("imageList", ())]
        tickets = [
            await work.begin(request, given, _enlarging(payload, file))
            for file in files
        ]
    found = [await work.finish(request, ticket) for ticket in tickets]
    images = [image for _, _, drawn in found for image in drawn]
    return web.json_response({"images": work.in_base64(images), "html_info": ""})


def _enlarging(payload: dict[str, Any], image: object) -> dict[str, Any]:
    """The fields of a job that enlarges; without an upscaler A1111 resamples nothing."""
    return {
        **payload,
        "upscaler_1": payload.get("upscaler_1") or "None",
        "image": image,
    }


@ROUTES.post("/sdapi/v1/png-info")
async def _read_text(request: web.Request) -> web.Response:
    """Reads the parameters in an image."""
    payload = await work.read_object(request)
    data = work.from_base64(str(payload.get("image") or "").strip())
    text = await asyncio.to_thread(work.text_of, data)
    found = {"info": text, "items": {"parameters": text} if text else {}}
    return web.json_response(found | {"parameters": picture.parsed_parameters(text)})


@ROUTES.get("/sdapi/v1/progress")
async def _progress(request: web.Request) -> web.Response:
    """Tells how far the client's own jobs are, by the seconds that others took for a step."""
    desk = request.app[DESK]
    tickets = desk.of(request[CLIENT])
    job, step, steps, progress, left = "", 0, 0, 0.0, 0.0
    if tickets:
        first = tickets[0]
        job, steps = first.id, first.job.steps
        expected = desk.seconds_per_step * steps * first.job.images or _GUESSED_SECONDS
        passed = time.monotonic() - first.created_at
        # Nobody tells of steps: it nears 1, and reaches it with the image.
        progress = min(0.01 + passed / expected, passed / (passed + 0.05 * expected))
        step = int(progress * steps)
        left = max(0.0, expected - passed)
    state = {
        "skipped": False,
        "interrupted": False,
        "stopping_generation": False,
        "job": job,
        "job_count": len(tickets),
        "job_timestamp": "0",
        "job_no": 0,
        "sampling_step": step,
        "sampling_steps": steps,
    }
    found = {"progress": progress, "eta_relative": left, "state": state}
    return web.json_response(found | {"current_image": None, "textinfo": None})


@ROUTES.post("/sdapi/v1/interrupt")
async def _interrupt(request: web.Request) -> web.Response:
    """Ends the client's own requests, with what is drawn of them."""
    request.app[DESK].interrupt(request[CLIENT])
    return web.json_response({})


@ROUTES.post("/sdapi/v1/skip")
async def _skip(request: web.Request) -> web.Response:
    """Ends the first of the client's own requests, with what is drawn of it."""
    request.app[DESK].interrupt(request[CLIENT], most=1)
    return web.json_response(None)


@ROUTES.get("/sdapi/v1/options")
async def _get_options(request: web.Request) -> web.Response:
    """Shows the client's own options."""
    return web.json_response(_DEFAULTS | _options_of(request))


@ROUTES.post("/sdapi/v1/options")
async def _set_options(request: web.Request) -> web.Response:
    """Sets options for the client's next jobs, as `override_settings` of each would."""
    known = _options_of(request) | await work.read_object(request)
    known = {key: value for key, value in known.items() if value != _DEFAULTS.get(key)}
    try:
        override_settings.fields(known, {}, settings_table.PASSES)
    except ValueError as error:
        raise Refused(422, str(error).replace("override_settings.", "")) from None
    if known.get("sd_model_checkpoint"):
        with validation.as_error(errors.JobError):
            job = Job.model_validate({"prompt": "", "override_settings": known})
        try:
            await request.app[DESK].models.resolve(request[CLIENT], job)
        except UnknownModelError as error:
            error.status = 500  # A1111's own
            raise
    request.app[OPTIONS][request[CLIENT].sha256] = known
    return web.json_response(None)


def _options_of(request: web.Request) -> dict[str, Any]:
    return request.app[OPTIONS].get(request[CLIENT].sha256, {})
