"""Proxies of the environment, and servers whose certificates nobody here knows."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import aiohttp
import pytest
import trustme
from aiohttp import web
from prometheus_client import CollectorRegistry
from yarl import URL

from fleet.monitor import prometheus
from fleet.salad.client import SaladClient
from fleet.webhooks import endpoint
from imagefleet import errors, redaction
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import proxies, push
from worker.files.download import HttpSource

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch) -> None:
    for name in VARIABLES:
        # Set first, so that what the test makes of it is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def proxy() -> AsyncIterator[str]:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text=f"proxy for {request.host}")

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def fetch(address: str) -> str:
    async with proxies.session() as session, session.get(address) as response:
        return await response.text()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
async def test_requests_go_through_the_proxy_that_any_variable_names(
    monkeypatch, proxy: str, name: str
):
    monkeypatch.setenv(name, proxy)
    assert await fetch("http://nowhere.invalid/x") == "proxy for nowhere.invalid"


async def test_the_proxy_of_one_scheme_comes_before_that_of_all_and_hosts_are_excluded(
    monkeypatch, proxy: str
):
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "direct.invalid")
    assert await fetch("http://nowhere.invalid/x") == "proxy for nowhere.invalid"
    with pytest.raises(aiohttp.ClientConnectorDNSError):
        await fetch("http://direct.invalid/x")


@pytest.mark.parametrize("name", ["ALL_PROXY", "HTTPS_PROXY", "http_proxy"])
def test_a_socks_proxy_is_refused_without_its_password(monkeypatch, name: str):
    monkeypatch.setenv(name, "socks5h://me:secret@proxy:1080")
    with pytest.raises(
        errors.SetupError, match=r"a SOCKS proxy for https?://"
    ) as caught:
        proxies.through_proxy()
    assert "secret" not in caught.value.message


@pytest.fixture
async def untrusted() -> AsyncIterator[str]:
    """The host and port of a server whose certificate is of an authority of its own."""
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response()

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def of_azure(host: str) -> None:
    address = f"AccountName=a;AccountKey=YQ==;BlobEndpoint=https://{host};QueueEndpoint=https://{host}"
    async with open_storage(StorageSettings(storage=address)) as storage:
        await storage.check()


async def of_salad(host: str) -> None:
    async with proxies.session() as session:
        await SaladClient(session, f"https://{host}", "key").groups()


async def of_a_model(host: str) -> None:
    async with HttpSource(f"https://{host}/x", requires_https=True).opened(0, None):
        pass


async def of_prometheus(host: str) -> None:
    async with prometheus.connected(f"https://{host}") as server:
        await server.at("up", datetime.now(UTC))


async def of_a_push(host: str) -> None:
    async with proxies.session() as session:
        await push.Pusher(session, CollectorRegistry(), URL(f"https://{host}")).push()


CLIENTS = [of_azure, of_salad, of_a_model, of_prometheus, of_a_push]


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_certificate_of_an_unknown_authority_is_for_the_operator_to_mend(
    untrusted: str, client: Callable[[str], Awaitable[None]]
):
    with pytest.raises(errors.SetupError) as caught:
        await client(untrusted)
    assert "the certificate of 127.0.0.1 is not trusted (" in caught.value.message
    assert caught.value.message.endswith("in SSL_CERT_FILE")


async def test_a_webhook_says_whose_certificate_is_not_trusted(untrusted: str):
    async with proxies.session() as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError) as caught:
            await session.get(f"https://{untrusted}")
    assert "in SSL_CERT_FILE" in redaction.reason(caught.value)  # what `endpoint` says
    assert endpoint.redaction is redaction


async def test_the_authority_that_the_variable_names_is_trusted(tmp_path, monkeypatch):
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert len(ssl.create_default_context().get_ca_certs()) == 1
