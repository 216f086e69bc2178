"""The Prometheus client with a fake server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import pytest
from aiohttp import web

from fleet.monitor import prometheus, rates
from imagefleet import errors

NOON = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)

Serve = Callable[[web.Response], Awaitable[str]]


@pytest.fixture
def asked() -> list[str]:
    """The queries that the server got."""
    return []


@pytest.fixture
async def serve(asked: list[str]) -> AsyncIterator[Serve]:
    """Starts a server that always sends the same response; returns its URL."""
    runners = []

    async def start(answer: web.Response) -> str:
        async def handle(request: web.Request) -> web.Response:
            asked.append(str((await request.post())["query"]))
            # A response is sent once.
            return web.Response(
                status=answer.status, text=answer.text, content_type=answer.content_type
            )

        app = web.Application()
        app.router.add_post("/api/v1/{what}", handle)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/"

    yield start
    for runner in runners:
        await runner.cleanup()


def response_of(kind: str, result: object) -> web.Response:
    return web.json_response(
        {"status": "success", "data": {"resultType": kind, "result": result}}
    )


async def test_a_vector_is_read_without_nan_and_infinity(serve: Serve):
    url = await serve(
        response_of(
            "vector",
            [
                {"metric": {"gpu": "a"}, "value": [1.5, "2.5"]},
                {"metric": {"gpu": "b"}, "value": [1.5, "NaN"]},
                {"metric": {"gpu": "c"}, "value": [1.5, "+Inf"]},
            ],
        )
    )
    async with prometheus.connected(url) as server:
        (series,) = await server.at("up", NOON)
    assert (series.labels, series.last) == ({"gpu": "a"}, 2.5)


@pytest.mark.parametrize(
    ("response", "kind", "sentence"),
    [
        (
            (400, '{"status": "error", "error": "parse error"}'),
            errors.SetupError,
            "parse error",
        ),
        (
            (404, "<html>no such page"),
            errors.SetupError,
            "HTTP 404: <html>no such page",
        ),
        ((200, "[]"), errors.SetupError, "HTTP 200"),
        ((503, "starting"), errors.TransientError, "HTTP 503: starting"),
    ],
)
async def test_an_error_response_is_one_sentence(
    serve: Serve,
    response: tuple[int, str],
    kind: type[errors.FleetError],
    sentence: str,
):
    status, text = response
    url = await serve(web.Response(status=status, text=text))
    async with prometheus.connected(url) as server:
        with pytest.raises(kind, match=sentence):
            await server.at("up", NOON)


@pytest.mark.parametrize(
    ("url", "kind", "sentence"),
    [
        ("http://127.0.0.1:1", errors.TransientError, "does not answer"),
        ("nowhere", errors.SetupError, "not a Prometheus URL"),
    ],
)
async def test_a_missing_server_is_one_sentence(
    url: str, kind: type[errors.FleetError], sentence: str
):
    async with prometheus.connected(url) as server:
        with pytest.raises(kind, match=sentence):
            await server.at("up", NOON)


@pytest.mark.parametrize(
    ("fleet", "warning"),
    [
        ("acne/jobs", "no worker of the fleet acne/jobs; did you mean 'acme/jobs'?"),
        (
            "zzz",
            "no worker of the fleet zzz; --fleet chooses another, such as acme/jobs, other",
        ),
        ("acme/jobs", ""),
        (None, ""),
    ],
)
async def test_a_mistyped_fleet_is_not_one_that_stands_still(
    serve: Serve, capsys, fleet: str | None, warning: str
):
    known = [
        {"metric": {"fleet": each}, "value": [1, "1"]}
        for each in ("other", "acme/jobs")
    ]
    async with prometheus.connected(
        await serve(response_of("vector", known)), fleet
    ) as server:
        await rates.warn_of_unknown_fleet(server)
    said = capsys.readouterr().err
    assert warning in said
    assert bool(said) == bool(warning)
