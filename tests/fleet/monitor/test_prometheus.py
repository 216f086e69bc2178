"""The Prometheus client with a fake server."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web

from fleet.monitor import prometheus, rates
from fleet.report import figures
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
    return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}})


async def test_a_vector_is_read_without_nan_and_infinity(serve: Serve) -> None:
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


async def test_a_range_is_read(serve: Serve) -> None:
    matrix = await serve(
        response_of("matrix", [{"metric": {}, "values": [[1, "1"], [2, "NaN"], [3, "3"]]}])
    )
    async with prometheus.connected(matrix) as server:
        (series,) = await server.over("up", NOON, NOON + timedelta(seconds=2), 1)
    assert series.points == ((1.0, 1.0), (3.0, 3.0))


@pytest.mark.parametrize(
    ("response", "kind", "sentence"),
    [
        ((400, '{"status": "error", "error": "parse error"}'), errors.SetupError, "parse error"),
        ((404, "<html>no such page"), errors.SetupError, "HTTP 404: <html>no such page"),
        ((200, "[]"), errors.SetupError, "HTTP 200"),
        ((503, "starting"), errors.TransientError, "HTTP 503: starting"),
    ],
)
async def test_an_error_response_is_one_sentence(
    serve: Serve, response: tuple[int, str], kind: type[errors.FleetError], sentence: str
) -> None:
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
) -> None:
    async with prometheus.connected(url) as server:
        with pytest.raises(kind, match=sentence):
            await server.at("up", NOON)


@pytest.mark.parametrize("fleet", ["acme/jobs", None])
async def test_every_query_asks_for_the_fleet_alone(
    serve: Serve, asked: list[str], fleet: str | None
) -> None:
    async with prometheus.connected(await serve(response_of("vector", [])), fleet) as server:
        await rates.fleet_rates(server)
        await rates.worker_rates(server)
        await figures.read_metrics(server, NOON, NOON + timedelta(hours=1))

    # One asks which fleets there are, to say whose workers are left out.
    queries = [query for query in asked if "count by (fleet)" not in query]
    assert len(asked) - len(queries) == (0 if fleet is None else 2)
    assert len(queries) > 20
    for query in queries:
        selectors = re.findall(r"imagefleet_\w+(\{[^}]*\})?", query)
        assert "$fleet" not in query
        assert selectors
        if fleet is None:
            assert "fleet=" not in query
        else:
            assert all('fleet="acme/jobs"}' in each for each in selectors), query
