"""A1111's lists: what the workers and the storage have, and empty ones of what is not there."""

import json
from pathlib import Path, PurePosixPath

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web import AppKey, Request, Response, RouteTableDef

from gateway.models import Models
from gateway.work import DESK
from imagefleet.files import kinds
from imagefleet.job import samplers
from imagefleet.job.passes import hires
from imagefleet.validation import JSONDict

ROUTES = RouteTableDef()

STYLES = AppKey("styles", dict[str, tuple[str, str]])

#: Characters of a checkpoint's hash in its title.
_SHORT_HASH = 10

#: Answers of A1111 1.10 as it is installed, without files of its own, by their paths.
_INSTALLED: JSONDict = json.loads(
    Path(__file__).with_name("answers.json").read_text(encoding="utf-8")
)

#: What `options` has before anybody sets something.
DEFAULT_OPTIONS: JSONDict = _INSTALLED.pop("/sdapi/v1/options")

#: What there is nothing to do for: lists are read anew, and workers load what jobs name.
_DONE = (
    "refresh-checkpoints",
    "refresh-vae",
    "refresh-loras",
    "refresh-embeddings",
    "unload-checkpoint",
    "reload-checkpoint",
)


def fixed(body: str, content_type: str = "application/json") -> Handler:
    """The handler of an answer that is always the same."""

    async def answer(_: Request) -> Response:
        """Always answers the same."""
        return Response(text=body, content_type=content_type)

    return answer


def _samplers() -> list[JSONDict]:
    by_title: dict[str, list[str]] = {}
    for sampler in samplers.SAMPLERS.values():
        by_title.setdefault(sampler.title, []).extend(sampler.aliases)
    return [
        {"name": name, "aliases": aliases, "options": {}}
        for name, aliases in by_title.items()
    ]


_FIXED = {
    **_INSTALLED,
    "/sdapi/v1/samplers": _samplers(),
    "/sdapi/v1/schedulers": [
        {
            "name": name,
            "label": label,
            "aliases": None,
            "default_rho": -1.0,
            "need_inner_model": False,
        }
        for name, label in {"automatic": "Automatic", **samplers.SCHEDULES}.items()
    ],
    "/sdapi/v1/latent-upscale-modes": [{"name": name} for name in hires.LATENT],
}

for _path, _body in _FIXED.items():
    ROUTES.get(_path)(fixed(json.dumps(_body)))
for _name in _DONE:
    ROUTES.post(f"/sdapi/v1/{_name}")(fixed("null"))


@ROUTES.get("/sdapi/v1/sd-models")
async def _list_models(request: Request) -> Response:
    """Lists the checkpoints that workers serve or the storage holds."""
    models = await _models(request)
    rows = []
    for name in models.known:
        known = models.held.hashes.get(name, "")
        short = known[:_SHORT_HASH]
        rows.append(
            {
                "title": f"{name} [{short}]" if short else name,
                "model_name": name,
                "filename": name,
                "hash": short or None,
                "sha256": known if len(known) > _SHORT_HASH else None,
                "config": None,
            }
        )
    return web.json_response(rows)


@ROUTES.get("/sdapi/v1/loras")
async def _list_loras(request: Request) -> Response:
    """Lists the LoRAs in the storage, and in folders of workers."""
    models = await _models(request)
    found = await _stored(request, kinds.LORA)
    for name in sorted(models.held.loras):
        found.setdefault(name, name + kinds.LORA.suffixes[0])
    return web.json_response(
        [
            {"name": name, "alias": name, "path": file, "metadata": {}}
            for name, file in found.items()
        ]
    )


@ROUTES.get("/sdapi/v1/sd-vae")
@ROUTES.get("/sdapi/v1/sd-modules")
async def _list_vaes(request: Request) -> Response:
    """Lists the VAEs in the storage."""
    return web.json_response(
        [
            {"model_name": name, "filename": file}
            for name, file in (await _stored(request, kinds.VAE)).items()
        ]
    )


@ROUTES.get("/sdapi/v1/embeddings")
async def _list_embeddings(request: Request) -> Response:
    """Lists the embeddings in the storage."""
    facts = {
        "step": None,
        "sd_checkpoint": None,
        "sd_checkpoint_name": None,
        "shape": 0,
        "vectors": 0,
    }
    loaded = dict.fromkeys(await _stored(request, kinds.EMBEDDING), facts)
    return web.json_response({"loaded": loaded, "skipped": {}})


@ROUTES.get("/sdapi/v1/upscalers")
async def _list_upscalers(request: Request) -> Response:
    """Lists the upscalers in the storage, and those without a file."""
    names = [*hires.RESAMPLING, *await _stored(request, kinds.UPSCALER)]
    return web.json_response(
        [
            {
                "name": name,
                "model_name": None,
                "model_path": None,
                "model_url": None,
                "scale": 4,
            }
            for name in names
        ]
    )


@ROUTES.get("/sdapi/v1/prompt-styles")
async def _list_styles(request: Request) -> Response:
    """Lists the styles of --styles-file."""
    return web.json_response(
        [
            {"name": name, "prompt": prompt, "negative_prompt": negative_prompt}
            for name, (prompt, negative_prompt) in request.app[STYLES].items()
        ]
    )


@ROUTES.get("/controlnet/model_list")
async def _list_controlnets(request: Request) -> Response:
    """Lists the ControlNets in the storage."""
    return web.json_response(
        {"model_list": list(await _stored(request, kinds.CONTROLNET))}
    )


@ROUTES.get("/controlnet/control_types")
async def _list_control_types(request: Request) -> Response:
    """Lists the one type of ControlNets: all of them, of pictures as they are to be used."""
    every = {
        "module_list": ["none"],
        "model_list": ["None", *await _stored(request, kinds.CONTROLNET)],
        "default_option": "none",
        "default_model": "None",
    }
    return web.json_response({"control_types": {"All": every}})


async def _models(request: Request) -> Models:
    """The models that there are now, and what is known of them."""
    models = request.app[DESK].models
    await models.refresh()
    await models.held.refresh(models.served)
    return models


async def _stored(request: Request, kind: kinds.FileKind) -> dict[str, str]:
    """The files of a kind in the storage: their names by how jobs name them."""
    found = {}
    async for name in request.app[DESK].storage.files.names(f"{kind.folder}/"):
        file = PurePosixPath(name).name
        if (stem := kind.stem(file)) != file:
            found[stem] = file
    return found
