"""A gateway on a port of this machine, in front of either storage, and its fleet's worker."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.stand_in import StandInEngine
from gateway import server
from gateway.settings import GatewaySettings
from imagefleet import aio, concurrency
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from messages import draw_unless_broken
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

KEYS = {"alice": "alice-key", "bob": "bob-key"}


@dataclass(frozen=True, slots=True)
class Served:
    """A running gateway."""

    url: str
    port: int
    gateway: server.Gateway
    storage: Storage
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, **terms: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **terms) as response:
            return response.status, json.loads(await response.read() or "null")

    async def get(self, path: str, **terms: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **terms) as response:
            return response.status, await response.read()

    def paths(self) -> list[str]:
        """All paths without parameters that are read."""
        routes = self.gateway.app.router.routes()
        found = [
            each.resource.canonical
            for each in routes
            if each.method == "GET" and each.resource
        ]
        return [path for path in found if "{" not in path]


@pytest.fixture
def clients_file(tmp_path) -> Path:
    """Two clients, each with a campaign of its name."""
    lines = [
        {
            "name": name,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "campaign": name,
            "max_waiting": 8,
        }
        for name, key in KEYS.items()
    ]
    path = tmp_path / "clients.yaml"
    path.write_text(json.dumps(lines))
    return path


@pytest.fixture
async def serve(
    tmp_path, monkeypatch, storage_settings: StorageSettings
) -> AsyncIterator[Callable[..., Any]]:
    """Starts a gateway, and a worker with a stand-in engine unless *works* is false."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stored = {
        name: getattr(storage_settings, name)
        for name in storage_settings.model_fields_set
    }
    async with AsyncExitStack() as stack:

        async def start(*, works: bool = True, **changes: Any) -> Served:
            settings = GatewaySettings(**{**stored, "port": 0, **changes})
            fleet = await stack.enter_async_context(aio.Fleet(open_storage(settings)))
            await fleet.storage.create()
            gateway, port = await stack.enter_async_context(
                server.serving(fleet, settings)
            )
            await stack.enter_async_context(concurrency.beside(gateway.desk.run()))
            if works:
                await stack.enter_async_context(
                    concurrency.beside(_work(stored, tmp_path))
                )
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector)
            )
            return Served(
                f"http://127.0.0.1:{port}", port, gateway, fleet.storage, session
            )

        yield start


async def _work(stored: JSONDict, folder: Path) -> None:
    settings = WorkerSettings(
        **stored, model=Path("stand-in"), cache=folder / "cache", name="test-worker"
    )
    stop = asyncio.Event()
    async with open_storage(settings) as opened:
        pipeline = Pipeline(
            opened, lambda: StandInEngine(draw=draw_unless_broken), settings
        )
        try:
            await asyncio.shield(
                running := asyncio.ensure_future(pipeline.run(stop, asyncio.Event()))
            )
        finally:
            stop.set()
            await running
