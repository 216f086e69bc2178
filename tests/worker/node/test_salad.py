import asyncio

import pytest
from aiohttp import web

from imagefleet import errors
from worker.node import salad
from worker.node.salad import SaladMetadata


async def test_each_call_is_one_that_the_service_accepts(
    salad_metadata_service,
):
    metadata = SaladMetadata(salad_metadata_service.url + "/")
    assert await metadata.token() == "header.claims.signature"
    await metadata.reallocate("too slow")
    assert salad_metadata_service.reasons == ["too slow"]


async def test_no_proxy_comes_between(salad_metadata_service, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert (
        await SaladMetadata(salad_metadata_service.url).token()
        == "header.claims.signature"
    )


async def test_long_reasons_are_cut(
    salad_metadata_service,
):
    await SaladMetadata(salad_metadata_service.url).reallocate("x" * 2000)

    assert salad_metadata_service.reasons == ["x" * 1000]


async def slow(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def forbidden(_: web.Request) -> web.StreamResponse:
    return web.json_response({"detail": "not you"}, status=403)


async def failing(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="<html>nginx</html>", content_type="text/html")


async def a_page(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>router</html>", content_type="text/html")


async def moved(_: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"})


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (slow, "does not answer"),
        (forbidden, "403 Forbidden: not you"),
        (failing, "500"),
        (a_page, "answers"),
        (moved, "302"),
    ],
)
async def test_every_other_answer_is_a_transient_error(
    broken, says: str, salad_metadata_service
):
    salad_metadata_service.broken = broken
    # A short limit is for what never answers: another answer may take any time.
    limit = {"timeout_seconds": 0.2} if broken is slow else {}
    metadata = SaladMetadata(salad_metadata_service.url, **limit)

    for call in (
        metadata.token(),
        metadata.reallocate("slow"),
    ):
        with pytest.raises(errors.TransientError, match=says):
            await call


async def test_a_missing_service_is_a_transient_error():
    with pytest.raises(errors.TransientError, match="does not answer"):
        await SaladMetadata("http://127.0.0.1:9").token()


def test_it_is_used_only_on_saladcloud_and_where_a_variable_names_it(
    monkeypatch,
):
    assert salad.find_metadata() is None
    monkeypatch.setenv("SALAD_METADATA_URL", "http://127.0.0.1:1")
    assert salad.find_metadata() is not None
    monkeypatch.delenv("SALAD_METADATA_URL")
    monkeypatch.setenv("SALAD_MACHINE_ID", "6f1c")
    assert salad.find_metadata() is not None
