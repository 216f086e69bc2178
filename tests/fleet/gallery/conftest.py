"""A gallery over HTTP, and a headless browser to look at it."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

import polling
from cli import console
from fleet.gallery import campaign as campaigns
from fleet.gallery import server
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import probes
from in_browser import browser

#: Without a browser its tests are skipped, except where it must be there.
BROWSER_REQUIRED = bool(os.environ.get("REQUIRE_BROWSER"))


@dataclass(frozen=True)
class Served:
    """A gallery that runs; *client* asks it as its own page does."""

    url: str
    client: aiohttp.ClientSession

    async def get(self, path: str, **query: Any) -> Any:
        async with self.client.get(path, params=query) as answer:
            assert answer.status == 200, (answer.status, await answer.text())
            return await answer.json()

    async def state_when(self, condition: Callable[[Any], bool], **query: Any) -> Any:
        """The first state that meets the condition."""
        return await polling.until(lambda: self.get("/api/state", **query), condition)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch) -> None:
    for name in ("LOCAL_POLL_SECONDS", "REMOTE_POLL_SECONDS"):
        monkeypatch.setattr(campaigns, name, 0.1)


@pytest.fixture
def serve() -> Serve:
    """Serves the gallery of a storage, in this process."""

    @contextlib.asynccontextmanager
    async def serving(
        settings: StorageSettings,
        *,
        host: str = "127.0.0.1",
        campaign: str | None = None,
    ) -> AsyncIterator[Served]:
        async with (
            console.connected(settings) as fleet,
            probes.listening(
                server.Gallery(fleet.storage, host, campaign).application(),
                host,
                0,
                "the gallery",
            ) as port,
        ):
            url = f"http://127.0.0.1:{port}"
            async with aiohttp.ClientSession(url) as client:
                yield Served(url, client)

    return serving


@pytest.fixture(scope="session")
def chromium() -> Iterator[browser.Browser]:
    """One browser for all tests; each opens a page of its own."""
    program = browser.find()
    if program is None:
        reason = f"no browser: one of {', '.join(browser.BROWSERS)} is needed"
        if BROWSER_REQUIRED:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with browser.running(program) as started:
        yield started
