"""The gallery's HTTP server: the page, and the JSON and images that it asks for."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, get_args

from aiohttp import web

from fleet import console
from fleet.gallery import campaign as campaign_index
from fleet.gallery import guard
from fleet.gallery.campaign import Campaign, Campaigns, View
from fleet.gallery.images import Images
from fleet.gallery.index import Facet, Filter, Row, Tab
from fleet.keys import check
from imagefleet import aio, errors, redaction
from imagefleet.files.picture import DamagedImageError
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import LOCAL_SCHEME
from imagefleet.storage.settings import Resource, StorageSettings

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

#: The most characters of a prompt or a reason on a tile; the record has the rest.
_TILE_CHARACTERS = 240

#: What a replay does: it takes the job out of one queue and puts it into another.
_NEEDED: dict[Resource, str] = {"queue": "a", "poison": "rup"}


@asynccontextmanager
async def opened(
    fleet: aio.Fleet, settings: StorageSettings, *, host: str, campaign: str | None
) -> AsyncIterator[web.Application]:
    """The gallery of a storage."""
    is_local = settings.storage.strip().startswith(LOCAL_SCHEME)
    pace = campaign_index.LOCAL_PACE if is_local else campaign_index.REMOTE_PACE
    campaigns = Campaigns(fleet.storage, pace, campaign)
    try:
        yield Gallery(fleet, settings, host, campaigns).application()
    finally:
        await campaigns.close()


class Replays:
    """Replays failed jobs of one storage, or says why it may not."""

    def __init__(self, fleet: aio.Fleet, settings: StorageSettings, host: str) -> None:
        self._fleet = fleet
        self._settings = settings
        self._host = host
        self._refusal: str | None = None
        self._lock = asyncio.Lock()

    async def refusal(self) -> str:
        """Why no job can be sent again; empty if one can be."""
        async with self._lock:
            if self._refusal is None:
                self._refusal = await self._find_refusal()
        return self._refusal

    async def _find_refusal(self) -> str:
        if not guard.is_loopback(self._host):
            return f"The gallery listens on {self._host}: anybody there could send jobs again."
        if self._settings.storage.strip().startswith(LOCAL_SCHEME):
            return ""
        try:
            checked = {each.resource: each for each in await check.check(self._settings)}
        except errors.FleetError as error:
            return error.message
        if all(
            set(letters) <= set(checked[resource].allowed) for resource, letters in _NEEDED.items()
        ):
            return ""
        name = ROLES["operator"].name
        return (
            f"These credentials may only read. Tokens of the role {name} may send jobs again:"
            f" imagefleet keys mint {name}"
        )

    async def replay(self, record: Record) -> None:
        """Puts a failed job back into the queue; raises FleetError, which says why, if it stays."""
        if refusal := await self.refusal():
            raise errors.SetupError(refusal)
        async with self._lock:
            swept = await self._fleet.replay(id=record.id, campaign=record.campaign)
        if swept.refused:
            raise errors.JobError(swept.refused[0].reason)
        if not swept.done:
            raise errors.JobError("It is not in the poison queue any more.")


class Gallery:
    """The handlers of all requests."""

    def __init__(
        self, fleet: aio.Fleet, settings: StorageSettings, host: str, campaigns: Campaigns
    ) -> None:
        self._campaigns = campaigns
        self._images = Images(fleet.storage.blobs)
        self._replays = Replays(fleet, settings, host)
        self._guard = guard.Guard(host)
        self._storage = fleet.storage.url
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
                "storage": printable(self._storage),
            }
        )

    async def _state(self, request: web.Request) -> web.Response:
        await (await self._campaign(request)).refresh()
        campaign, view = await self._chosen(request)
        tabs, jobs = await asyncio.to_thread(campaign.index.counts)
        return web.json_response(
            {
                "total": len(view.seqs),
                "generation": view.generation,
                "index": campaign.index.birth,
                "counts": tabs,
                "jobs": jobs,
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
                [name, printable(name), count]
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
            {"generation": view.generation, "from": start, "rows": _tiles(rows)}
        )

    async def _record(self, request: web.Request) -> web.Response:
        record = await self._found(request)
        answer = _shown(record)
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
        def is_wanted() -> bool:
            # Else the browser has closed the connection: the tile is off the screen again.
            return request.transport is not None and not request.transport.is_closing()

        made = await self._images.thumbnail(await self._found(request), is_wanted)
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


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):  # noqa: PLR2004 - 12 digits
        raise web.HTTPBadRequest(text=f"{name} should be a number\n")
    return int(text)


@web.middleware
async def _errors_as_json(request: web.Request, handler: guard.Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except sqlite3.Error as error:
        reason, status = f"The index of the gallery cannot be read: {error}", 503
    except (DamagedImageError, errors.FleetError) as error:
        statuses = {DamagedImageError: 415, errors.JobError: 409, errors.FleetError: 503}
        reason = str(error)
        status = next(code for kind, code in statuses.items() if isinstance(error, kind))
    return web.json_response({"error": _sentence(reason)}, status=status)


def _sentence(text: str) -> str:
    return printable(redaction.message(text))


def _tiles(rows: Iterable[Row]) -> list[list[Any]]:
    """The tile of each row: its number, its job, its prompt and why it failed."""
    return [
        [
            row.seq,
            printable(row.job),
            printable(row.prompt[:_TILE_CHARACTERS]),
            row.reason and printable(row.reason[:_TILE_CHARACTERS]),
        ]
        for row in rows
    ]


def _shown(found: Record) -> dict[str, Any]:
    """All of a record that its view has."""
    dumped = found.model_dump(mode="json", exclude_none=True)
    shown: dict[str, Any] = _printable(dumped)
    shown["text"] = console.json_text(_as_job(found)).rstrip()
    return shown


def _as_job(found: Record) -> dict[str, Any]:
    """A job that draws the same image again, as `imagefleet load` reads it.

    Without the id: an image of that name is stored already.
    """
    fields = {
        "campaign": None if found.campaign == DEFAULT_CAMPAIGN else found.campaign,
        "prompt": found.prompt,
        "negative_prompt": found.negative_prompt or None,
        "model": found.model,
        "sampler_name": found.sampler,
        "steps": found.steps,
        "cfg_scale": found.cfg_scale,
        "clip_skip": None if found.clip_skip == 1 else found.clip_skip,
        "width": found.width,
        "height": found.height,
        "seed": found.seed,
        "metadata": found.metadata or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return value
