"""The gallery's HTTP server: the page, and the JSON and images that it asks for."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, get_args

from aiohttp import web

from fleet.gallery import campaign as campaign_index
from fleet.gallery import guard, shown
from fleet.gallery.campaign import Campaign, Campaigns, View
from fleet.gallery.images import Images
from fleet.gallery.index import Facet, Filter, Tab
from fleet.gallery.replay import Replays
from imagefleet import aio, errors, redaction
from imagefleet.files.picture import DamagedImageError
from imagefleet.records.record import Record
from imagefleet.storage.open import LOCAL_SCHEME
from imagefleet.storage.settings import StorageSettings

PAGE = resources.files("fleet.gallery") / "page"

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

#: LoRAs and workers to choose from, the most frequent.
_MOST_NAMES = 1_000

#: Rows in one answer.
_MOST_ROWS = 500

#: The most characters of a text that is searched for.
_MOST_CHARACTERS = 500

#: A request's body.
_MOST_BYTES = 10_000

#: A thumbnail's address names the index; a picture may be replaced by `imagefleet redo`.
_FOREVER = "private, max-age=31536000, immutable"
_A_WHILE = "private, max-age=300"


@asynccontextmanager
async def opened(
    fleet: aio.Fleet, settings: StorageSettings, *, host: str, campaign: str | None
) -> AsyncIterator[web.Application]:
    """The gallery of a storage."""
    storage = fleet.storage
    is_local = settings.storage.strip().startswith(LOCAL_SCHEME)
    pace = campaign_index.LOCAL_PACE if is_local else campaign_index.REMOTE_PACE
    campaigns = Campaigns(storage, pace, campaign)
    replays = Replays(fleet, settings, host)
    gallery = Gallery(campaigns, Images(storage.blobs), replays, guard.Guard(host), storage.url)
    try:
        yield gallery.application()
    finally:
        await campaigns.close()


class Gallery:
    """The handlers of all requests."""

    def __init__(
        self,
        campaigns: Campaigns,
        images: Images,
        replays: Replays,
        guarded: guard.Guard,
        storage: str,
    ) -> None:
        self._campaigns = campaigns
        self._images = images
        self._replays = replays
        self._guard = guarded
        self._storage = storage
        self._files = {
            file.name: file.read_bytes()
            for file in PAGE.iterdir()
            if file.name.rpartition(".")[2] in _TYPES
        }
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        self._page = page.replace("{{token}}", self._guard.token)

    def application(self) -> web.Application:
        app = web.Application(
            middlewares=[_errors_as_json, self._guard.check], client_max_size=_MOST_BYTES
        )
        app.on_response_prepare.append(guard.add_headers)
        app.router.add_get("/", self._show_page)
        app.router.add_get("/page/{name}", self._file)
        app.router.add_get("/api/campaigns", self._list_campaigns)
        app.router.add_get("/api/state", self._state)
        app.router.add_get("/api/names", self._names)
        app.router.add_get("/api/rows", self._rows)
        app.router.add_get("/api/record", self._record)
        app.router.add_post("/api/replay", self._replay)
        app.router.add_get("/thumbnail", self._thumbnail)
        app.router.add_get("/picture", self._picture)
        return app

    async def _show_page(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8")

    async def _list_campaigns(self, request: web.Request) -> web.Response:
        newest = await self._campaigns.newest() if "first" in request.query else None
        return web.json_response(
            {
                "campaigns": await self._campaigns.names(),
                "newest": newest,
                "storage": redaction.printable(self._storage),
            }
        )

    async def _state(self, request: web.Request) -> web.Response:
        await (await self._campaign(request)).refresh()
        campaign, view = await self._chosen(request)
        counts = await asyncio.to_thread(campaign.index.counts)
        return web.json_response(
            {
                "total": len(view.seqs),
                "generation": view.generation,
                "index": campaign.index.birth,
                "counts": counts.tabs,
                "jobs": counts.jobs,
                "sent": campaign.sent,
                "reading": not view.is_complete,
                "read": campaign.read_share,
                "damaged": campaign.damaged.count,
                "problem": _sentence(campaign.problem),
            }
        )

    async def _names(self, request: web.Request) -> web.Response:
        campaign = await self._campaign(request)
        kinds: tuple[Facet, ...] = get_args(Facet)
        found = {
            kind: [
                [name, redaction.printable(name), count]
                for name, count in await asyncio.to_thread(campaign.index.names, kind, _MOST_NAMES)
            ]
            for kind in kinds
        }
        return web.json_response(found)

    async def _rows(self, request: web.Request) -> web.Response:
        campaign, view = await self._chosen(request, is_new=False)
        start, count = _number(request, "from"), min(_number(request, "count"), _MOST_ROWS)
        seqs = view.seqs[start : start + count].tolist()
        rows = await asyncio.to_thread(campaign.index.rows, seqs)
        return web.json_response(
            {"generation": view.generation, "from": start, "rows": shown.tiles(rows)}
        )

    async def _record(self, request: web.Request) -> web.Response:
        record = await self._found(request)
        answer = shown.record(record)
        if record.outcome == "failed":
            answer["refusal"] = _sentence(await self._replays.refusal())
        return web.json_response(answer)

    async def _replay(self, request: web.Request) -> web.Response:
        record = await self._found(request)
        if record.outcome != "failed":
            raise errors.JobError("only a failed job can be sent again")
        await self._replays.replay(record)
        return web.json_response({})

    async def _thumbnail(self, request: web.Request) -> web.Response:
        made = await self._images.thumbnail(
            await self._found(request), lambda: not _is_given_up(request)
        )
        headers = {"Cache-Control": _FOREVER}
        return web.Response(body=made, content_type="image/jpeg", headers=headers)

    async def _picture(self, request: web.Request) -> web.Response:
        data, kind = await self._images.picture(await self._found(request))
        headers = {"Cache-Control": _A_WHILE}
        return web.Response(body=data, content_type=kind, headers=headers)

    async def _campaign(self, request: web.Request) -> Campaign:
        return await self._campaigns.get(request.query.get("campaign", ""))

    async def _chosen(self, request: web.Request, *, is_new: bool = True) -> tuple[Campaign, View]:
        campaign = await self._campaign(request)
        tabs: tuple[Tab, ...] = get_args(Tab)
        asked = request.query.get("tab", "images")
        tab = next((each for each in tabs if each == asked), tabs[0])
        text, lora, worker = (
            request.query.get(name, "")[:_MOST_CHARACTERS] for name in ("text", "lora", "worker")
        )
        return campaign, await campaign.view(Filter(tab, text, lora, worker), is_new=is_new)

    async def _found(self, request: web.Request) -> Record:
        campaign = await self._campaign(request)
        record = await asyncio.to_thread(campaign.index.record, _number(request, "seq"))
        if record is None:
            raise web.HTTPNotFound(text="there is no such row\n")
        return record


def _is_given_up(request: web.Request) -> bool:
    """Whether the browser has closed the connection: the tile is off the screen again."""
    return request.transport is None or request.transport.is_closing()


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):  # noqa: PLR2004 - 12 digits
        raise web.HTTPBadRequest(text=f"{name} should be a number\n")
    return int(text)


@web.middleware
async def _errors_as_json(request: web.Request, handler: guard.Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except DamagedImageError as error:
        return _refusal(str(error), 415)
    except errors.JobError as error:
        return _refusal(error.message, 409)
    except errors.FleetError as error:
        return _refusal(error.message, 503)
    except sqlite3.Error as error:
        return _refusal(f"The index of the gallery cannot be read: {error}", 503)


def _refusal(reason: str, status: int) -> web.Response:
    answer: dict[str, Any] = {"error": _sentence(reason)}
    return web.json_response(answer, status=status)


def _sentence(text: str) -> str:
    return redaction.printable(redaction.message(text))
