"""The gallery's HTTP server: the page, and the JSON and images that it asks for."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web import (
    Application,
    FileResponse,
    HTTPNotFound,
    Request,
    Response,
    StreamResponse,
)
from pydantic import BaseModel, Field, ValidationError

from cli import console
from fleet.gallery import campaign, guard
from fleet.gallery.campaign import Campaign, View
from fleet.gallery.images import Images
from fleet.gallery.index import Filter, reason
from imagefleet import redaction, validation
from imagefleet.errors import FleetError
from imagefleet.files.picture import DamagedImageError
from imagefleet.records import catalog, reader
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict

_PAGE = Path(__file__).parent / "page"

#: A thumbnail's address names the index; a picture may be replaced by `imagefleet redo`.
_FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}
_A_WHILE = {"Cache-Control": "private, max-age=300"}

#: The most characters of a prompt or a reason on a tile; the record has the rest.
_TILE_CHARACTERS = 240

_Number = Annotated[int, Field(ge=0, lt=10**12)]


class _Place(BaseModel):
    """The rows that are asked for: some of a list, or one by its number."""

    start: _Number = Field(default=0, alias="from")
    count: Annotated[int, Field(ge=0, le=500)] = 0
    seq: _Number = 0


class Gallery:
    def __init__(self, storage: Storage, host: str, preferred: str | None) -> None:
        """*preferred* is the campaign that is shown first."""
        self._storage = storage
        self._preferred = preferred
        self._open: dict[str, Campaign] = {}
        self._images = Images(storage)
        self._guard = guard.Guard(host)

    def application(self) -> Application:
        app = Application(middlewares=[_errors_as_json, self._guard.check])
        app.on_response_prepare.append(guard.add_headers)
        app.on_cleanup.append(self._close)
        app.router.add_static("/page", _PAGE)
        handlers: dict[str, Handler] = {
            "/": _show_page,
            "/api/campaigns": self._list_campaigns,
            "/api/state": self._state,
            "/api/names": self._names,
            "/api/rows": self._rows,
            "/api/record": self._record,
            "/thumbnail": self._thumbnail,
            "/picture": self._picture,
        }
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
        return app

    async def _close(self, _: Application) -> None:
        for opened_before in self._open.values():
            await opened_before.close()

    async def _list_campaigns(self, request: Request) -> Response:
        newest = self._preferred
        if newest is None and "first" in request.query:
            shards = await catalog.shards_of(self._storage, None)
            newest = max(shards, key=catalog.began_at).campaign if shards else None
        return _answer(
            {
                "campaigns": sorted(await self._campaigns()),
                "newest": newest,
                "storage": self._storage.url,
            }
        )

    async def _campaigns(self) -> set[str]:
        names = {name async for name in reader.campaigns(self._storage)}
        return names | ({self._preferred} if self._preferred else set())

    async def _state(self, request: Request) -> Response:
        await (await self._campaign(request)).refresh()
        shown, view = await self._chosen(request)
        tabs, jobs = shown.index.counts()
        return _answer(
            {
                "total": len(view.seqs),
                "generation": view.generation,
                "index": shown.index.birth,
                "counts": tabs,
                "jobs": jobs,
                "sent": shown.sent,
                "reading": not view.is_complete,
                "read": shown.read_share,
                "damaged": shown.damaged.count,
                "misfits": self._images.misfits(request.query["campaign"]),
                "problem": redaction.message(shown.problem),
            }
        )

    async def _names(self, request: Request) -> Response:
        index = (await self._campaign(request)).index
        return _answer({"lora": index.names("lora"), "worker": index.names("worker")})

    async def _rows(self, request: Request) -> Response:
        shown, view = await self._chosen(request, is_new=False)
        place = _Place.model_validate(dict(request.query))
        seqs = view.seqs[place.start : place.start + place.count].tolist()
        found = await asyncio.to_thread(shown.index.records, seqs)
        rows = [
            [
                seq,
                records[0].id,
                _prompt(records)[:_TILE_CHARACTERS],
                reason(records[0])[:_TILE_CHARACTERS] or None,
            ]
            for seq, records in found.items()
        ]
        return _answer({"generation": view.generation, "rows": rows})

    async def _record(self, request: Request) -> Response:
        record, *_ = records = await self._found(request)
        if record.outcome == "completed":
            try:
                record, *_ = await self._images.picture(records)
            except DamagedImageError:  # nothing says that the record is of this job
                return _answer(
                    record.model_dump(mode="json", include={"outcome", "id", "blob"})
                )
        shown = record.model_dump(mode="json", exclude_none=True)
        shown["text"] = console.json_text(_as_job(record)).rstrip()
        return _answer(shown)

    async def _thumbnail(self, request: Request) -> Response:
        def is_wanted() -> bool:
            # Else the browser has closed the connection: the tile is off the screen again.
            return request.transport is not None and not request.transport.is_closing()

        made = await self._images.thumbnail(await self._found(request), is_wanted)
        return Response(body=made, content_type="image/jpeg", headers=_FOREVER)

    async def _picture(self, request: Request) -> Response:
        _, data, kind = await self._images.picture(await self._found(request))
        return Response(body=data, content_type=kind, headers=_A_WHILE)

    async def _campaign(self, request: Request) -> Campaign:
        name = request.query.get("campaign", "")
        if name not in self._open and name not in await self._campaigns():
            raise HTTPNotFound(text="there is no such campaign\n")
        if name not in self._open:
            seconds = (
                campaign.LOCAL_POLL_SECONDS
                if self._storage.settings.is_local
                else campaign.REMOTE_POLL_SECONDS
            )
            self._open[name] = Campaign(self._storage, name, seconds)
        return self._open[name]

    async def _chosen(
        self, request: Request, *, is_new: bool = True
    ) -> tuple[Campaign, View]:
        shown = await self._campaign(request)
        chosen = Filter.model_validate(dict(request.query))
        return shown, await shown.view(chosen, is_new=is_new)

    async def _found(self, request: Request) -> list[Record]:
        shown = await self._campaign(request)
        seq = _Place.model_validate(dict(request.query)).seq
        found = await asyncio.to_thread(shown.index.records, [seq])
        if seq not in found:
            raise HTTPNotFound(text="there is no such row\n")
        return found[seq]


def _prompt(records: Sequence[Record]) -> str:
    """The prompt of an image's records; none where they differ until it is known which one fits."""
    # One without its SHA-256 may be anybody's: a worker that may not read images has none to add.
    certain = [record for record in records if record.sha256] or records
    prompts = {record.prompt or "" for record in certain}
    return prompts.pop() if len(prompts) == 1 else ""


