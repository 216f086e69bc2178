"""The HTTP server: who is let in, what is where, how errors are told, and what is counted."""

import contextlib
import time
from asyncio import Semaphore
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from weakref import WeakValueDictionary

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web import (
    AppKey,
    Application,
    HTTPException,
    HTTPTemporaryRedirect,
    Request,
    Response,
    RouteTableDef,
    StreamResponse,
)
from prometheus_client import CollectorRegistry, Gauge, Histogram

from gateway import a1111, lists, openai, work
from gateway.clients import Client, Door
from gateway.jobs.desk import Desk
from gateway.models import Models, UnknownModelError
from gateway.settings import GatewaySettings
from gateway.work import CLIENT, DESK, reason_of
from imagefleet import redaction
from imagefleet.aio import Fleet
from imagefleet.errors import JobError, TransientError
from imagefleet.files import kinds, styles
from imagefleet.http import description, sent_images
from imagefleet.http.bodies import Bodies
from imagefleet.http.refused import Refused
from imagefleet.job import settings_table
from imagefleet.job.message import Job
from imagefleet.telemetry import metrics, probes
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict

ROUTES = RouteTableDef()

_REGISTRY = AppKey("registry", CollectorRegistry)

#: What needs no key, since it says nothing of anybody.
_OPEN = ("/live", "/docs", "/openapi.json")

#: Of answers, so that no page of another site reads or frames them.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}

#: OpenAI's names of its errors.
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

#: Requests of one client at once, beside those that wait for an image each.
_MORE_REQUESTS = 64

#: Requests of one client that are answered at once, of those that wait for no image.
_POLLS = 4

_SERVER_ERROR = 500
_ACCEPTED = 202


class Gateway:
    """Lets clients in, answers errors, and counts."""

    def __init__(self, fleet: Fleet, settings: GatewaySettings) -> None:
        self._door = Door(settings.clients, settings.host, settings.cors_allow_origins)
        self._requests: Counter[Client] = Counter()
        self._polls = WeakValueDictionary[Client, Semaphore]()
        own = None if settings.model is None else settings.model.rpartition("/")[2]
        models = Models(
            fleet.storage, settings.model_alias, own and kinds.MODEL.stem(own)
        )
        self.desk = Desk(
            fleet,
            models,
            wait_seconds=settings.wait_seconds,
            worker_seconds=settings.worker_seconds,
            has_worker=settings.model is not None,
        )
        registry = metrics.LabelledRegistry({"fleet": settings.fleet_name})
        Gauge(
            "imagefleet_gateway_waiting_jobs",
            "Jobs that are waited for.",
            registry=registry,
        ).set_function(lambda: len(self.desk.tickets))
        self._seconds = Histogram(
            "imagefleet_gateway_request_seconds",
            "Seconds from a request to its answer, by its path and status.",
            ["path", "status"],
            registry=registry,
            buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
        )
        # As A1111 does for its programs, some of which write a slash at the end.
        slashes = web.normalize_path_middleware(
            append_slash=False,
            remove_slash=True,
            redirect_class=HTTPTemporaryRedirect,
        )
        self.app = Application(middlewares=[slashes, self._answer])
        self.app[work.BODIES] = Bodies()
        self.app[DESK] = self.desk
        self.app[_REGISTRY] = registry
        self.app[a1111.OPTIONS] = {}
        defaults = dict(settings_table.DEFAULTS[settings_table.A1111])
        if settings.native_size:
            del defaults["width"], defaults["height"]
        self.app[a1111.DEFAULTS] = defaults
        path = settings.styles_file
        self.app[lists.STYLES] = {} if path is None else dict(styles.read(path))
        for routes in (a1111.ROUTES, lists.ROUTES, openai.ROUTES, ROUTES):
            self.app.add_routes(routes)
        # Made once: who asks for them needs no key, and each takes some 20 ms.
        page = description.page(self.app)
        document = description.openapi(self.app, Job)
        self.app.router.add_get("/docs", lists.fixed(page, "text/html"))
        self.app.router.add_get("/openapi.json", lists.fixed(document))

    @web.middleware
    async def _answer(self, request: Request, handler: Handler) -> StreamResponse:
        """Lets the request in, and answers errors in the form of its API."""
        resource = request.match_info.route.resource
        path = resource.canonical if resource else "(none)"
        started = time.monotonic()
        cors = self._door.pages.cors(request)
        try:
            if request.method == "OPTIONS" and cors:
                response: StreamResponse = Response()
            elif path in _OPEN:
                response = await handler(request)
            else:
                response = await self._let_in(request, handler)
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            response = _error(request, error)
        response.headers.update(_HEADERS | cors)
        self._seconds.labels(path, str(response.status)).observe(
            time.monotonic() - started
        )
        return response

    async def _let_in(self, request: Request, handler: Handler) -> StreamResponse:
        """Answers a client's request, if it has not too many others."""
        client = request[CLIENT] = self._door.client(request)
        if self._requests[client] >= client.max_waiting + _MORE_REQUESTS:
            raise Refused(429, "too many requests at once", {"Retry-After": "1"})
        self._requests[client] += 1
        place: AbstractAsyncContextManager[object] = contextlib.nullcontext()
        if request.method == "GET":  # who polls waits for itself
            place = self._polls.setdefault(client, Semaphore(_POLLS))
        try:
            async with place:
                return await handler(request)
        finally:
            self._requests[client] -= 1


