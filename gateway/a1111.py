"""AUTOMATIC1111's API: https://github.com/AUTOMATIC1111/stable-diffusion-webui/wiki/API."""

import asyncio
import time

from aiohttp import web
from aiohttp.web import AppKey, Request, Response, RouteTableDef

from gateway import info, payloads, work
from gateway.lists import DEFAULT_OPTIONS, STYLES
from gateway.models import UnknownModelError
from gateway.work import CLIENT, DESK
from imagefleet import validation
from imagefleet.errors import JobError
from imagefleet.files import picture
from imagefleet.http import bodies, sent_images
from imagefleet.http.refused import Refused
from imagefleet.job import override_settings, settings_table
from imagefleet.job.message import Job
from imagefleet.job.passes.fields import only_upscales
from imagefleet.validation import JSONDict

ROUTES = RouteTableDef()

#: What clients have set, by their keys; forgotten when the gateway stops.
OPTIONS = AppKey("options", dict[str, JSONDict])

#: The values of fields that a payload leaves out.
DEFAULTS = AppKey("defaults", JSONDict)

#: Seconds of a job before the first has ended.
_GUESSED_SECONDS = 10.0


@ROUTES.post("/sdapi/v1/txt2img")
@ROUTES.post("/sdapi/v1/img2img")
async def _draw(request: Request) -> Response:
    """Draws images, and answers with them in base64."""
    is_img2img = request.path.endswith("img2img")
    styles = request.app[STYLES]
    async with work.received(request, payloads.IGNORED[is_img2img]) as given:
        payload = given.fields
        if is_img2img and not payload.get("init_images"):
            raise Refused(404, "Init image not found")
        fields = payloads.fields_of(payload, _options_of(request), styles)
        for name, value in request.app[DEFAULTS].items():
            if name not in fields["override_settings"]:
                fields.setdefault(name, value)
        ticket = await work.begin(request, given, fields)
    drawn = await work.finish(request, ticket, with_interrupted=True)
    body = await asyncio.to_thread(info.answer, payload, *drawn)
    return Response(body=body, content_type="application/json")


@ROUTES.post("/sdapi/v1/extra-single-image")
@ROUTES.post("/sdapi/v1/extra-batch-images")
async def _enlarge(request: Request) -> Response:
    """Enlarges an image, or several."""
    async with work.received(request) as given:
        payload = given.fields
        rows = payload.pop("imageList", None)
        is_single = rows is None
        try:
            files = [row["data"] for row in rows or ({"data": payload.pop("image")},)]
            images = [given.images[file] for file in files]
        except (KeyError, TypeError):
            raise Refused(422, "there is no image") from None
        tickets = []
        if only_upscales(payload):
            images.clear()  # else they are left as they are, as A1111 does
            tickets = [
                await work.begin(request, given, {**payload, "image": file})
                for file in files
            ]
    for ticket in tickets:
        _, _, drawn = await work.finish(request, ticket)
        images += drawn
    found = sent_images.in_base64(images)
    shown = {"image": found[0]} if is_single else {"images": found}
    return web.json_response({**shown, "html_info": ""})


@ROUTES.post("/controlnet/detect")
async def _detect(request: Request) -> Response:
    """Prepares images for a ControlNet: by no module, which leaves them as they are."""
    async with work.received(request) as given:
        if given.fields.get("controlnet_module", "none") != "none":
            raise Refused(422, "Module not available")
        if not given.images:
            raise Refused(422, "No image selected")
        images = sent_images.in_base64(given.images.values())
    return web.json_response({"images": images, "info": "Success"})


@ROUTES.post("/sdapi/v1/png-info")
async def _read_text(request: Request) -> Response:
    """Reads the parameters in an image."""

    def parse(body: bytearray, _: str) -> str:
        image = bodies.json_object(body).get("image")
        return sent_images.text_of(sent_images.from_base64(str(image or "").strip()))

    async with request.app[work.BODIES].read(request, request[CLIENT], parse) as text:
        return web.json_response(
            {
                "info": text,
                "items": {"parameters": text} if text else {},
                "parameters": picture.parsed_parameters(text),
            }
        )


@ROUTES.get("/sdapi/v1/progress")
async def _progress(request: Request) -> Response:
    """Tells how far the client's own jobs are, by the seconds that others took for a step."""
    desk = request.app[DESK]
    tickets = desk.of(request[CLIENT])
    job = ""
    step = steps = 0
    progress = left = 0.0
    if tickets:
        first = tickets[0]
        job = first.id
        steps = first.job.steps
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
    return web.json_response(
        {
            "progress": progress,
            "eta_relative": left,
            "state": state,
            "current_image": None,
            "textinfo": None,
        }
    )


@ROUTES.post("/sdapi/v1/interrupt")
@ROUTES.post("/sdapi/v1/skip")
async def _interrupt(request: Request) -> Response:
    """Ends the client's own requests, or the first of them, with what is drawn of them."""
    is_skip = request.path.endswith("skip")
    request.app[DESK].interrupt(request[CLIENT], most=1 if is_skip else None)
    return web.json_response(None if is_skip else {})


@ROUTES.get("/sdapi/v1/options")
async def _get_options(request: Request) -> Response:
    """Shows the client's own options, and the checkpoint that draws where none is set."""
    models = request.app[DESK].models
    await models.refresh()
    drawing = {"sd_model_checkpoint": min(models.served, default="")}
    return web.json_response(DEFAULT_OPTIONS | drawing | _options_of(request))


@ROUTES.post("/sdapi/v1/options")
async def _set_options(request: Request) -> Response:
    """Sets options for the client's next jobs, as `override_settings` of each would."""
    known = _options_of(request) | await work.read_object(request)
    known = {
        key: value
        for key, value in known.items()
        if (key, value) not in DEFAULT_OPTIONS.items()
    }
    try:
        override_settings.fields(known, {}, settings_table.PASSES)
    except ValueError as error:
        raise Refused(422, str(error).replace("override_settings.", "")) from None
    if known.get("sd_model_checkpoint"):
        with validation.as_error(JobError):
            job = Job.model_validate({"prompt": "", "override_settings": known})
        try:
            await request.app[DESK].models.resolve(request[CLIENT], job)
        except UnknownModelError as error:
            error.status = 500  # A1111's own
            raise
    request.app[OPTIONS][request[CLIENT].sha256] = known
    return web.json_response(None)


def _options_of(request: Request) -> JSONDict:
    return request.app[OPTIONS].get(request[CLIENT].sha256, {})
