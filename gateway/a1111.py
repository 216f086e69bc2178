"""AUTOMATIC1111's API: https://github.com/AUTOMATIC1111/stable-diffusion-webui/wiki/API."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Any

from aiohttp import web

from gateway import work
from gateway.models import UnknownModelError
from gateway.work import CLIENT, DESK
from imagefleet import errors, validation
from imagefleet.files import kinds
from imagefleet.http.refused import Refused
from imagefleet.job import override_settings, samplers, settings_table
from imagefleet.job.message import Job
from imagefleet.job.passes import hires
from imagefleet.records.outcomes import JobFacts

ROUTES = web.RouteTableDef()

#: What clients have set, by their names; forgotten when the gateway stops.
OPTIONS = web.AppKey("options", dict[str, dict[str, Any]])

#: What `options` has before anybody sets something, of what clients look at.
_DEFAULTS = {
    "sd_model_checkpoint": "",
    "CLIP_stop_at_last_layers": 1,
    "samples_format": "png",
}


@ROUTES.post("/sdapi/v1/txt2img")
@ROUTES.post("/sdapi/v1/img2img")
async def _draw(request: web.Request) -> web.Response:
    """Draws images, and answers with them in base64."""
    async with work.received(request) as given:
        payload = given.fields
        if request.path.endswith("img2img") and not payload.get("init_images"):
            raise Refused(422, "init_images: is required")
        options = {**_options_of(request), **(payload.get("override_settings") or {})}
        if payload.get("sampler_name"):
            payload.pop("sampler_index", None)
        fields = {**payload, "override_settings": options}
        ticket = await work.begin(request, given, fields)
    drawn = await work.finish(request, ticket)
    body = await asyncio.to_thread(_answer, payload, *drawn)
    return web.Response(body=body, content_type="application/json")


@ROUTES.post("/sdapi/v1/png-info")
async def _read_text(request: web.Request) -> web.Response:
    """Reads the parameters in an image."""
    payload = await work.read_object(request)
    data = work.from_base64(str(payload.get("image") or ""))
    text = await asyncio.to_thread(work.text_of, data)
    return web.json_response(
        {"info": text, "items": {"parameters": text}, "parameters": {}}
    )


@ROUTES.get("/sdapi/v1/progress")
async def _progress(request: web.Request) -> web.Response:
    """Tells how far the client's own jobs are: how many, and for how long they have waited."""
    tickets = request.app[DESK].of(request[CLIENT])
    job, steps, progress = "", 0, 0.0
    if tickets:
        job = tickets[0].id
        steps = tickets[0].job.steps
        # Workers tell of images, not of steps: it nears 1 as time goes by.
        progress = 1 - math.exp((tickets[0].created_at - time.monotonic()) / 10)
    state = {
        "skipped": False,
        "interrupted": False,
        "job": job,
        "job_count": len(tickets),
    }
    state |= {"job_no": 0, "sampling_step": 0, "sampling_steps": steps}
    found = {"progress": progress, "eta_relative": 0.0, "state": state}
    return web.json_response(found | {"current_image": None, "textinfo": None})


@ROUTES.post("/sdapi/v1/interrupt")
async def _interrupt(request: web.Request) -> web.Response:
    """Cancels the client's own jobs that have not begun."""
    request.app[DESK].interrupt(request[CLIENT])
    return web.json_response({})


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
    request.app[OPTIONS][request[CLIENT].name] = known
    return web.json_response(None)


def _options_of(request: web.Request) -> dict[str, Any]:
    return request.app[OPTIONS].get(request[CLIENT].name, {})


@ROUTES.get("/sdapi/v1/samplers")
async def _list_samplers(_: web.Request) -> web.Response:
    """Lists the samplers."""
    by_title: dict[str, list[str]] = {}
    for sampler in samplers.SAMPLERS.values():
        by_title.setdefault(sampler.title, []).extend(sampler.aliases)
    found = [
        {"name": name, "aliases": also, "options": {}}
        for name, also in by_title.items()
    ]
    return web.json_response(found)


@ROUTES.get("/sdapi/v1/schedulers")
async def _list_schedulers(_: web.Request) -> web.Response:
    """Lists the schedules."""
    named = {"automatic": "Automatic"} | dict(samplers.SCHEDULES)
    extra = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    return web.json_response(
        [{"name": key, "label": named[key], **extra} for key in named]
    )


@ROUTES.get("/sdapi/v1/sd-models")
async def _list_models(request: web.Request) -> web.Response:
    """Lists the checkpoints in the storage."""
    extra = {"hash": None, "sha256": None, "config": None}
    found = [
        {"title": stem, "model_name": stem, "filename": file, **extra}
        async for stem, file in _stored(request, kinds.MODEL)
    ]
    return web.json_response(found)


@ROUTES.get("/sdapi/v1/loras")
async def _list_loras(request: web.Request) -> web.Response:
    """Lists the LoRAs in the storage."""
    found = [
        {"name": stem, "alias": stem, "path": file, "metadata": {}}
        async for stem, file in _stored(request, kinds.LORA)
    ]
    return web.json_response(found)


@ROUTES.get("/sdapi/v1/upscalers")
async def _list_upscalers(request: web.Request) -> web.Response:
    """Lists the upscalers in the storage, and those without a file."""
    names = [
        *hires.RESAMPLING,
        *[stem async for stem, _ in _stored(request, kinds.UPSCALER)],
    ]
    extra = {"model_name": None, "model_path": None, "model_url": None, "scale": 4}
    return web.json_response([{"name": name, **extra} for name in names])


@ROUTES.get("/sdapi/v1/scripts")
async def _list_scripts(_: web.Request) -> web.Response:
    """Lists the scripts that jobs may name."""
    return web.json_response({"txt2img": ["controlnet"], "img2img": ["controlnet"]})


async def _stored(
    request: web.Request, kind: kinds.FileKind
) -> AsyncIterator[tuple[str, str]]:
    """The files of a kind, as jobs name them and by their file's name."""
    async for name in request.app[DESK].storage.files.names(f"{kind.folder}/"):
        file = PurePosixPath(name).name
        if (stem := kind.stem(file)) != file:
            yield stem, file


def _answer(
    payload: dict[str, Any], job: Job, facts: JobFacts, images: list[bytes]
) -> bytes:
    """The JSON of txt2img and img2img; large, so that it is made in a thread."""
    record, seed, count = facts.records[0], facts.seed or 0, len(images)
    same = ("prompt", "negative_prompt", "sampler_name", "cfg_scale", "steps")
    info = {name: getattr(job, name) for name in same} | {
        "all_prompts": [job.prompt] * count,
        "all_negative_prompts": [job.negative_prompt] * count,
        "seed": seed,
        "all_seeds": [(seed + index) % 2**32 for index in range(count)],
        "width": record.width,
        "height": record.height,
        "batch_size": count,
        "sd_model_name": record.model,
        "infotexts": list(map(work.text_of, images)),
        "index_of_first_image": 0,
        "job": facts.key,
    }
    left_out = {"init_images", "mask", "alwayson_scripts"}
    shown = {name: value for name, value in payload.items() if name not in left_out}
    found = {
        "images": work.in_base64(images),
        "parameters": shown,
        "info": json.dumps(info),
    }
    return json.dumps(found).encode()
