"""A1111's lists: what the workers and the storage have, and empty ones of what is not there."""

from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath
from typing import Any

from aiohttp import web

from gateway.work import DESK
from imagefleet.files import kinds
from imagefleet.job import samplers
from imagefleet.job.passes import hires

ROUTES = web.RouteTableDef()

STYLES = web.AppKey("styles", dict[str, tuple[str, str]])

#: Answers that are always the same.
_FIXED: dict[str, Any] = {
    "/sdapi/v1/hypernetworks": [],
    "/sdapi/v1/face-restorers": [],
    "/sdapi/v1/realesrgan-models": [],
    "/sdapi/v1/script-info": [],
    "/sdapi/v1/extensions": [],
    "/sdapi/v1/scripts": {"txt2img": ["controlnet"], "img2img": ["controlnet"]},
    "/sdapi/v1/latent-upscale-modes": [{"name": name} for name in hires.LATENT],
    "/sdapi/v1/cmd-flags": {"api": True, "nowebui": True},
    "/sdapi/v1/memory": {"ram": {}, "cuda": {}},
    "/controlnet/version": {"version": 2},
    "/controlnet/module_list": {"module_list": ["none"], "module_detail": {}},
    "/controlnet/settings": {"control_net_unit_count": 3},
}

#: What there is nothing to do for: lists are read anew, and workers load what jobs name.
_DONE = (
    "refresh-checkpoints",
    "refresh-vae",
    "refresh-loras",
    "refresh-embeddings",
    "unload-checkpoint",
    "reload-checkpoint",
)


def _fixed(body: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        """Is there for A1111's programs, and always answers the same."""
        return web.json_response(body)

    return answer


for _path, _body in _FIXED.items():
    ROUTES.get(_path)(_fixed(_body))
for _name in _DONE:
    ROUTES.post(f"/sdapi/v1/{_name}")(_fixed(None))


@ROUTES.get("/sdapi/v1/samplers")
async def _list_samplers(_: web.Request) -> web.Response:
    """Lists the samplers."""
    by_title: dict[str, list[str]] = {}
    for sampler in samplers.SAMPLERS.values():
        by_title.setdefault(sampler.title, []).extend(sampler.aliases)
    return web.json_response(
        [
            {"name": name, "aliases": aliases, "options": {}}
            for name, aliases in by_title.items()
        ]
    )


@ROUTES.get("/sdapi/v1/schedulers")
async def _list_schedulers(_: web.Request) -> web.Response:
    """Lists the schedules."""
    named = {"automatic": "Automatic"} | dict(samplers.SCHEDULES)
    extra = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    return web.json_response(
        [{"name": name, "label": label, **extra} for name, label in named.items()]
    )


@ROUTES.get("/sdapi/v1/sd-models")
async def _list_models(request: web.Request) -> web.Response:
    """Lists the checkpoints that workers serve or the storage holds."""
    models = request.app[DESK].models
    await models.refresh()
    extra = {"hash": None, "sha256": None, "config": None}
    return web.json_response(
        [
            {"title": name, "model_name": name, "filename": name, **extra}
            for name in models.known
        ]
    )


@ROUTES.get("/sdapi/v1/loras")
async def _list_loras(request: web.Request) -> web.Response:
    """Lists the LoRAs in the storage."""
    found = await _stored(request, kinds.LORA)
    return web.json_response(
        [
            {"name": name, "alias": name, "path": file, "metadata": {}}
            for name, file in found.items()
        ]
    )


@ROUTES.get("/sdapi/v1/sd-vae")
@ROUTES.get("/sdapi/v1/sd-modules")
async def _list_vaes(request: web.Request) -> web.Response:
    """Lists the VAEs in the storage."""
    found = await _stored(request, kinds.VAE)
    return web.json_response(
        [{"model_name": name, "filename": file} for name, file in found.items()]
    )


@ROUTES.get("/sdapi/v1/embeddings")
async def _list_embeddings(request: web.Request) -> web.Response:
    """Lists the embeddings in the storage."""
    found = await _stored(request, kinds.EMBEDDING)
    facts = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None}
    loaded = {name: facts | {"shape": 0, "vectors": 0} for name in found}
    return web.json_response({"loaded": loaded, "skipped": {}})


@ROUTES.get("/sdapi/v1/upscalers")
async def _list_upscalers(request: web.Request) -> web.Response:
    """Lists the upscalers in the storage, and those without a file."""
    names = [*hires.RESAMPLING, *await _stored(request, kinds.UPSCALER)]
    extra = {"model_name": None, "model_path": None, "model_url": None, "scale": 4}
    return web.json_response([{"name": name, **extra} for name in names])


@ROUTES.get("/sdapi/v1/prompt-styles")
async def _list_styles(request: web.Request) -> web.Response:
    """Lists the styles of --styles-file."""
    styles = request.app[STYLES]
    return web.json_response(
        [
            {"name": name, "prompt": prompt, "negative_prompt": negative_prompt}
            for name, (prompt, negative_prompt) in styles.items()
        ]
    )


@ROUTES.get("/controlnet/model_list")
async def _list_controlnets(request: web.Request) -> web.Response:
    """Lists the ControlNets in the storage."""
    found = await _stored(request, kinds.CONTROLNET)
    return web.json_response({"model_list": list(found)})


async def _stored(request: web.Request, kind: kinds.FileKind) -> dict[str, str]:
    """The files of a kind in the storage: their names by how jobs name them."""
    found = {}
    async for name in request.app[DESK].storage.files.names(f"{kind.folder}/"):
        file = PurePosixPath(name).name
        if (stem := kind.stem(file)) != file:
            found[stem] = file
    return found