@ROUTES.get("/jobs/{id}")
async def _job(request: Request) -> Response:
    """Tells what has become of a job of the client's campaign, and where its images are."""
    facts = await request.app[DESK].facts(
        request[CLIENT].campaign, request.match_info["id"]
    )
    if facts.status == "unknown":
        raise Refused(404, f"there is no job {facts.id}")
    images = [f"/jobs/{facts.id}/{index}" for index in range(len(facts.blobs))]
    return web.json_response(
        {
            "id": facts.id,
            "status": facts.status,
            "reason": reason_of(facts),
            "images": images,
        }
    )


@ROUTES.get("/jobs/{id}/{index:[0-9]{1,4}}")
async def _image(request: Request) -> Response:
    """An image of a job of the client's campaign."""
    desk = request.app[DESK]
    index = int(request.match_info["index"])
    facts = await desk.facts(request[CLIENT].campaign, request.match_info["id"])
    if index >= len(facts.blobs):
        raise Refused(404, f"job {facts.id} has no image {index}")
    return Response(
        body=await desk.image(facts, index),
        content_type=sent_images.content_type(facts.blobs[index]),
    )


@ROUTES.get("/metrics")
async def _metrics(request: Request) -> Response:
    """The gateway's metrics, for Prometheus."""
    return Response(
        body=metrics.render(request.app[_REGISTRY]),
        headers={"Content-Type": metrics.CONTENT_TYPE},
    )


@ROUTES.get("/live")
async def _live(_: Request) -> Response:
    """Says that the gateway runs."""
    return Response(text="live\n")


def _error(request: Request, error: Exception) -> Response:
    """The answer to what went wrong, in the form of the request's API; no secret is in it."""
    headers = {}
    match error:
        case Refused():
            status = error.status
            message = error.message
            headers = error.headers
        case JobError():
            status = 422
            message = error.message
        case TransientError():
            status = 503
            message = "the storage does not answer now: try again"
            headers = {"Retry-After": "5"}
        case HTTPException():
            status = error.status
            message = error.reason
        case _:
            status = _SERVER_ERROR
            message = "an error of the gateway, whose log has more of it"
    if status >= _SERVER_ERROR and not isinstance(error, Refused):
        log.error(f"{request.path}: {error}", action="request_failed", exc_info=error)
    message = redaction.message(message)
    if request.path.startswith("/v1"):
        # Its client takes 202 for images, and repeats most errors of others: it would draw again.
        status = 504 if status == _ACCEPTED else 400 if status == 422 else status  # noqa: PLR2004
        if "Retry-After" not in headers:
            headers = {**headers, "x-should-retry": "false"}
        kind = "server_error" if status >= _SERVER_ERROR else "invalid_request_error"
        body: JSONDict = {
            "error": {
                "message": message,
                "type": _KINDS.get(status, kind),
                "param": None,
                "code": getattr(error, "code", None),
            }
        }
    else:
        if isinstance(error, UnknownModelError) and status != _SERVER_ERROR:
            status = 422
        name = "RuntimeError" if status == _SERVER_ERROR else type(error).__name__
        # A1111 tells what went wrong in its code in `errors`, and of what is sent in `detail`.
        body = {"error": name, "detail": message, "body": "", "errors": message}
    return web.json_response(body, status=status, headers=headers)


@contextlib.asynccontextmanager
async def serving(
    fleet: Fleet, settings: GatewaySettings
) -> AsyncIterator[tuple[Gateway, int]]:
    """Serves while the block runs; yields the port that was chosen."""
    gateway = Gateway(fleet, settings)
    # A handler whose client hangs up is cancelled, and with it its job.
    async with probes.listening(
        gateway.app,
        settings.host,
        settings.port,
        "the gateway",
        handler_cancellation=True,
        auto_decompress=False,
    ) as port:
        try:
            yield gateway, port
        finally:
            gateway.desk.stop()