async def _show_page(_: Request) -> FileResponse:
    return FileResponse(_PAGE / "index.html")


@web.middleware
async def _errors_as_json(request: Request, handler: Handler) -> StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        why = validation.sentence(error)
        status = 400
    except sqlite3.Error as error:
        why = f"The index of the gallery cannot be read: {error}"
        status = 503
    except (DamagedImageError, FleetError) as error:
        why = str(error)
        status = 415 if isinstance(error, DamagedImageError) else 503
    return _answer({"error": redaction.message(why)}, status)


def _answer(value: Any, status: int = 200) -> Response:
    """JSON of which no text controls anything."""
    return web.json_response(_printable(value), status=status)


#: Beyond it, JavaScript rounds whole numbers.
_LARGEST_NUMBER = 2**53


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return redaction.printable(value)
    if isinstance(value, dict):
        return {
            redaction.printable(name): _printable(each) for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_printable(each) for each in value]
    if isinstance(value, int) and value > _LARGEST_NUMBER:
        return str(value)  # a seed
    return value


_DRAWING = (
    "campaign",
    "prompt",
    "negative_prompt",
    "model",
    "sampler",
    "steps",
    "cfg_scale",
    "clip_skip",
    "width",
    "height",
    "seed",
    "metadata",
)


def _as_job(record: Record) -> JSONDict:
    """A job for `load` that draws the image again; without its id, whose image is stored."""
    known = record.model_dump(mode="json", include={*_DRAWING}, exclude_defaults=True)
    names = {"sampler": "sampler_name"}
    return {names.get(name, name): known[name] for name in _DRAWING if name in known}
